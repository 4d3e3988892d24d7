"""The shrink of numerics "gemv": xa = x A^T, rounded to bf16 once.

A program takes some ranks of one slice for some rows of a tile. Two warps hold the 64 lanes; each
thread has several 16-byte vectors of every rank and row on their way at once, and the next ones
while it adds. A's first vectors are loaded ahead of the wait for the kernel before, and stay in
registers where they are all of K.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from lorafold.ops import tiles
from lorafold.ops.compiled import Launch
from lorafold.ops.lanes import (
    add_vectors,
    after_loads,
    end_of_tile,
    keep_lanes,
    lanes_total,
    load_tail,
    load_vectors,
    rows_at,
    tile_of,
)
from lorafold.ops.rows import let_next_start, select, wait_for_predecessor

__all__ = ["gemv_shrink_kernel", "gemv_shrink_launch"]


@triton.jit
def _dots(
    x_ptrs,
    has_row,
    a,
    a_ptrs,
    has_rank,
    rank_ptr,
    K: tl.constexpr,
    VECTORS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """dot(x, A) [ranks, rows], given A's first VECTORS vectors per lane."""
    NUM: tl.constexpr = K // 8
    GROUPS: tl.constexpr = NUM // (64 * VECTORS)
    DONE: tl.constexpr = GROUPS * 64 * VECTORS
    WHOLE: tl.constexpr = (NUM - DONE) // 64  # vectors that every lane has beyond the groups
    SOME: tl.constexpr = NUM % 64  # lanes that have one more
    acc = tl.zeros([a_ptrs.shape[0], x_ptrs.shape[1], 64], dtype=tl.float32)
    x = load_vectors(x_ptrs, has_row, 0, 64, VECTORS if GROUPS > 0 else 0, None, PACKED)
    if GROUPS > 1:
        for group in range(1, GROUPS):
            first = group * 64 * VECTORS
            next_a = load_vectors(a_ptrs, has_rank, first, 64, VECTORS, None, PACKED)
            next_x = load_vectors(x_ptrs, has_row, first, 64, VECTORS, None, PACKED)
            acc = after_loads(acc, rank_ptr)
            acc = add_vectors(acc, a, x)
            a, x = next_a, next_x
    whole_a = load_vectors(a_ptrs, has_rank, DONE, 64, WHOLE, None, PACKED)
    whole_x = load_vectors(x_ptrs, has_row, DONE, 64, WHOLE, None, PACKED)
    some_a = load_vectors(a_ptrs, has_rank, NUM - SOME, 64, 1 if SOME > 0 else 0, NUM, PACKED)
    some_x = load_vectors(x_ptrs, has_row, NUM - SOME, 64, 1 if SOME > 0 else 0, NUM, PACKED)
    acc = after_loads(acc, rank_ptr)
    acc = add_vectors(add_vectors(acc, a, x), whole_a, whole_x)
    if SOME > 0:
        acc = keep_lanes(acc, add_vectors(acc, some_a, some_x), SOME)
    if K % 8 > 0:
        tail_a = load_tail(a_ptrs, has_rank, NUM * 8, K % 8, 64)
        tail_x = load_tail(x_ptrs, has_row, NUM * 8, K % 8, 64)
        acc = keep_lanes(acc, tl.fma(tail_a, tail_x, acc), K % 8)
    return lanes_total(acc)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "a_tables",
        "rank_tables",
        "tile_key_ptr",
        "tile_rows_ptr",
        "source_ptr",
    ],
)
def gemv_shrink_kernel(
    x_ptr,
    xa_ptr,
    a_tables,
    rank_tables,
    tile_key_ptr,
    tile_rows_ptr,
    source_ptr,
    num_rows,
    top_k,
    x_stride,
    K: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    VECTORS: tl.constexpr,
    PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """xa[slice, row, j] = dot(x[source(row)], A[slice, key(row)][j])."""
    if not AHEAD:
        wait_for_predecessor(PDL)
    if EARLY or not AHEAD:
        let_next_start(PDL)
    key, place = tile_of(tile_key_ptr, tile_rows_ptr, num_rows, TILE_ROWS, BLOCK_ROWS, PARTS)
    if key < 0:
        if AHEAD:
            wait_for_predecessor(PDL)
        return
    blocks: tl.constexpr = (MAX_RANK + BLOCK_RANKS - 1) // BLOCK_RANKS
    slice_id = tl.program_id(1) // blocks
    first_rank = tl.program_id(1) % blocks * BLOCK_RANKS
    address = tl.load(select(a_tables, slice_id) + key)
    rank_ptr = select(rank_tables, slice_id) + key
    rank = tl.load(rank_ptr)
    if (address == 0) | (first_rank >= rank):
        if AHEAD:
            wait_for_predecessor(PDL)
        return
    a_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
    a_ptr += first_rank.to(tl.int64) * K
    ranks = tl.arange(0, BLOCK_RANKS)
    a_ptrs = a_ptr + (ranks * K)[:, None, None]
    has_rank = (first_rank + ranks < rank)[:, None, None]
    PRELOADED: tl.constexpr = VECTORS if K // 8 >= 64 * VECTORS else 0
    a = load_vectors(a_ptrs, has_rank, 0, 64, PRELOADED, None, PACKED)
    end = end_of_tile(tile_rows_ptr, num_rows, place, TILE_ROWS)
    xa_ptr = xa_ptr.to(tl.pointer_type(tl.bfloat16)) + first_rank
    xa_ptr += slice_id * num_rows.to(tl.int64) * MAX_RANK
    if AHEAD:
        wait_for_predecessor(PDL)
        if not EARLY:
            let_next_start(PDL)
    for at in range(place, end, PARTS * BLOCK_ROWS):
        rows = rows_at(tile_rows_ptr, at, end, BLOCK_ROWS)
        has_row = rows >= 0
        if source_ptr is None:
            sources = rows // top_k
        else:
            sources = tl.load(source_ptr + rows, mask=has_row, other=0)
        x_ptrs = (x_ptr + sources.to(tl.int64) * x_stride)[None, :, None]
        xa = _dots(
            x_ptrs, has_row[None, :, None], a, a_ptrs, has_rank, rank_ptr, K, VECTORS, PACKED
        )
        xa_ptrs = xa_ptr + rows.to(tl.int64)[None, :] * MAX_RANK + ranks[:, None]
        mask = has_row[None, :] & (first_rank + ranks < rank)[:, None]
        tl.store(xa_ptrs, xa.to(tl.bfloat16), mask=mask)
        if K // 8 >= 128 * VECTORS:
            # Not kept in registers while the groups after it were.
            again = has_rank & (at + PARTS * BLOCK_ROWS < end)
            a = load_vectors(a_ptrs, again, 0, 64, PRELOADED, None, PACKED)


@functools.lru_cache(4096)
def gemv_shrink_launch(
    num_rows: int,
    num_tiles: int,
    num_slices: int,
    top_k: int,
    k_in: int,
    max_rank: int,
    x_stride: int,
    is_aligned: bool,
    has_plan: bool,
    has_source: bool,
    tile: tiles.GemvShrinkTile,
    pdl: bool,
) -> Launch:
    """The launch of a shrink: x, xa, A tables, rank tables, tile_key, tile_rows, source.

    xa is memory for bfloat16 [slices, num_rows, max_rank]; only what a row and a rank own is
    written. Without a plan, rows stand in tiles in order.
    """
    row_programs = num_tiles * tile.parts
    rank_programs = num_slices * tiles.cdiv(max_rank, tile.block_ranks)
    return Launch(
        gemv_shrink_kernel,
        (num_slices, x_stride, top_k, has_source, is_aligned),
        (row_programs, rank_programs, 1),
        (num_rows, top_k, x_stride),
        (
            k_in,
            max_rank,
            tile.tile_rows,
            tile.block_rows,
            tile.parts,
            tile.block_ranks,
            tile.vectors,
            is_aligned and x_stride % 8 == 0 and k_in % 8 == 0,
            has_plan,
            row_programs * rank_programs <= tiles.EARLY_PROGRAMS,
            pdl,
        ),
        num_warps=2,
        num_stages=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
