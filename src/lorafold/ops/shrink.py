"""The shrink of numerics "mma": xa = x A^T for rows of many keys, rounded to bf16 once.

    xa[slice, row, j] = bf16( dot(x[source(row), :], A[slice, key(row)][j, :]) )

The ranks of all slices stand in one row of `slices * max_rank`: a program takes a block of them,
so that a block as wide as several slices reads x once for all.

One program takes one segment of K. Where there are several, their fp32 sums are stored
as they are, and the expand adds them in ascending order and rounds.

With a plan, the plan, the tables and A are read ahead of the wait for the kernel before:
`make_plan` ends with a fence, so all that was written before it is there.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from lorafold.numerics import SEGMENT
from lorafold.ops import tiles
from lorafold.ops.compiled import Launch
from lorafold.ops.dot import load_block, mma_chain
from lorafold.ops.rows import let_next_start, prefetch, program_rows, select, wait_for_predecessor
from lorafold.ops.scratch import num_segments

__all__ = ["shrink_kernel", "shrink_launch"]


@triton.jit
def _value(tables, slices, key, ONE_SLICE: tl.constexpr):
    """tables[slice][key], for one slice or for a block of ranks that has several."""
    if ONE_SLICE:
        value = tl.load(select(tables, slices) + key)
    else:
        value = tl.load(tables[0] + key)
        for i in tl.static_range(1, len(tables)):
            value = tl.where(slices == i, tl.load(tables[i] + key), value)
    return value


@triton.jit
def _rows_of_a(
    a_tables,
    rank_tables,
    key,
    block,
    max_rank,
    k_in,
    BLOCK_RANKS: tl.constexpr,
    ONE_SLICE: tl.constexpr,
):
    """Of a block of ranks: slice, rank, row of A and whether there is one; and if there is none."""
    first = block * BLOCK_RANKS
    if ONE_SLICE:
        slices = first // max_rank
        ranks = first % max_rank + tl.arange(0, BLOCK_RANKS)
    else:
        slices = (first + tl.arange(0, BLOCK_RANKS)) // max_rank
        ranks = (first + tl.arange(0, BLOCK_RANKS)) % max_rank
    address = _value(a_tables, slices, key, ONE_SLICE)
    rank = _value(rank_tables, slices, key, ONE_SLICE)
    exists = (slices < len(a_tables)) & (ranks < rank) & (address != 0)
    if ONE_SLICE:
        is_idle = first % max_rank >= rank
    else:
        is_idle = tl.max(exists.to(tl.int32), axis=0) == 0
    a_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
    return slices, ranks, a_ptr + ranks.to(tl.int64) * k_in, exists, is_idle


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
def shrink_kernel(
    x_ptr,
    xa_ptr,
    a_tables,
    rank_tables,
    tile_key_ptr,
    tile_rows_ptr,
    source_ptr,
    num_rows,
    top_k,
    k_in,
    max_rank,
    x_stride,
    TILE_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_SLICE: tl.constexpr,
    EVEN_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SUMS: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """xa[plane, row, j] = dot(x[source(row)], A[j]) over one segment."""
    WHOLE: tl.constexpr = BLOCK_K == SEGMENT
    if AHEAD and EARLY:
        let_next_start(PDL)
    elif not AHEAD:
        wait_for_predecessor(PDL)
        let_next_start(PDL)
    key, rows = program_rows(tile_key_ptr, tile_rows_ptr, num_rows, TILE_ROWS)
    if key < 0:
        if AHEAD:
            wait_for_predecessor(PDL)
        return
    slices, ranks, a_ptrs, has_rank, is_idle = _rows_of_a(
        a_tables, rank_tables, key, tl.program_id(1), max_rank, k_in, BLOCK_RANKS, ONE_SLICE
    )
    has_row = rows >= 0
    segment = tl.program_id(2)
    begin = segment * SEGMENT
    end = min(begin + SEGMENT, k_in)
    ks = begin + tl.arange(0, BLOCK_K)
    if WHOLE:
        # All of A that this program needs is on its way before the wait.
        a = load_block(a_ptrs, has_rank, ks, end, EVEN_K)
    if AHEAD:
        if WHOLE and PARTS > 0:
            parts = begin + tl.arange(0, PARTS) * (SEGMENT // PARTS)
            x_parts = (rows // top_k).to(tl.int64)[:, None] * x_stride + parts[None, :]
            inside = has_row[:, None] & (parts + SEGMENT // PARTS <= end)[None, :]
            prefetch(x_ptr + x_parts, SEGMENT // PARTS * 2, inside, PDL)
        wait_for_predecessor(PDL)
        if not EARLY:
            let_next_start(PDL)
    if is_idle:
        return
    if source_ptr is None:
        sources = rows // top_k
    else:
        sources = tl.load(source_ptr + rows, mask=has_row, other=0)
    x_ptrs = x_ptr + sources.to(tl.int64) * x_stride  # [TILE_ROWS]
    if WHOLE:
        x = load_block(x_ptrs, has_row, ks, end, EVEN_K)
        xa = tl.trans(tl.dot(a, tl.trans(x)))
    else:
        zero = tl.zeros([BLOCK_RANKS, TILE_ROWS], dtype=tl.float32)
        chain = mma_chain(x_ptrs, has_row, a_ptrs, has_rank, begin, end, zero, BLOCK_K, EVEN_K)
        xa = tl.trans(chain)
    planes = (slices * tl.num_programs(2) + segment).to(tl.int64) * num_rows
    offsets = rows.to(tl.int64)[:, None] * max_rank + (planes * max_rank + ranks)[None, :]
    mask = has_row[:, None] & has_rank[None, :]
    if SUMS:
        tl.store(xa_ptr.to(tl.pointer_type(tl.float32)) + offsets, xa, mask=mask)
    else:
        tl.store(xa_ptr.to(tl.pointer_type(tl.bfloat16)) + offsets, xa.to(tl.bfloat16), mask=mask)


@functools.lru_cache(4096)
def shrink_launch(
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
    tile: tiles.ShrinkTile,
    pdl: bool,
) -> Launch:
    """The launch of a shrink: x, xa, A tables, rank tables, tile_key, tile_rows, source.

    xa is memory for float32 [slices, segments, num_rows, max_rank] where there are several
    segments, else for bfloat16 [slices, num_rows, max_rank]; only what a row and a rank own is
    written.
    """
    can_prefetch = is_aligned and x_stride % 8 == 0 and not has_source
    parts = tile.num_warps * 32 // tile.tile_rows if can_prefetch else 0
    one_slice = num_slices == 1 or max_rank % tile.block_ranks == 0
    segments = num_segments(k_in)
    rank_programs = tiles.cdiv(num_slices * max_rank, tile.block_ranks)
    return Launch(
        shrink_kernel,
        (num_slices, k_in, max_rank, x_stride, top_k, has_source, is_aligned),
        (num_tiles, rank_programs, segments),
        (num_rows, top_k, k_in, max_rank, x_stride),
        (
            tile.tile_rows,
            tile.block_ranks,
            tile.block_k,
            one_slice,
            k_in % tile.block_k == 0,
            SEGMENT,
            segments > 1,
            has_plan,
            tile.early,
            parts,
            pdl,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
