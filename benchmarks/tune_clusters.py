"""Time the cluster kernel beside the two Triton kernels, and keep where it is faster as a table.

    python -m benchmarks.tune_clusters [--out clusters.jsonl] [--sites o,down] [--ranks 16,32]
    python -m benchmarks.tune_clusters --table clusters.jsonl ...

Both are timed in a graph on cold operands, after their bits were compared. The second form writes
`src/lorafold/data/clusters.json`, where `lorafold.ops.cluster_choice` looks calls up: per measured
shape the fastest choice, or null where the Triton kernels are. The first line of such a file says
on what it was measured, the others hold `row` [site, rank, rows,
adapters], `triton` and `times` {"t<rows of a tile> <choice>": microseconds}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lorafold
from benchmarks.record import describe
from benchmarks.tune import EVERY, bits_of, run_sized
from lorafold.bench import SITES, Workload, graph_us
from lorafold.bench.measure import call_site
from lorafold.ops import cluster_choice, tiles
from lorafold.ops.cluster import compile_cubin
from lorafold.ops.cluster_choice import Choice, Shape, candidates, shape_of_call
from lorafold.ops.launch import prepare_call

__all__ = ["entry", "main", "parse", "table"]

LOADS = (
    (1, 8), (4, 4), (8, 8), (16, 16), (32, 32), (64, 8), (64, 64), (128, 8), (256, 8),
)  # fmt: skip
EXPERT_LOADS = ((8, 128), (64, 128), (512, 128))
"""(rows, adapters) of the calls that are timed; each expert of an adapter is a key of its own."""

TABLE = Path(lorafold.__file__).parent / "data" / "clusters.json"
MARGIN = 0.03
"""A choice must be this much faster than the Triton kernels: less is noise."""


def parse(text: str) -> tuple[int, Choice]:
    """The height of a tile and the choice, from their name."""
    match = re.fullmatch(r"t(\d+) C(\d+) G(\d+) W(\d+) X(\d+)( mma)?", text)
    if match is None:
        raise SystemExit(f"not a choice: {text!r}")
    height, cluster, groups, warpgroups, parts = map(int, match.groups()[:5])
    return height, Choice(cluster, groups, warpgroups, not match[6], parts)


def entry(record: dict[str, Any]) -> tuple[list[int], list[Any] | None] | None:
    """A measured shape and what was fastest in the tiles that a plan has there; None where the
    kernel was not tried with them.
    """
    name, rank, rows, adapters = record["row"]
    site, height = EVERY[name], tiles.plan_rows(rows, adapters)
    times = {parse(text): us for text, us in record["times"].items()}
    own = {choice: us for (tile_rows, choice), us in times.items() if tile_rows == height}
    if not own:
        return None
    num_tiles = tiles.max_tiles(rows, adapters, height)
    shape = shape_of_call(num_tiles, height, site.k_in, site.n_outs, rank)
    choice = min(own, key=own.__getitem__)
    is_faster = own[choice] < record["triton"] * (1 - MARGIN)
    return list(shape), list(dataclasses.astuple(choice)) if is_faster else None


def table(records: Iterable[dict[str, Any]]) -> str:
    """The table as text, one entry a line; of a shape that was measured twice the last."""
    records = list(records)
    described = next((r for r in records if "device" in r), {})
    head = {k: described.get(k, "") for k in ("device", "date", "torch")}
    found = [one for record in records if "times" in record and (one := entry(record))]
    entries = {tuple(one[0]): one for one in found}
    lines = ",\n".join(map(json.dumps, entries.values()))
    return f'{json.dumps(head)[:-1]}, "clusters": [\n{lines}\n]}}\n'


def check(load: Workload, choice: Choice) -> None:
    """Stop where there is no such kernel, or where it folds other bits than the Triton kernels."""
    call, plan = load.calls[0], load.plan
    rows = plan.tile_key, plan.tile_rows
    if len(prepare_call(call.x, call.outs, load.rank, "mma", *rows, cluster=choice).launches) != 1:
        raise SystemExit("there is no cluster kernel on this machine")
    folds = partial(call_site, load, 0, "mma"), partial(run_sized, load, cluster=choice)
    if not torch.equal(*(bits_of(load, fold) for fold in folds)):
        raise SystemExit(
            f"{load.site.name} R{load.rank} {load.num_rows}/{load.num_adapters}: {choice} gives "
            "other bits"
        )


def measure(site: str, rank: int, rows: int, adapters: int) -> dict[str, Any]:
    """Times of the Triton kernels and of all candidates, and of the best one's other details."""
    load = Workload(EVERY[site], rank, rows, adapters)
    height, k_in, n_outs = load.plan.block_rows, EVERY[site].k_in, EVERY[site].n_outs
    triton = graph_us([partial(call_site, load, i, "mma") for i in range(len(load.calls))], 5)
    times: dict[Choice, float] = {}

    def attempt(choice: Choice) -> None:
        if Shape(height, k_in, n_outs, rank, choice).fits:
            check(load, choice)
            calls = [partial(run_sized, load, i, cluster=choice) for i in range(len(load.calls))]
            times[choice] = round(graph_us(calls, 5), 2)

    for choice in candidates(height, k_in, n_outs, rank) if height <= 16 else ():
        attempt(choice)
    if times:
        for details in DETAILS:
            attempt(dataclasses.replace(min(times, key=times.__getitem__), **details))
    return {
        "row": [site, rank, rows, adapters],
        "triton": round(triton, 2),
        "floor": round(load.floor_us, 2),
        "times": {f"t{height} {choice}": us for choice, us in times.items()},
    }


DETAILS: tuple[dict[str, Any], ...] = ({"x_parts": 4}, {"wgmma": False, "x_parts": 4})


def compile_all(work: Iterable[tuple[str, int, int, int]]) -> int:
    """Compile all that may be tried, side by side; they stay on the disk."""
    shapes = {
        Shape(height, EVERY[site].k_in, EVERY[site].n_outs, rank, one)
        for site, rank, rows, adapters in work
        if (height := tiles.plan_rows(rows, adapters)) <= 16
        for choice in candidates(height, EVERY[site].k_in, EVERY[site].n_outs, rank)
        for one in (choice, *(dataclasses.replace(choice, **details) for details in DETAILS))
    }
    with ThreadPoolExecutor() as threads:
        return len(list(threads.map(compile_cubin, shapes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("clusters.jsonl"))
    parser.add_argument("--sites", default=",".join(EVERY))
    parser.add_argument("--ranks", default="16,32,64")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="write the table")
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    if args.table:
        lines = [line for file in args.table for line in file.read_text().splitlines()]
        TABLE.write_text(table(map(json.loads, lines)))
        return
    cluster_choice._table = list  # the Triton kernels, whatever is in the table
    started = time.monotonic()
    work = [
        (site, int(rank), *load)
        for site in args.sites.split(",")
        for rank in args.ranks.split(",")
        for load in (LOADS if site in SITES else EXPERT_LOADS)
    ]
    print(f"{compile_all(work)} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
    args.out.write_text(json.dumps(describe("clusters", [])) + "\n")
    for row in work:
        if time.monotonic() - started > args.seconds:
            print("out of time")
            break
        record = measure(*row)
        with args.out.open("a") as file:
            print(json.dumps(record), file=file)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
