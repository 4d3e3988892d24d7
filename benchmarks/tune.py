"""Time every candidate block size of the shrink and the expand; print the best, keep all.

    python -m benchmarks.tune --out tune.jsonl [--sites o,down] [--ranks 16,64]

Each candidate is timed alone, in a graph of launches on cold operands. The results feed the rules
in `lorafold.ops.tiles`; the bit tests run every tile that those rules can return.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.sites import SITES, Workload
from benchmarks.timing import graph_us
from lorafold.ops.expand import expand_triton
from lorafold.ops.scratch import num_sums
from lorafold.ops.shrink import shrink_triton
from lorafold.ops.tiles import ExpandTile, ShrinkTile

SHARED_MEMORY = 220 * 1024
LOADS = ((1, 8), (8, 8), (64, 8), (64, 64), (256, 8), (2048, 8))


def shrink_candidates(tile_rows: int, k_in: int, rank: int) -> list[ShrinkTile]:
    found = []
    for ranks in (16, 32, 64):
        for block_k, warps, stages in (
            (64, 2, 4), (64, 4, 3), (64, 4, 5), (128, 2, 4), (128, 4, 3), (128, 4, 5), (256, 2, 4),
            (256, 4, 3), (256, 4, 5), (1024, 2, 1), (1024, 4, 1), (1024, 8, 1),
        ):  # fmt: skip
            size = (ranks + tile_rows) * block_k * 2 * stages
            enough_work = ranks * tile_rows >= 256 * warps // 4
            if ranks <= max(16, rank) and size <= SHARED_MEMORY and enough_work:
                found.append(ShrinkTile(tile_rows, tile_rows, ranks, block_k, warps, stages))
    return found


def expand_candidates(tile_rows: int, rank: int) -> list[ExpandTile]:
    found = []
    for cols in (32, 64, 128):
        for warps in (2, 4, 8):
            if not 256 * warps <= cols * tile_rows <= 4096 * warps:
                continue
            for blocks, stages in ((1, 1), (2, 2), (4, 3), (8, 3), (16, 3), (32, 3), (8, 4)):
                size = stages * cols * 2 * (max(16, rank) + tile_rows)
                if size < SHARED_MEMORY:
                    found.append(
                        ExpandTile(tile_rows, tile_rows, cols, blocks, max(16, rank), warps, stages)
                    )
    return found


def launch_shrink(load: Workload, index: int, tile: ShrinkTile) -> None:
    call = load.calls[index]
    dtype = torch.float32 if num_sums(load.site.k_in, "mma") else torch.bfloat16
    shrink_triton(
        call.x,
        load.scratch.view(dtype),
        tuple(r.a_table for r in call.routes),
        tuple(r.rank_table for r in call.routes),
        load.plan.tile_key,
        load.plan.tile_rows,
        None,
        load.num_rows,
        1,
        load.site.k_in,
        load.rank,
        tile,
        False,
        True,
    )


def launch_expand(load: Workload, index: int, tile: ExpandTile, segments: int) -> None:
    call = load.calls[index]
    expand_triton(
        load.scratch.view(torch.float32 if segments else torch.bfloat16),
        call.outs,
        tuple(r.b_table for r in call.routes),
        tuple(r.scale_table for r in call.routes),
        tuple(r.rank_table for r in call.routes),
        load.plan.tile_key,
        load.plan.tile_rows,
        load.num_rows,
        load.rank,
        segments,
        tile,
        False,
        True,
    )


def compile_share(work: tuple[str, int, int, int, int, int, str]) -> int:
    """Compile this process's share of the candidates of one load, into Triton's cache."""
    site_name, rank, num_rows, num_adapters, share, shares, only = work
    site = SITES[site_name]
    load = Workload(site, rank, num_rows, num_adapters, repetitions=1)
    tile_rows = load.plan.block_rows
    done = 0
    for i, tile in enumerate(shrink_candidates(tile_rows, site.k_in, rank)):
        if i % shares == share and only != "expand":
            launch_shrink(load, 0, tile)
            done += 1
    for i, tile in enumerate(expand_candidates(tile_rows, rank)):
        for segments in {0, num_sums(site.k_in, "mma")}:
            if i % shares == share and only != "shrink":
                launch_expand(load, 0, tile, segments)
                done += 1
    torch.cuda.synchronize()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="tune.jsonl")
    parser.add_argument("--sites", default=",".join(SITES))
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--only", choices=("shrink", "expand"))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    started = time.monotonic()
    keys = [(s, int(r)) for s in args.sites.split(",") for r in args.ranks.split(",")]
    # One load per distinct tile height covers all kernels of a site and rank.
    work = [
        (s, r, rows, adapters, share, 4, args.only or "")
        for s, r in keys
        for rows, adapters in ((64, 8), (2048, 8))
        for share in range(4)
    ]
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        compiled = sum(pool.map(compile_share, work))
    print(f"compiled {compiled} candidates in {time.monotonic() - started:.0f} s", flush=True)
    with Path(args.out).open("w") as out:
        for (site, rank), (rows, adapters) in ((k, ra) for ra in LOADS for k in keys):
            if time.monotonic() - started > args.seconds:
                print("out of time")
                break
            load = Workload(SITES[site], rank, rows, adapters, repetitions=200)
            n = range(len(load.calls))
            tile_rows = load.plan.block_rows
            shrinks = [
                (graph_us([partial(launch_shrink, load, i, t) for i in n], 3), t)
                for t in shrink_candidates(tile_rows, load.site.k_in, rank)
                if args.only != "expand"
            ]
            expands = [
                (graph_us([partial(launch_expand, load, i, t, g) for i in n], 3), g, t)
                for t in expand_candidates(tile_rows, rank)
                for g in (0, num_sums(load.site.k_in, "mma"))
                if args.only != "shrink"
            ]
            record = {
                "site": site, "rank": rank, "rows": rows, "adapters": adapters,
                "floor_us": load.floor_us, "repetitions": len(load.calls),
                "shrink": [(us, *vars(t).values()) for us, t in shrinks],
                "expand": [(us, g, *vars(t).values()) for us, g, t in expands],
            }  # fmt: skip
            out.write(json.dumps(record) + "\n")
            out.flush()
            print(
                f"{site:8} R{rank:<3} T{rows:<5} L{adapters:<3} floor {load.floor_us:6.1f}", end=""
            )
            if shrinks:
                us, t = min(shrinks, key=lambda s: s[0])
                shape = f"r{t.block_ranks} k{t.block_k} w{t.num_warps} s{t.num_stages}"
                print(f" | shrink {us:6.2f} {shape}", end="")
            for segments in sorted({g for _, g, _ in expands}):
                for blocks in (False, True):
                    some = [e for e in expands if e[1] == segments and (e[2].blocks > 1) == blocks]
                    us, _, x = min(some, key=lambda e: e[0])
                    shape = f"c{x.block_cols} b{x.blocks} w{x.num_warps} s{x.num_stages}"
                    print(f" | seg{segments} {us:6.2f} {shape}", end="")
            print(flush=True)


if __name__ == "__main__":
    main()
