"""The dense operators over the sites of a Llama-3-8B layer: device time beside the memory floor.

    python -m benchmarks.ops [--sites o,qkv] [--ranks 16,64] [--numerics mma,gemv] [--json FILE]

Each call is first checked bit for bit against the CPU reference on sampled rows; a call that
differs stops the run. Times are medians inside a CUDA graph, operands cold. The floor is the bytes
that must move (each adapter in use once, x once, the outputs read and written once) over 4.3 TB/s.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.sites import SITES, Workload
from benchmarks.timing import graph_us
from lorafold.ops import apply_lora_bgmv

__all__ = ["LOADS", "check", "main"]

LOADS = ((1, 8), (8, 8), (64, 8), (64, 64), (256, 8), (2048, 8))


def call_site(load: Workload, index: int, numerics: str) -> None:
    call = load.calls[index]
    apply_lora_bgmv(
        call.routes,
        call.x,
        call.outs,
        load.slots,
        plan=load.plan,
        numerics=numerics,
        scratch=load.scratch,
    )


def check(load: Workload, numerics: str, rows: int = 2) -> int:
    """Compare sampled rows of one call with the reference; the number of elements compared."""
    call = load.calls[0]
    sample = torch.linspace(0, load.num_rows - 1, min(rows, load.num_rows)).int().tolist()
    expected = {row: load.truth(call, row, numerics) for row in sample}
    call_site(load, 0, numerics)
    compared = 0
    for row, truths in expected.items():
        for out, truth in zip(call.outs, truths, strict=True):
            if not torch.equal(out[row].cpu().view(torch.int16), truth.view(torch.int16)):
                raise SystemExit(f"{load.site.name} R{load.rank} row {row}: bits differ")
            compared += truth.numel()
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", default=",".join(SITES))
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--numerics", default="mma")
    parser.add_argument("--json")
    args = parser.parse_args()
    results = []
    for name in args.sites.split(","):
        for rank in map(int, args.ranks.split(",")):
            for rows, adapters in LOADS:
                load = Workload(SITES[name], rank, rows, adapters)
                record = {"site": name, "rank": rank, "rows": rows, "adapters": adapters}
                record["floor_us"] = round(load.floor_us, 2)
                for numerics in args.numerics.split(","):
                    record["elements"] = check(load, numerics)
                    us = graph_us(
                        [partial(call_site, load, i, numerics) for i in range(len(load.calls))]
                    )
                    record[f"{numerics}_us"] = round(us, 2)
                results.append(record)
                print(*(f"{k} {v:<7}" for k, v in record.items()), flush=True)
    record = {
        "benchmark": "ops",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rows": results,
    }
    print(json.dumps(record))
    if args.json:
        Path(args.json).write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
