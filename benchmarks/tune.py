"""Time candidate block sizes of the shrink and the expand, and keep the best as a table.

    python -m benchmarks.tune [--out tune.json] [--sites o,down] [--ranks 16,64] [--loads 64x8]
    python -m benchmarks.tune --table tune.json ...

Each candidate is timed alone, in a graph of launches on cold operands, then the fastest of both in
pairs, as a call runs them. Their bits are compared with those of the other candidates on the same
operands, the first of which the bit tests hold. The second form writes the best of such files to
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
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lorafold
from benchmarks.record import describe
from lorafold.bench import SITES, Site, Workload, graph_us
from lorafold.ops import Plan, make_plan, tiles
from lorafold.ops.launch import Call, prepare
from lorafold.ops.scratch import num_segments
from lorafold.ops.tiles import ExpandTile, ShrinkTile
from lorafold.route import tables_of

__all__ = ["expand_candidates", "main", "shrink_candidates"]

SHARED_MEMORY = 220 * 1024
_PAIRED = 4
"""Of the shrinks and of the expands, how many are timed in pairs."""

LOADS = ((1, 8), (8, 8), (64, 8), (64, 64), (256, 8), (1024, 8), (2048, 8), (8192, 1))
"""(rows, adapters) of the calls that are tuned for."""

EXPERTS = (
    Site("expert_gate_up", 2048, (1536,)),
    Site("expert_down", 768, (2048,)),
)
"""The projections of Qwen3-30B-A3B's experts: each expert of an adapter is a key of its own."""

EXPERT_LOADS = (
    (8, 128), (64, 128), (512, 128), (2048, 128), (16384, 128), (512, 1024), (2048, 1024),
    (16384, 1024),
)  # fmt: skip

EVERY = SITES | {site.name: site for site in EXPERTS}

TABLE = Path(lorafold.__file__).parent / "data" / "tiles.json"


def shrink_candidates(tile_rows: int, rank: int, num_slices: int) -> list[ShrinkTile]:
    """Block sizes that fit the device and have work for their warps."""
    found = []
    widest = tiles.next_power_of_2(rank * num_slices)
    for ranks in (16, 32, 64, 128, 256):
        for block_k, warps, stages in (
            (64, 2, 4), (64, 4, 3), (64, 4, 5), (64, 8, 4), (128, 2, 4), (128, 4, 3), (128, 4, 5),
            (128, 8, 3), (256, 4, 3), (1024, 2, 1), (1024, 4, 1),
        ):  # fmt: skip
            size = (ranks + tile_rows) * block_k * 2 * stages
            outputs = ranks * tile_rows
            enough = 128 * warps <= outputs <= 4096 * warps or (outputs == 256 and warps == 2)
            if ranks <= max(16, widest) and size <= SHARED_MEMORY and enough:
                found.append(ShrinkTile(tile_rows, tile_rows, ranks, block_k, warps, stages))
    return found


def expand_candidates(tile_rows: int, rank: int) -> list[ExpandTile]:
    """Block sizes that fit the device and have work for their warps."""
    found = []
    block_k = max(16, rank)
    for cols, blocks, warps, stages in (
        (64, 1, 4, 1), (128, 1, 4, 1), (128, 2, 4, 2), (128, 4, 4, 3), (128, 8, 4, 3),
        (128, 4, 8, 3), (128, 8, 8, 3), (128, 16, 8, 3), (64, 4, 4, 3), (64, 8, 4, 3),
        (256, 2, 8, 2), (256, 4, 8, 2),
    ):  # fmt: skip
        size = stages * cols * 2 * (block_k + tile_rows)
        if size < SHARED_MEMORY and cols * tile_rows <= 4096 * warps:
            found.append(ExpandTile(tile_rows, tile_rows, cols, blocks, block_k, warps, stages))
    return found


def loads_of(site: str) -> tuple[tuple[int, int], ...]:
    return LOADS if site in SITES else EXPERT_LOADS


def set_height(load: Workload, tile_rows: int) -> None:
    """Give a load a plan with tiles of this height."""
    num_tiles = tiles.max_tiles(load.num_rows, load.num_adapters, tile_rows)

    def unused(size: int) -> Tensor:
        return torch.full((size,), -1, dtype=torch.int32, device="cuda")

    empty = dataclasses.replace(
        Plan.empty(load.num_rows, load.num_adapters, "cuda"),
        block_rows=tile_rows,
        tile_key=unused(num_tiles),
        tile_rows=unused(num_tiles * tile_rows),
    )
    load.plan = make_plan(load.slots, load.num_adapters, plan=empty)


def prepared(
    load: Workload, shrink: ShrinkTile | None = None, expand: ExpandTile | None = None
) -> Call:
    call = load.calls[0]
    n_outs = tuple(out.shape[1] for out in call.outs)
    height = load.plan.block_rows, load.plan.tile_key.shape[0]
    return prepare(
        load.num_rows, load.site.k_in, n_outs, call.x.stride(0), n_outs, True,
        (True,) * len(n_outs), load.rank, "mma", 1, False, height[::-1], True, call.x.device,
        shrink, expand,
    )  # fmt: skip


def run_shrink(load: Workload, tile: ShrinkTile, index: int = 0) -> None:
    call, plan = load.calls[index], load.plan
    a_tables, _, _, rank_tables = zip(*map(tables_of, call.routes), strict=True)
    prepared(load, shrink=tile).shrink(
        call.x,
        load.scratch,
        a_tables,
        rank_tables,
        plan.tile_key,
        plan.tile_rows,
        None,
    )


def run_expand(load: Workload, tile: ExpandTile, index: int = 0) -> None:
    call, plan = load.calls[index], load.plan
    _, b_tables, scale_tables, rank_tables = zip(*map(tables_of, call.routes), strict=True)
    prepared(load, expand=tile).expand(
        load.scratch,
        call.outs,
        b_tables,
        scale_tables,
        rank_tables,
        plan.tile_key,
        plan.tile_rows,
    )


def compile_share(work: tuple[str, int, int, int, int]) -> int:
    """Compile this process's share of a site's candidates, into Triton's cache."""
    site_name, rank, height, share, shares = work
    site = EVERY[site_name]
    load = Workload(site, rank, 64, 2, repetitions=1)
    set_height(load, height)
    done = 0
    for tile in [
        *shrink_candidates(height, rank, len(site.n_outs)),
        *expand_candidates(height, rank),
    ][share::shares]:
        (run_shrink if isinstance(tile, ShrinkTile) else run_expand)(load, tile)
        done += 1
    torch.cuda.synchronize()
    return done


def check_bits(load: Workload, found: list[ShrinkTile] | list[ExpandTile]) -> None:
    """Stop if two candidates differ in a bit."""
    outs, first = load.calls[0].outs, None
    start = [out.clone() for out in outs]
    for tile in found:
        load.scratch.zero_()
        if isinstance(tile, ShrinkTile):
            run_shrink(load, tile)
            result = load.scratch.clone()
        else:
            run_shrink(load, shrink_candidates(load.plan.block_rows, load.rank, len(outs))[0])
            run_expand(load, tile)
            result = torch.cat([out.flatten() for out in outs]).view(torch.int16)
            for out, before in zip(outs, start, strict=True):
                out.copy_(before)
        if first is not None and not torch.equal(result, first):
            raise SystemExit(f"{load.site.name} R{load.rank}: {tile} gives other bits")
        first = result


def run_pair(load: Workload, shrink: ShrinkTile, expand: ExpandTile, index: int) -> None:
    run_shrink(load, shrink, index)
    run_expand(load, expand, index)


def _timed(
    candidates: Sequence[tuple[Any, ...]], run: Callable[..., None], indices: range
) -> list[list[Any]]:
    """[microseconds, *candidate] of each, fastest first."""
    timed = [
        [round(graph_us([partial(run, *each, i) for i in indices], 3), 2), *each]
        for each in candidates
    ]
    return sorted(timed, key=lambda row: row[0])


def measure(site: str, rank: int, rows: int, adapters: int) -> dict[str, Any]:
    """One row: all candidates, fastest first."""
    load = Workload(EVERY[site], rank, rows, adapters, repetitions=160)
    height, indices = load.plan.block_rows, range(len(load.calls))
    shrinks = shrink_candidates(height, rank, len(EVERY[site].n_outs))
    expands = expand_candidates(height, rank)
    row: dict[str, Any] = {
        "site": site, "slices": len(EVERY[site].n_outs), "rank": rank, "rows": rows,
        "adapters": adapters, "tile_rows": height, "num_tiles": load.plan.tile_key.shape[0],
        "k_in": EVERY[site].k_in, "columns": sum(EVERY[site].n_outs),
        "floor_us": round(load.floor_us, 2),
    }  # fmt: skip
    best: list[list[Any]] = []
    for name, found, run in (("shrink", shrinks, run_shrink), ("expand", expands, run_expand)):
        check_bits(load, found)
        timed = _timed([(t,) for t in found], partial(run, load), indices)
        best.append([tile for _, tile in timed[:_PAIRED]])
        row[name] = [[us, *dataclasses.astuple(tile)] for us, tile in timed]
    pairs = _timed(list(product(*best)), partial(run_pair, load), indices)
    row["pair"] = [[us, *map(dataclasses.astuple, pair)] for us, *pair in pairs]
    return row


def write_table(records: list[dict[str, Any]]) -> None:
    """The fastest block sizes of each shape, as `lorafold.ops.tiles` reads them."""
    table: dict[str, Any] = {k: records[0][k] for k in ("device", "date", "torch", "triton")}
    table["shrink"], table["expand"] = [], []
    for row in (row for record in records for row in record["rows"]):
        height, num_tiles, ranks = row["tile_rows"], row["num_tiles"], row["rank"] * row["slices"]
        segments = num_segments(row["k_in"])
        _, shrink, expand = row["pair"][0]
        table["shrink"].append([[height, num_tiles, ranks, row["slices"], segments], shrink[2:]])
        shape = [height, num_tiles, row["rank"], row["columns"], segments]
        table["expand"].append([shape, [*expand[2:4], *expand[5:]]])
    lines = json.dumps(table).replace("[[[", "[\n[[").replace("]], [[", "]],\n[[")
    TABLE.write_text(lines + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    parser.add_argument("--sites", default=",".join(EVERY))
    parser.add_argument("--ranks", default="16,64")
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
        (site, rank, height, share, 2)
        for site, rank in keys
        for height in sorted({tiles.plan_rows(*load) for load in loads or loads_of(site)})
        for share in (0, 1)
    ]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        compiled = sum(pool.map(compile_share, work))
    print(f"compiled {compiled} candidates in {time.monotonic() - started:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for site, rank, load in ((*key, load) for key in keys for load in loads or loads_of(key[0])):
        if time.monotonic() - started > args.seconds:
            print("out of time")
            break
        rows.append(measure(site, rank, *load))
        us, shrink, expand = rows[-1]["pair"][0]
        print(
            f"{site} R{rank} {load[0]} rows {load[1]} adapters: {us} {shrink[2:]} {expand[2:]}",
            flush=True,
        )
        args.out.write_text(json.dumps(describe("tune", rows)) + "\n")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
