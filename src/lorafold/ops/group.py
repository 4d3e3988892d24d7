"""The kernels that fill a plan: rows grouped by key into tiles, in fixed launch shapes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from lorafold.ops import tiles
from lorafold.ops.compiled import Launch, has_pdl
from lorafold.ops.keys_triton import gather_keys_of, gather_keys_triton
from lorafold.ops.rows import let_next_start, wait_for_predecessor

if TYPE_CHECKING:
    from lorafold.ops.plan import Plan

ROWS_OF_ONE_PROGRAM = 1024
KEYS_IN_REGISTERS = 128
"""Up to this many keys are counted by a program itself; of more, counts are read from memory."""

__all__ = [
    "count_kernel",
    "fence_kernel",
    "group_few_kernel",
    "group_gathered_triton",
    "group_launches",
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
    _end_tiles(tile_key_ptr, first, num_tiles, BLOCK)


@triton.jit
def _lay_out_few(key, valid, tile_key_ptr, num_tiles, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The same from the keys of all rows, without memory: the first tile of each row's key."""
    needed = tl.cdiv(tl.histogram(key, BLOCK, mask=valid), TILE_ROWS)
    first = tl.cumsum(needed, axis=0) - needed
    for j in range(tl.max(needed, axis=0)):
        tl.store(tile_key_ptr + first + j, tl.arange(0, BLOCK), mask=j < needed)
    _end_tiles(tile_key_ptr, tl.sum(needed, axis=0), num_tiles, BLOCK)
    return tl.gather(first, key, axis=0)


@triton.jit
def _end_tiles(tile_key_ptr, num_used, num_tiles, BLOCK: tl.constexpr):
    """Tiles from num_used on have no key."""
    for start in range(0, num_tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        tl.store(tile_key_ptr + t, t * 0 - 1, mask=(t >= num_used) & (t < num_tiles))


@triton.jit(
    do_not_specialize=["num_rows", "num_keys", "num_tiles"],
    do_not_specialize_on_alignment=[
        "keys_ptr",
        "indices_ptr",
        "row_adapter_ptr",
        "counters_ptr",
        "tile_key_ptr",
        "tile_rows_ptr",
    ],
)
def group_few_kernel(
    keys_ptr,
    indices_ptr,
    row_adapter_ptr,
    counters_ptr,
    tile_key_ptr,
    tile_rows_ptr,
    num_rows,
    num_keys,
    num_tiles,
    top_k,
    num_experts,
    max_loras,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of it in one program, where the rows fit one block. With indices (of experts), the keys
    are computed first, and stored.

    A row's place among its key's rows is what an atomic addition returns. IN_REGISTERS, all else is
    found while it is on its way.
    """
    wait_for_predecessor(PDL)
    i = tl.arange(0, BLOCK)
    if indices_ptr is None:
        key = tl.load(keys_ptr + i, mask=i < num_rows, other=-1)
    else:
        key = gather_keys_of(
            indices_ptr, row_adapter_ptr, i, num_rows, top_k, num_experts, max_loras
        )
        tl.store(keys_ptr + i, key, mask=i < num_rows)
    valid = (key >= 0) & (key < num_keys)
    key = tl.where(valid, key, 0)
    place = tl.atomic_add(counters_ptr + key, 1, mask=valid, sem="relaxed")
    for start in range(0, num_tiles * TILE_ROWS, BLOCK):
        tl.store(tile_rows_ptr + start + i, i * 0 - 1, mask=start + i < num_tiles * TILE_ROWS)
    if IN_REGISTERS:
        tile = _lay_out_few(key, valid, tile_key_ptr, num_tiles, TILE_ROWS, BLOCK_KEYS)
        tl.debug_barrier()
        tl.store(counters_ptr + key, i * 0, mask=valid)
    else:
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
    keys_ptr,
    counters_ptr,
    tile_rows_ptr,
    num_rows,
    num_keys,
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Count the rows of each key; each row keeps its place. Also clears the tiles' rows."""
    wait_for_predecessor(PDL)
    let_next_start(PDL)
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
    counters_ptr,
    tile_key_ptr,
    num_keys,
    num_tiles,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program between counting and placing."""
    wait_for_predecessor(PDL)
    let_next_start(PDL)
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
    PDL: tl.constexpr,
):
    """Write each row into its tile."""
    wait_for_predecessor(PDL)
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
    for launch, tensors in group_launches(keys, plan):
        launch(*tensors)


def group_launches(keys: Tensor, plan: Plan) -> list[tuple[Launch, tuple[Tensor | None, ...]]]:
    """What `group_triton` launches, in order, and with which tensors."""
    sizes, pdl = _sizes(plan), has_pdl(keys.device)
    if plan.num_rows <= ROWS_OF_ONE_PROGRAM:
        few = _group_few(*sizes, pdl, (), (1, 1, 1))
        tensors = (keys, None, None, plan.counters, plan.tile_key, plan.tile_rows)
        return [(few, tensors), (_FENCE, ())]
    count, scan, place = _group_many(*sizes, pdl)
    return [
        (count, (keys, plan.counters, plan.tile_rows)),
        (scan, (plan.counters, plan.tile_key)),
        (place, (keys, plan.counters, plan.tile_rows)),
        (_FENCE, ()),
    ]


def group_gathered_triton(
    indices: Tensor,
    row_adapter: Tensor | None,
    top_k: int,
    num_experts: int,
    max_loras: int,
    plan: Plan,
) -> None:
    """Compute the keys of (token, choice) rows, and fill the plan's tiles, without a launch more
    where the rows are few; see `keys.gather_keys`.
    """
    if plan.num_rows > ROWS_OF_ONE_PROGRAM:
        gather_keys_triton(indices, row_adapter, top_k, num_experts, max_loras, plan.keys)
        group_triton(plan.keys, plan)
        return
    kinds = indices.dtype, row_adapter is None
    choice = top_k, num_experts, max_loras
    few = _group_few(*_sizes(plan), has_pdl(indices.device), kinds, choice)
    few(plan.keys, indices, row_adapter, plan.counters, plan.tile_key, plan.tile_rows)
    _FENCE()


_FENCE = Launch(fence_kernel, (), (1, 1, 1), num_warps=1)


def _sizes(plan: Plan) -> tuple[int, int, int, int]:
    return plan.num_rows, plan.num_keys, plan.tile_key.shape[0], plan.block_rows


@functools.lru_cache(4096)
def _group_few(
    num_rows: int,
    num_keys: int,
    num_tiles: int,
    block_rows: int,
    pdl: bool,
    kinds: tuple[object, ...],
    choice: tuple[int, int, int],
) -> Launch:
    block = max(32, tiles.next_power_of_2(num_rows))
    block_keys = min(1024, max(32, tiles.next_power_of_2(num_keys)))
    return Launch(
        group_few_kernel,
        (kinds, choice),
        (1, 1, 1),
        (num_rows, num_keys, num_tiles, *choice),
        (block_rows, block, block_keys, num_keys <= KEYS_IN_REGISTERS, pdl),
        num_warps=4 if num_rows <= 256 else 8,
        launch_pdl=pdl,
    )


@functools.lru_cache(4096)
def _group_many(
    num_rows: int, num_keys: int, num_tiles: int, block_rows: int, pdl: bool
) -> tuple[Launch, Launch, Launch]:
    block = 256
    grid = (tiles.cdiv(num_rows, block), 1, 1)
    count_sizes, scan_sizes = (num_rows, num_keys, num_tiles * block_rows), (num_keys, num_tiles)
    scan_constants, place_constants = (block_rows, 1024, pdl), (block_rows, block, pdl)
    options = {"launch_pdl": pdl}
    return (
        Launch(count_kernel, (), grid, count_sizes, (block, pdl), num_warps=4, **options),
        Launch(scan_kernel, (), (1, 1, 1), scan_sizes, scan_constants, num_warps=8, **options),
        Launch(
            place_kernel, (), grid, (num_rows, num_keys), place_constants, num_warps=4, **options
        ),
    )
