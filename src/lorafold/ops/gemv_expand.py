"""The expand of numerics "gemv", and the fold: out += scale * bf16(xa B^T), in place.

B's columns of `max_rank` elements lie one after the other, so a warp loads a piece of it whole, and
each thread has one lane of several columns. B is loaded ahead of the wait for the shrink and stays
in registers for all rows of the program.
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
from lorafold.ops.rows import fold, let_next_start, select, slice_of, wait_for_predecessor

__all__ = ["gemv_expand_kernel", "gemv_expand_launch"]


@triton.jit
def _vectors(
    xa_ptrs,
    has_row,
    b,
    b_ptrs,
    has_col,
    num,
    rank_ptr,
    MAX_RANK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The sum of each lane [columns, rows, LANES] over `num` vectors, given B's first per lane."""
    acc = tl.zeros([b_ptrs.shape[0], xa_ptrs.shape[1], LANES], dtype=tl.float32)
    xa = load_vectors(xa_ptrs, has_row, 0, LANES, 1, num, MAX_RANK % 8 == 0)
    acc = after_loads(acc, rank_ptr)
    acc = add_vectors(acc, b, xa)
    if MAX_RANK > 8 * LANES:
        for first in range(LANES, num, LANES):
            more_b = load_vectors(b_ptrs, has_col, first, LANES, 1, num, MAX_RANK % 8 == 0)
            more_xa = load_vectors(xa_ptrs, has_row, first, LANES, 1, num, MAX_RANK % 8 == 0)
            acc = keep_lanes(acc, add_vectors(acc, more_b, more_xa), num - first)
    return acc


@triton.jit
def _tail(acc, xa_ptrs, has_row, b_ptrs, has_col, rank, LANES: tl.constexpr):
    """acc plus the products of what is beyond the rank's last vector."""
    num = rank // 8
    b = load_tail(b_ptrs, has_col, num * 8, rank % 8, LANES)
    xa = load_tail(xa_ptrs, has_row, num * 8, rank % 8, LANES)
    return keep_lanes(acc, tl.fma(b, xa, acc), rank % 8)


@triton.jit
def _fold_columns(
    xa_ptr,
    out_ptr,
    out_stride,
    b,
    b_ptr,
    cols,
    n_out,
    scale,
    rank,
    rank_ptr,
    tile_rows_ptr,
    place,
    end,
    MAX_RANK: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEP: tl.constexpr,
    TAIL: tl.constexpr,
    FOLD: tl.constexpr,
):
    """All rows of a program for some columns, of which b holds the first vector per lane."""
    b_ptrs = b_ptr + (cols * MAX_RANK)[:, None, None]
    has_col = cols < n_out
    for at in range(place, end, STEP):
        rows = rows_at(tile_rows_ptr, at, end, BLOCK_ROWS)
        has_row = rows >= 0
        mask = has_col[:, None] & has_row[None, :]
        to = out_ptr + cols[:, None] + (rows.to(tl.int64) * out_stride)[None, :]
        out = tl.load(to, mask=mask, other=0.0) if FOLD else 0.0
        xa_ptrs = (xa_ptr + rows.to(tl.int64) * MAX_RANK)[None, :, None]
        has_xa, has_b = has_row[None, :, None], has_col[:, None, None]
        acc = _vectors(xa_ptrs, has_xa, b, b_ptrs, has_b, rank // 8, rank_ptr, MAX_RANK, LANES)
        if TAIL:
            acc = _tail(acc, xa_ptrs, has_xa, b_ptrs, has_b, rank, LANES)
        delta = lanes_total(acc).to(tl.bfloat16)
        tl.store(to, fold(out, delta, scale) if FOLD else delta, mask=mask)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "b_tables",
        "scale_tables",
        "rank_tables",
        "tile_key_ptr",
        "tile_rows_ptr",
    ],
)
def gemv_expand_kernel(
    xa_ptr,
    out_ptrs,
    b_tables,
    scale_tables,
    rank_tables,
    tile_key_ptr,
    tile_rows_ptr,
    num_rows,
    n_outs,
    out_strides,
    MAX_RANK: tl.constexpr,
    LANES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    FOLD: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row, n] += scale * bf16(dot(xa[row], B[n])) for a block of columns and rows of a tile."""
    if EARLY:
        let_next_start(PDL)
    key, place = tile_of(tile_key_ptr, tile_rows_ptr, num_rows, TILE_ROWS, BLOCK_ROWS, PARTS)
    if key < 0:
        wait_for_predecessor(PDL)
        return
    slice_id, first_program = slice_of(tl.program_id(1), n_outs, BLOCK_COLS)
    address = tl.load(select(b_tables, slice_id) + key)
    if address == 0:
        wait_for_predecessor(PDL)
        return
    rank_ptr = select(rank_tables, slice_id) + key
    rank = tl.load(rank_ptr)
    scale = tl.load(select(scale_tables, slice_id) + key)
    begin = (tl.program_id(1) - first_program) * BLOCK_COLS
    cols = tl.arange(0, BLOCK_COLS)
    n_out = select(n_outs, slice_id) - begin  # from here on
    b_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
    b_ptr += begin.to(tl.int64) * MAX_RANK
    has_b = (cols < n_out)[:, None, None]
    b = load_vectors(
        b_ptr + (cols * MAX_RANK)[:, None, None], has_b, 0, LANES, 1, rank // 8, MAX_RANK % 8 == 0
    )
    end = end_of_tile(tile_rows_ptr, num_rows, place, TILE_ROWS)
    out_ptr = select(out_ptrs, slice_id) + begin
    out_stride = select(out_strides, slice_id)
    xa_ptr = xa_ptr.to(tl.pointer_type(tl.bfloat16))
    xa_ptr += slice_id * num_rows.to(tl.int64) * MAX_RANK
    wait_for_predecessor(PDL)
    if not EARLY:
        let_next_start(PDL)
    STEP: tl.constexpr = PARTS * BLOCK_ROWS
    if rank % 8 == 0:
        _fold_columns(
            xa_ptr, out_ptr, out_stride, b, b_ptr, cols, n_out, scale, rank, rank_ptr,
            tile_rows_ptr, place, end, MAX_RANK, LANES, BLOCK_ROWS, STEP, False, FOLD,
        )  # fmt: skip
    else:
        # The tail takes up to seven lanes, and what it needs more must not cost registers.
        WIDER: tl.constexpr = LANES if LANES > 8 else 8
        NARROW: tl.constexpr = BLOCK_COLS * LANES // (2 * WIDER)
        for first in range(0, BLOCK_COLS, NARROW):
            some = first + tl.arange(0, NARROW)
            has_some = (some < n_out)[:, None, None]
            some_b = load_vectors(
                b_ptr + (some * MAX_RANK)[:, None, None],
                has_some,
                0,
                WIDER,
                1,
                rank // 8,
                MAX_RANK % 8 == 0,
            )
            _fold_columns(
                xa_ptr, out_ptr, out_stride, some_b, b_ptr, some, n_out, scale, rank,
                rank_ptr, tile_rows_ptr, place, end, MAX_RANK, WIDER, BLOCK_ROWS, STEP, True, FOLD,
            )  # fmt: skip


@functools.lru_cache(4096)
def gemv_expand_launch(
    num_rows: int,
    num_tiles: int,
    max_rank: int,
    n_outs: tuple[int, ...],
    out_strides: tuple[int, ...],
    are_aligned: tuple[bool, ...],
    has_plan: bool,
    tile: tiles.GemvExpandTile,
    folds: bool,
    pdl: bool,
) -> Launch:
    """The launch of an expand: xa, outs, B tables, scale tables, rank tables, tile_key, tile_rows.

    outs: one [num_rows, n_out] bfloat16 view per slice, changed in place: the deltas are folded
    into them, or, without `folds`, stored as they are. Without a plan, rows stand in tiles in
    order.
    """
    row_programs = num_tiles * tile.parts
    column_programs = sum(tiles.cdiv(n, tile.block_cols) for n in n_outs)
    return Launch(
        gemv_expand_kernel,
        (n_outs, out_strides, has_plan, are_aligned),
        (row_programs, column_programs, 1),
        (num_rows, n_outs, out_strides),
        (
            max_rank,
            min(64, tiles.next_power_of_2(tiles.cdiv(max_rank, 8))),
            tile.tile_rows,
            tile.block_rows,
            tile.parts,
            tile.block_cols,
            folds,
            row_programs * column_programs <= tiles.EARLY_PROGRAMS,
            pdl,
        ),
        num_warps=tile.num_warps,
        num_stages=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
