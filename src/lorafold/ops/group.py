"""The kernels that fill a plan: rows grouped by key into tiles, in fixed launch shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from lorafold.ops.plan import Plan

__all__ = [
    "count_kernel",
    "fence_kernel",
    "group_few_kernel",
    "group_triton",
    "place_kernel",
    "scan_kernel",
]


@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_tiles"])
def group_few_kernel(
    keys_ptr,
    tile_key_ptr,
    tile_rows_ptr,
    num_rows,
    num_keys,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """One program, few rows: every row finds its place by comparing its key with all others."""
    i = tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + i, mask=i < num_rows, other=-1)
    valid = (key >= 0) & (key < num_keys)
    key = tl.where(valid, key, 2147483647)
    # Unused places first; the barrier orders them before the rows that are written below.
    t = tl.arange(0, BLOCK_TILES)
    tl.store(tile_key_ptr + t, t * 0 - 1, mask=t < num_tiles)
    for start in range(0, num_tiles * TILE_ROWS, BLOCK):
        tl.store(tile_rows_ptr + start + i, i * 0 - 1, mask=start + i < num_tiles * TILE_ROWS)
    tl.debug_barrier()
    same = (key[:, None] == key[None, :]) & (i[None, :] < i[:, None])
    place = tl.sum(same.to(tl.int32), axis=1)  # among the rows of its key
    opens = (place % TILE_ROWS == 0) & valid
    # The same vector along the other axis, without a transposition through memory.
    place_row = tl.sum(
        ((key[:, None] == key[None, :]) & (i[:, None] < i[None, :])).to(tl.int32), axis=0
    )
    opens_row = (place_row % TILE_ROWS == 0)[None, :] & (key != 2147483647)[None, :]
    earlier = opens_row & (key[None, :] < key[:, None])
    tile = tl.sum(earlier.to(tl.int32), axis=1) + place // TILE_ROWS
    tl.store(tile_rows_ptr + tile * TILE_ROWS + place % TILE_ROWS, i, mask=valid)
    tl.store(tile_key_ptr + tile, key, mask=opens)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "size"])
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


@triton.jit(do_not_specialize=["num_keys", "num_tiles"])
def scan_kernel(
    counters_ptr, tile_key_ptr, num_keys, num_tiles, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: the first tile of each key, the key of each tile; resets the counts."""
    lanes = tl.arange(0, BLOCK)
    first = 0
    for start in range(0, num_keys, BLOCK):
        key = start + lanes
        count = tl.load(counters_ptr + key, mask=key < num_keys, other=0)
        tl.store(counters_ptr + key, count * 0, mask=key < num_keys)
        needed = tl.cdiv(count, TILE_ROWS)
        tile = first + tl.cumsum(needed, axis=0) - needed
        tl.store(counters_ptr + num_keys + key, tile, mask=key < num_keys)
        for j in range(0, tl.max(needed, axis=0)):
            tl.store(tile_key_ptr + tile + j, key, mask=j < needed)
        first += tl.sum(needed, axis=0)
    for start in range(0, num_tiles, BLOCK):
        t = start + lanes
        tl.store(tile_key_ptr + t, t * 0 - 1, mask=(t >= first) & (t < num_tiles))


@triton.jit(do_not_specialize=["num_rows", "num_keys"])
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
    whatever was written before, ahead of its wait for its own predecessor."""
    pass


def group_triton(keys: Tensor, plan: Plan) -> None:
    """Fill the plan's tiles from keys [num_rows] int32: one launch for few rows, three
    for many, and a fence."""
    num_rows, num_keys = plan.num_rows, plan.num_keys
    num_tiles = plan.tile_key.shape[0]
    if not plan.counters.shape[0]:
        block = max(16, triton.next_power_of_2(num_rows))
        group_few_kernel[(1,)](
            keys,
            plan.tile_key,
            plan.tile_rows,
            num_rows,
            num_keys,
            num_tiles,
            TILE_ROWS=plan.block_rows,
            BLOCK=block,
            BLOCK_TILES=triton.next_power_of_2(num_tiles),
            num_warps=8,
        )
    else:
        _group_many(keys, plan)
    fence_kernel[(1,)](num_warps=1)


def _group_many(keys: Tensor, plan: Plan) -> None:
    num_rows, num_keys = plan.num_rows, plan.num_keys
    num_tiles = plan.tile_key.shape[0]
    block = 256
    grid = (triton.cdiv(num_rows, block),)
    size = plan.tile_rows.shape[0]
    count_kernel[grid](
        keys, plan.counters, plan.tile_rows, num_rows, num_keys, size, BLOCK=block, num_warps=4
    )
    scan_kernel[(1,)](
        plan.counters,
        plan.tile_key,
        num_keys,
        num_tiles,
        TILE_ROWS=plan.block_rows,
        BLOCK=1024,
        num_warps=8,
    )
    place_kernel[grid](
        keys,
        plan.counters,
        plan.tile_rows,
        num_rows,
        num_keys,
        TILE_ROWS=plan.block_rows,
        BLOCK=block,
        num_warps=4,
    )
