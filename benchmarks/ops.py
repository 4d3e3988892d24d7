"""The dense operators over the sites of a Llama-3-8B layer: device time beside the memory floor.

    python -m benchmarks.ops [--sites o,qkv] [--ranks 16,64] [--peers] [--json [FILE]]

Each call is first checked bit for bit against the CPU reference on sampled rows; a call that
differs stops the run. Times are medians inside a CUDA graph, operands cold. The floor is the bytes
that must move (each adapter in use once, x once, the outputs read and written once) over 4.3 TB/s.
With --peers the same run times vLLM's and SGLang's kernels on copies of the same operands
(benchmarks/peers); theirs must agree with ours up to bf16 rounding, or they have no time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.record import add_json_option, describe, save
from lorafold.bench import SITES, Workload, call_site, check, geomean, graph_us, rounded

__all__ = ["LOADS", "main", "means"]

LOADS = ((1, 8), (8, 8), (64, 8), (64, 64), (256, 8), (2048, 8))
"""(rows, adapters) of a site's batches."""


def compile_site(work: tuple[str, int, Sequence[str], bool]) -> None:
    """Run everything of one site and rank once, so that Triton's cache has it."""
    site, rank, all_numerics, peers = work
    for rows, adapters in LOADS:
        load = Workload(SITES[site], rank, rows, adapters, repetitions=1)
        for numerics in all_numerics:
            call_site(load, 0, numerics)
        if peers:
            from benchmarks.peers.contest import run_peers_once

            run_peers_once(load)
    torch.cuda.synchronize()


def measure(load: Workload, all_numerics: Sequence[str], peers: bool) -> dict[str, Any]:
    """One row of the table."""
    record: dict[str, Any] = {
        "site": load.site.name,
        "rank": load.rank,
        "rows": load.num_rows,
        "adapters": load.num_adapters,
        "floor_us": rounded(load.floor_us),
    }
    for numerics in all_numerics:
        record["elements"] = check(load, numerics)
        calls = [partial(call_site, load, i, numerics) for i in range(len(load.calls))]
        record[f"{numerics}_us"] = rounded(graph_us(calls))
    if peers:
        from benchmarks.peers.contest import measure_peers

        record |= measure_peers(load, all_numerics[0])
        ours = record[f"{all_numerics[0]}_us"]
        times = [record[c] for c in ("vllm_us", "vllm_bi_us", "sglang_us") if record[c] is not None]
        record["of_best_peer"] = rounded(ours / min(times)) if times else None
    return record


def means(rows: Sequence[dict[str, Any]], ours: str) -> dict[str, float | None]:
    """Geometric means over all rows that have both: our time over each peer's, and over the floor.

    Example:
        >>> rows = [{"mma_us": 2.0, "floor_us": 1.0, "vllm_us": 4.0, "of_best_peer": 0.5}]
        >>> means(rows, "mma_us")
        {'floor': 2.0, 'vllm': 0.5, 'vllm_bi': None, 'sglang': None, 'best_peer': 0.5}
    """
    ratios: dict[str, float | None] = {}
    for name in ("floor", "vllm", "vllm_bi", "sglang"):
        column = f"{name}_us"
        both = [row[ours] / row[column] for row in rows if row.get(column)]
        ratios[name] = geomean(both)
    ratios["best_peer"] = geomean([r["of_best_peer"] for r in rows if r.get("of_best_peer")])
    return ratios


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", default=",".join(SITES))
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--numerics", default="mma", help="the first one meets the peers")
    parser.add_argument(
        "--peers", action="store_true", help="also time vLLM's and SGLang's kernels"
    )
    parser.add_argument("--processes", type=int, default=8, help="compile ahead in N processes")
    add_json_option(parser, "ops")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    all_numerics = args.numerics.split(",")
    keys = [(s, int(r)) for s in args.sites.split(",") for r in args.ranks.split(",")]
    started = time.monotonic()
    if args.processes > 1:
        work = [(site, rank, all_numerics, args.peers) for site, rank in keys]
        processes = min(args.processes, len(work))
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_site, work))
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    ours = f"{all_numerics[0]}_us"
    for site, rank in keys:
        for num_rows, adapters in LOADS:
            row = measure(Workload(SITES[site], rank, num_rows, adapters), all_numerics, args.peers)
            rows.append(row)
            shown = {k: v for k, v in row.items() if k != "peers"}
            print(*(f"{k} {v!s:<7}" for k, v in shown.items()), flush=True)
            for name, result in row.get("peers", {}).items():
                if isinstance(result, str):
                    print(f"    {name}: {result}", flush=True)
            record = describe("ops", rows, geomean=means(rows, ours), **_peers(args.peers))
            save(record, args.json)
    print(
        f"{time.monotonic() - started:.0f} s; geometric means of our time over: {means(rows, ours)}"
    )
    print(json.dumps(record))


def _peers(peers: bool) -> dict[str, Any]:
    if not peers:
        return {}
    from benchmarks.peers.fetch import VERSIONS

    return {"peer_versions": VERSIONS}


if __name__ == "__main__":
    main()
