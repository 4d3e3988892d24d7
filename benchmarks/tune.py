"""Time candidate block sizes of the shrink and the expand, and keep the best as a table.

    python -m benchmarks.tune [--out tune.json] [--sites o,down] [--ranks 16,64] [--loads 64x8]
    python -m benchmarks.tune --table tune.json ...

Shrinks and expands are timed in pairs, as a call runs them, in a graph on cold operands: shrinks
with a usual expand, expands with the best of them, then the best of both. The bits of all pairs are
compared on the same operands. The second form writes the best of such files to
`src/lorafold/data/tiles.json`, where `lorafold.ops.tiles` looks sizes up; the bit tests run every
entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import torch

import lorafold
from benchmarks.record import describe
from lorafold.bench import SITES, Site, Workload, graph_us
from lorafold.numerics import SEGMENT
from lorafold.ops import Plan, make_plan, tiles
from lorafold.ops.launch import routed_triton
from lorafold.ops.scratch import num_segments
from lorafold.ops.tiles import ExpandTile, ShrinkTile
from lorafold.route import tables_of

__all__ = ["expand_candidates", "main", "shrink_candidates"]

Pair = tuple[ShrinkTile, ExpandTile]

LOADS = ((1, 8), (8, 8), (64, 8), (64, 64), (256, 8), (2048, 8), (8192, 1))
"""(rows, adapters) of the calls that are tuned for."""

EXPERTS = (
    Site("expert_gate_up", 2048, (1536,)),
    Site("expert_down", 768, (2048,)),
)
"""The projections of Qwen3-30B-A3B's experts: each expert of an adapter is a key of its own."""

EXPERT_LOADS = (
    (64, 128), (512, 128), (2048, 128), (16384, 128), (512, 1024), (2048, 1024), (16384, 1024),
)  # fmt: skip

EVERY = SITES | {site.name: site for site in EXPERTS}

TABLE = Path(lorafold.__file__).parent / "data" / "tiles.json"

_KERNELS = "shrink", "expand"


def heights_of(rows: int, adapters: int) -> tuple[int, ...]:
    """Rows of a tile that are worth trying for that many rows per adapter."""
    average = rows // min(rows, adapters)
    return (8, 16) if average <= 16 else (16, 32) if average <= 64 else (32, 64)[average > 512 :]


_SHRINKS = {
    False: (
        (16, 128, 2, 4), (16, 256, 2, 3), (16, 512, 2, 2), (16, 1024, 2, 1), (32, 256, 4, 3),
        (64, 64, 4, 5), (64, 128, 4, 5), (64, 256, 4, 3), (64, 1024, 4, 1), (128, 64, 4, 4),
        (128, 128, 8, 3),
    ),
    True: (
        (16, 128, 2, 4), (16, 128, 4, 5), (16, 256, 2, 3), (32, 128, 4, 4), (64, 64, 4, 5),
        (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 8, 4), (64, 256, 4, 2),
        (128, 64, 4, 5), (128, 128, 8, 3), (256, 64, 8, 4),
    ),
}  # fmt: skip
"""Ranks, K, warps and stages, for low and for high tiles."""

_EXPANDS = {
    False: (
        (64, 1, 2, 1), (128, 1, 4, 1), (256, 1, 4, 1), (512, 1, 8, 1), (64, 4, 4, 3),
        (128, 4, 4, 2), (128, 4, 4, 3), (256, 2, 4, 2), (128, 4, 8, 3),
    ),
    True: (
        (256, 1, 4, 1), (64, 4, 4, 3), (64, 4, 4, 4), (128, 4, 4, 2), (128, 4, 4, 3),
        (128, 8, 8, 2), (128, 8, 8, 3), (128, 8, 8, 4),
    ),
}  # fmt: skip
"""Columns, blocks, warps and stages, likewise."""

_RUNS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)
"""Blocks of a run; how many it has is not compiled in."""


def shrink_candidates(tile_rows: int, rank: int, num_slices: int) -> list[ShrinkTile]:
    """Block sizes that fit the device and have work for their warps."""
    widest, is_high = max(16, tiles.next_power_of_2(rank * num_slices)), tile_rows > 16
    found = []
    for ranks, block_k, warps, stages in _SHRINKS[is_high]:
        tile = ShrinkTile(tile_rows, ranks, block_k, warps, stages, early=True)
        fits = tile.num_bytes <= tiles.SHARED_MEMORY and ranks * tile_rows <= 4096 * warps
        if ranks <= widest and fits:
            found += [tile] if block_k > 128 else []
            found.append(dataclasses.replace(tile, early=False))
    return found


def expand_candidates(tile_rows: int, rank: int) -> list[ExpandTile]:
    """Block sizes that fit the device and have work for their warps."""
    found, block_k = [], max(16, rank)
    for cols, blocks, warps, stages in _EXPANDS[tile_rows > 16]:
        size = stages * cols * 2 * (block_k + tile_rows)
        if size < tiles.SHARED_MEMORY and cols * max(tile_rows, block_k // 2) <= 4096 * warps:
            sizes = tile_rows, cols, blocks, block_k, warps, stages
            found += [
                ExpandTile(*sizes, ahead)
                for ahead in (True, False)
                if tile_rows > 16 or blocks == 1 or ahead
            ]
    return found


def with_runs(load: Workload, expands: Sequence[ExpandTile]) -> list[ExpandTile]:
    """The three best of these that take runs of blocks, with runs of other lengths."""
    best = [expand for expand in expands if expand.blocks > 1][:3]
    widest = max(load.site.n_outs)
    return [
        dataclasses.replace(expand, blocks=blocks)
        for expand in best
        for blocks in _RUNS
        if (blocks - 1) * expand.block_cols < widest
    ]


def may_pair(shrink: ShrinkTile, expand: ExpandTile) -> bool:
    """Not: a late shrink of whole segments before single blocks, which has two speeds, one of them
    poor; an early one before a run that would read ahead, which it then does not.
    """
    if expand.blocks == 1:
        return shrink.early or shrink.block_k < SEGMENT
    return not (shrink.early and expand.ahead) or expand.tile_rows <= 16


def loads_of(site: str) -> tuple[tuple[int, int], ...]:
    return LOADS if site in SITES else EXPERT_LOADS


def set_height(load: Workload, tile_rows: int) -> None:
    """Give a load a plan with tiles of this height."""
    empty = Plan.empty(load.num_rows, load.num_adapters, "cuda", block_rows=tile_rows)
    load.plan = make_plan(load.slots, load.num_adapters, plan=empty)


def run_sized(load: Workload, index: int = 0, **sizes: Any) -> None:
    """One call with given sizes, as `routed_triton` takes them."""
    call, plan = load.calls[index], load.plan
    tables = tuple(zip(*map(tables_of, call.routes), strict=True))
    routed_triton(
        call.x, call.outs, tables, load.rank, "mma", None, 1, plan.tile_key, plan.tile_rows,
        load.scratch, **sizes,
    )  # fmt: skip


def run_pair(load: Workload, shrink: ShrinkTile, expand: ExpandTile, index: int = 0) -> None:
    run_sized(load, index, shrink=shrink, expand=expand)


def bits_of(load: Workload, fold: Callable[[], None]) -> torch.Tensor:
    """The bits of the first call's outs after a fold into them, which is undone."""
    outs = load.calls[0].outs
    start = [out.clone() for out in outs]
    load.scratch.fill_(255)
    fold()
    result = torch.cat([out.flatten() for out in outs]).view(torch.int16)
    for out, before in zip(outs, start, strict=True):
        out.copy_(before)
    return result


def compile_share(work: tuple[str, int, int, int, int]) -> int:
    """Compile this process's share of a site's candidates, into Triton's cache."""
    site_name, rank, height, share, shares = work
    site = EVERY[site_name]
    load = Workload(site, rank, 64, 2, repetitions=1)
    set_height(load, height)
    shrinks, expands = candidates(site, rank, height)
    pairs = [(s, expands[0]) for s in shrinks]
    ends = {s.early: s for s in shrinks}
    pairs += [(s, e) for e in expands for s in ends.values()]
    pairs += [
        pair_of_table(site, rank, rows, tiles.max_tiles(rows, keys, height), height)
        for rows, keys in loads_of(site_name)
        if height in heights_of(rows, keys)
    ]
    for pair in pairs[share::shares]:
        run_pair(load, *pair)
    torch.cuda.synchronize()
    return len(pairs[share::shares])


def pair_of_table(site: Site, rank: int, rows: int, num_tiles: int, height: int) -> Pair:
    """What the table has now for a call."""
    pair = tiles.call_tiles("mma", rows, num_tiles, height, site.k_in, site.n_outs, rank)
    return cast("Pair", pair)


def candidates(site: Site, rank: int, height: int) -> tuple[list[ShrinkTile], list[ExpandTile]]:
    return shrink_candidates(height, rank, len(site.n_outs)), expand_candidates(height, rank)


def check_bits(load: Workload, pairs: Sequence[Pair]) -> None:
    """Stop if two pairs differ in a bit."""
    first = None
    for pair in pairs:
        result = bits_of(load, partial(run_pair, load, *pair))
        if first is not None and not torch.equal(result, first):
            raise SystemExit(f"{load.site.name} R{load.rank}: {pair} gives other bits")
        first = result


def time_pairs(load: Workload, found: dict[Pair, list[float]], pairs: Sequence[Pair]) -> list[Pair]:
    """Add a time to each pair's, checking the bits of new ones; fastest first."""
    pairs = [pair for pair in dict.fromkeys(pairs) if may_pair(*pair)]
    check_bits(load, [*list(found)[:1], *(pair for pair in pairs if pair not in found)])
    for pair in pairs:
        calls = [partial(run_pair, load, *pair, i) for i in range(len(load.calls))]
        found.setdefault(pair, []).append(round(graph_us(calls, 3), 2))
    return sorted(pairs, key=lambda pair: max(found[pair]))


def search(load: Workload) -> dict[Pair, list[float]]:
    """Times of pairs: the table's; the best early and late shrink for a usual expand; for each, the
    best expand and the best length of its runs; what is best, with other shrinks; and the first
    four once more, in graphs of their own.
    """
    shrinks, expands = candidates(load.site, load.rank, load.plan.block_rows)
    few = load.num_rows * sum(load.site.n_outs) < 1 << 20
    usual = next(e for e in expands if (e.blocks == 1) == few and e.block_cols >= 128)
    plan_tiles = load.plan.tile_key.shape[0], load.plan.block_rows
    found: dict[Pair, list[float]] = {}
    time_pairs(load, found, [pair_of_table(load.site, load.rank, load.num_rows, *plan_tiles)])
    best = [s for s, _ in time_pairs(load, found, [(s, usual) for s in shrinks])]
    for first in {s.early: s for s in reversed(best)}.values():
        both = time_pairs(load, found, [(first, e) for e in expands])
        time_pairs(load, found, [(first, e) for e in with_runs(load, [e for _, e in both])])
    top = [e for _, e in sorted(found, key=lambda pair: max(found[pair]))[:2]]
    time_pairs(load, found, [(s, e) for s in best[:6] for e in top if (s, e) not in found])
    for _ in range(2):
        time_pairs(load, found, sorted(found, key=lambda pair: found[pair][0])[:4])
    ranking = sorted(found, key=lambda pair: (len(found[pair]) == 1, max(found[pair])))
    return {pair: found[pair] for pair in ranking}


def measure(site: str, rank: int, rows: int, adapters: int) -> list[dict[str, Any]]:
    """One row per height of a tile: the pairs that were tried, fastest first."""
    load = Workload(EVERY[site], rank, rows, adapters, repetitions=100)
    records = []
    for height in heights_of(rows, adapters):
        set_height(load, height)
        found = search(load)
        records.append({
            "site": site, "slices": len(EVERY[site].n_outs), "rank": rank, "rows": rows,
            "adapters": adapters, "tile_rows": height, "num_tiles": load.plan.tile_key.shape[0],
            "k_in": EVERY[site].k_in, "columns": sum(EVERY[site].n_outs),
            "floor_us": round(load.floor_us, 2),
            "pair": [
                [max(us), *(dataclasses.astuple(tile) for tile in pair)]
                for pair, us in list(found.items())[:8]
            ],
        })  # fmt: skip
    return records


def write_table(records: list[dict[str, Any]]) -> None:
    """Put the fastest block sizes of each shape into the table that `lorafold.ops.tiles` reads.

    What it has of other shapes stays.
    """
    table: dict[str, Any] = {k: records[-1][k] for k in ("device", "date", "torch", "triton")}
    old = json.loads(TABLE.read_text())
    shrinks, expands = ({tuple(shape): size for shape, size in old[k]} for k in _KERNELS)
    for row in (row for record in records for row in record["rows"]):
        height, num_tiles, ranks = row["tile_rows"], row["num_tiles"], row["rank"] * row["slices"]
        segments = num_segments(row["k_in"])
        _, shrink, expand = row["pair"][0]
        shrinks[height, num_tiles, ranks, row["slices"], segments] = shrink[1:]
        shape = height, num_tiles, row["rank"], row["columns"], segments
        expands[shape] = [*expand[1:3], *expand[4:]]
    table |= {k: sorted(each.items()) for k, each in zip(_KERNELS, (shrinks, expands), strict=True)}
    lines = json.dumps(table).replace("[[[", "[\n[[").replace("]], [[", "]],\n[[")
    TABLE.write_text(lines + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    parser.add_argument("--sites", default=",".join(EVERY))
    parser.add_argument("--ranks", default="16,32,64")
    parser.add_argument("--loads", help="rowsxadapters, ...")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="write the table")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    if args.table:
        write_table([json.loads(file.read_text()) for file in args.table])
        return
    started = time.monotonic()
    keys = [(s, int(r)) for s in args.sites.split(",") for r in args.ranks.split(",")]
    loads = args.loads and [tuple(map(int, load.split("x"))) for load in args.loads.split(",")]
    work = [
        (site, rank, height, share, 4)
        for site, rank in keys
        for height in sorted({h for load in loads or loads_of(site) for h in heights_of(*load)})
        for share in range(4)
    ]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        compiled = sum(pool.map(compile_share, work))
    print(f"compiled {compiled} candidates in {time.monotonic() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for site, rank, load in ((*key, load) for key in keys for load in loads or loads_of(key[0])):
        if time.monotonic() - started > args.seconds:
            print("out of time")
            break
        for row in measure(site, rank, *load):
            rows.append(row)
            us, shrink, expand = row["pair"][0]
            print(
                f"{site} R{rank} {load[0]} rows {load[1]} adapters, tiles of {row['tile_rows']}: "
                f"floor {row['floor_us']}, {us} {shrink[1:]} {expand[1:]}, "
                f"after {time.monotonic() - started:.0f} s",
                flush=True,
            )
        args.out.write_text(json.dumps(describe("tune", rows)) + "\n")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
