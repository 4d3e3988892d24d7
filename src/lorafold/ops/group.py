"""The kernels that fill a plan: rows grouped by key into tiles, in fixed launch shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from lorafold.ops import tiles
from lorafold.ops.compiled import launch

if TYPE_CHECKING:
    from lorafold.ops.plan import Plan

ROWS_OF_ONE_PROGRAM = 1024

__all__ = [
    "count_kernel",
    "fence_kernel",
    "group_few_kernel",
    "group_triton",
    "place_kernel",
    "scan_kernel",
]


@triton.jit
def _lay_out(
    counters_ptr, tile_key_ptr, num_keys, num_tiles, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """From the counts of all keys: each key's first tile, each tile's key; resets the counts."""
    lanes = tl.arange(0, BLOCK)
    first = 0
    for start in range(0, num_keys, BLOCK):
        key = start + lanes
        # Past the first-level cache, where atomics do not show.
        count = tl.load(counters_ptr + key, mask=key < num_keys, other=0, cache_modifier=".cg")
        tl.store(counters_ptr + key, count * 0, mask=key < num_keys)
        needed = tl.cdiv(count, TILE_ROWS)
        tile = first + tl.cumsum(needed, axis=0) - needed
        tl.store(counters_ptr + num_keys + key, tile, mask=key < num_keys)
        for j in range(tl.max(needed, axis=0)):
            tl.store(tile_key_ptr + tile + j, key, mask=j < needed)
        first += tl.sum(needed, axis=0)
    for start in range(0, num_tiles, BLOCK):
        t = start + lanes
        tl.store(tile_key_ptr + t, t * 0 - 1, mask=(t >= first) & (t < num_tiles))


@triton.jit(
    do_not_specialize=["num_rows", "num_keys", "num_tiles"],
    do_not_specialize_on_alignment=["keys_ptr", "counters_ptr", "tile_key_ptr", "tile_rows_ptr"],
)
def group_few_kernel(
    keys_ptr,
    counters_ptr,
    tile_key_ptr,
    tile_rows_ptr,
    num_rows,
    num_keys,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """All of it in one program, where the rows fit one block."""
    i = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + i, mask=i < num_rows, other=-1)
    valid = (key >= 0) & (key < num_keys)
    place = tl.atomic_add(counters_ptr + key, 1, mask=valid, sem="relaxed")
    for start in range(0, num_tiles * TILE_ROWS, BLOCK):
        tl.store(tile_rows_ptr + start + i, i * 0 - 1, mask=start + i < num_tiles * TILE_ROWS)
    tl.debug_barrier()
    _lay_out(counters_ptr, tile_key_ptr, num_keys, num_tiles, TILE_ROWS, BLOCK_KEYS)
    tl.debug_barrier()
    tile = tl.load(counters_ptr + num_keys + key, mask=valid, other=0, cache_modifier=".cg")
    tl.store(tile_rows_ptr + tile * TILE_ROWS + place, i, mask=valid)


@triton.jit(
    do_not_specialize=["num_rows", "num_keys", "size"],
    do_not_specialize_on_alignment=["keys_ptr", "counters_ptr", "tile_rows_ptr"],
)
def count_kernel(
    keys_ptr, counters_ptr, tile_rows_ptr, num_rows, num_keys, size, BLOCK: tl.constexpr
):
    """Count the rows of each key; each row keeps its place. Also clears the tiles' rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + i, mask=i < num_rows, other=-1)
    valid = (key >= 0) & (key < num_keys)
    place = tl.atomic_add(counters_ptr + key, 1, mask=valid, sem="relaxed")
    tl.store(counters_ptr + 2 * num_keys + i, place, mask=valid)
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        t = start + tl.arange(0, BLOCK)
        tl.store(tile_rows_ptr + t, t * 0 - 1, mask=t < size)


@triton.jit(
    do_not_specialize=["num_keys", "num_tiles"],
    do_not_specialize_on_alignment=["counters_ptr", "tile_key_ptr"],
)
def scan_kernel(
    counters_ptr, tile_key_ptr, num_keys, num_tiles, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program between counting and placing."""
    _lay_out(counters_ptr, tile_key_ptr, num_keys, num_tiles, TILE_ROWS, BLOCK)


@triton.jit(
    do_not_specialize=["num_rows", "num_keys"],
    do_not_specialize_on_alignment=["keys_ptr", "counters_ptr", "tile_rows_ptr"],
)
def place_kernel(
    keys_ptr,
    counters_ptr,
    tile_rows_ptr,
    num_rows,
    num_keys,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each row into its tile."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + i, mask=i < num_rows, other=-1)
    valid = (key >= 0) & (key < num_keys)
    place = tl.load(counters_ptr + 2 * num_keys + i, mask=valid, other=0)
    tile = tl.load(counters_ptr + num_keys + key, mask=valid, other=0)
    tl.store(tile_rows_ptr + tile * TILE_ROWS + place, i, mask=valid)


@triton.jit
def fence_kernel():
    """Nothing. It starts after the plan is complete, so the kernel after it may read the plan, and
    whatever was written before, ahead of its wait for its own predecessor.
    """


def group_triton(keys: Tensor, plan: Plan) -> None:
    """Fill the plan's tiles from keys [num_rows] int32: one launch for few rows, three for many,
    and a fence.
    """
    num_rows, num_keys = plan.num_rows, plan.num_keys
    num_tiles = plan.tile_key.shape[0]
    if num_rows <= ROWS_OF_ONE_PROGRAM:
        block = max(32, tiles.next_power_of_2(num_rows))
        block_keys = min(1024, max(32, tiles.next_power_of_2(num_keys)))
        launch(
            group_few_kernel,
            (),
            (1, 1, 1),
            (keys, plan.counters, plan.tile_key, plan.tile_rows, num_rows, num_keys, num_tiles),
            (plan.block_rows, block, block_keys),
            num_warps=4 if num_rows <= 256 else 8,
        )
    else:
        _group_many(keys, plan)
    launch(fence_kernel, (), (1, 1, 1), (), num_warps=1)


def _group_many(keys: Tensor, plan: Plan) -> None:
    num_rows, num_keys, block = plan.num_rows, plan.num_keys, 256
    grid = (tiles.cdiv(num_rows, block), 1, 1)
    launch(
        count_kernel,
        (),
        grid,
        (keys, plan.counters, plan.tile_rows, num_rows, num_keys, plan.tile_rows.shape[0]),
        (block,),
        num_warps=4,
    )
    launch(
        scan_kernel,
        (),
        (1, 1, 1),
        (plan.counters, plan.tile_key, num_keys, plan.tile_key.shape[0]),
        (plan.block_rows, 1024),
        num_warps=8,
    )
    launch(
        place_kernel,
        (),
        grid,
        (keys, plan.counters, plan.tile_rows, num_rows, num_keys),
        (plan.block_rows, block),
        num_warps=4,
    )
