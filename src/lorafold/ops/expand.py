"""The expand of numerics "mma", and the fold: out += scale * bf16(xa B^T), in place.

    delta[row, n] = bf16( dot(xa[slice, row, :], B[slice, key(row)][n, :]) )
    out[slice][row, n] = bf16( f32(out) + f32(scale * f32(delta)) )

The plan, the tables and B are read before the wait for the shrink, xa after it. Outs are read
before it only where the shrink started this kernel late: all that came before it is complete then.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from lorafold.ops import tiles
from lorafold.ops.compiled import Launch
from lorafold.ops.rows import (
    fold,
    let_next_start,
    prefetch,
    program_rows,
    select,
    slice_of,
    wait_for_predecessor,
)

__all__ = ["expand_kernel", "expand_launch"]


@triton.jit
def _load_b(b_ptr, cols, n_out, ks, rank, max_rank):
    """B [BLOCK_COLS, BLOCK_K], +0 beyond the matrix and from the true rank's last vector on."""
    b_ptrs = b_ptr + cols.to(tl.int64)[:, None] * max_rank + ks[None, :]
    return tl.load(b_ptrs, mask=_wanted(cols < n_out, ks, rank, max_rank), other=0.0)


@triton.jit
def _wanted(has_row, ks, rank, max_rank):
    """The elements up to the true rank, in whole 16-byte vectors so that loads stay wide."""
    return has_row[:, None] & (ks // 8 * 8 < rank)[None, :] & (ks < max_rank)[None, :]


@triton.jit
def _load_xa(ptrs, has_row, ks, rank, max_rank, plane_stride, SEGMENTS: tl.constexpr):
    """xa [TILE_ROWS, BLOCK_K] in bf16, +0 from the true rank on: as stored, or the ascending sum
    of its fp32 segments.
    """
    xa_ptrs = ptrs[:, None] + ks[None, :]
    wanted = _wanted(has_row, ks, rank, max_rank)
    if SEGMENTS == 0:
        xa = tl.load(xa_ptrs, mask=wanted, other=0.0)
    else:
        total = tl.load(xa_ptrs, mask=wanted, other=0.0) + 0.0
        for g in tl.static_range(1, SEGMENTS):
            total += tl.load(xa_ptrs + g * plane_stride, mask=wanted, other=0.0)
        xa = total.to(tl.bfloat16)
    return tl.where((ks < rank)[None, :], xa, 0.0)


@triton.jit
def _dot(xa, b, SWAP: tl.constexpr):
    """xa b^T; with few rows, the columns are the M operand, as a tensor core has M >= 16."""
    return tl.trans(tl.dot(b, tl.trans(xa))) if SWAP else tl.dot(xa, tl.trans(b))


@triton.jit
def _dot_on(xa, b, acc, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.trans(tl.dot(b, tl.trans(xa), tl.trans(acc)))
    else:
        acc = tl.dot(xa, tl.trans(b), acc)
    return acc


@triton.jit
def _load_out(out_ptrs, mask, FOLD: tl.constexpr):
    """What deltas are folded into, if they are."""
    return tl.load(out_ptrs, mask=mask, other=0.0) if FOLD else 0.0


@triton.jit
def _finish(out_ptrs, mask, out, delta, scale, FOLD: tl.constexpr):
    """Round the delta to bf16, then fold it, or store it as it is."""
    delta = delta.to(tl.bfloat16)
    tl.store(out_ptrs, fold(out, delta, scale) if FOLD else delta, mask=mask)


@triton.jit
def _one_block(
    xa_ptrs,
    b_ptr,
    out_row_ptrs,
    has_row,
    begin,
    n_out,
    rank,
    max_rank,
    plane_stride,
    scale,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
    SWAP: tl.constexpr,
    FOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of columns, for few programs: what matters is latency, so B is on its way before
    the wait, and outs, in PARTS parts per row, are on theirs to the L2.
    """
    cols = begin + tl.arange(0, BLOCK_COLS)
    ks = tl.arange(0, BLOCK_K)
    out_ptrs, mask = out_row_ptrs + cols[None, :], has_row[:, None] & (cols < n_out)[None, :]
    b = _load_b(b_ptr, cols, n_out, ks, rank, max_rank)
    if PARTS > 0:
        WIDTH: tl.constexpr = BLOCK_COLS // PARTS
        parts = begin + tl.arange(0, PARTS) * WIDTH
        inside = has_row[:, None] & (parts + WIDTH <= n_out)[None, :]
        prefetch(out_row_ptrs + parts[None, :], WIDTH * 2, inside, PDL)
    wait_for_predecessor(PDL)
    out = _load_out(out_ptrs, mask, FOLD)
    xa = _load_xa(xa_ptrs, has_row, ks, rank, max_rank, plane_stride, SEGMENTS)
    delta = _dot(xa, b, SWAP)
    for k in range(BLOCK_K, rank, BLOCK_K):
        b = _load_b(b_ptr, cols, n_out, k + ks, rank, max_rank)
        xa = _load_xa(xa_ptrs, has_row, k + ks, rank, max_rank, plane_stride, SEGMENTS)
        delta = _dot_on(xa, b, delta, SWAP)
    _finish(out_ptrs, mask, out, delta, scale, FOLD)


@triton.jit
def _run_of_blocks(
    xa_ptrs,
    b_ptr,
    out_row_ptrs,
    has_row,
    begin,
    end,
    n_out,
    rank,
    max_rank,
    plane_stride,
    scale,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    SWAP: tl.constexpr,
    FOLD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Many programs: xa is added up once for all blocks of columns, whose loads are pipelined.

    With AHEAD, where outs are complete already, the first of these loads are ahead of the wait.
    """
    ks = tl.arange(0, BLOCK_K)
    if not AHEAD:
        wait_for_predecessor(PDL)
        let_next_start(PDL)
        xa = _load_xa(xa_ptrs, has_row, ks, rank, max_rank, plane_stride, SEGMENTS)
    else:
        xa = tl.zeros([TILE_ROWS, BLOCK_K], dtype=tl.bfloat16)
    for start in tl.range(begin, end, BLOCK_COLS, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_COLS)
        out_ptrs, mask = out_row_ptrs + cols[None, :], has_row[:, None] & (cols < n_out)[None, :]
        b = _load_b(b_ptr, cols, n_out, ks, rank, max_rank)
        out = _load_out(out_ptrs, mask, FOLD)
        if AHEAD:  # noqa: SIM102 (known when this is compiled, the other is not)
            if start == begin:
                wait_for_predecessor(PDL)
                let_next_start(PDL)
                xa = _load_xa(xa_ptrs, has_row, ks, rank, max_rank, plane_stride, SEGMENTS)
        _finish(out_ptrs, mask, out, _dot(xa, b, SWAP), scale, FOLD)


@triton.jit(
    do_not_specialize=["num_rows", "blocks"],
    do_not_specialize_on_alignment=[
        "b_tables",
        "scale_tables",
        "rank_tables",
        "tile_key_ptr",
        "tile_rows_ptr",
    ],
)
def expand_kernel(
    xa_ptr,
    out_ptrs,
    b_tables,
    scale_tables,
    rank_tables,
    tile_key_ptr,
    tile_rows_ptr,
    num_rows,
    max_rank,
    n_outs,
    out_strides,
    blocks,
    TILE_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    LOOP: tl.constexpr,
    STAGES: tl.constexpr,
    FOLD: tl.constexpr,
    AHEAD: tl.constexpr,
    PARTS: tl.constexpr,
    SWAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[row, n] += scale * bf16(dot(xa[row], B[n])) for one tile and a run of columns."""
    if not LOOP:
        let_next_start(PDL)
    key, rows = program_rows(tile_key_ptr, tile_rows_ptr, num_rows, TILE_ROWS)
    if key < 0:
        wait_for_predecessor(PDL)
        return
    slice_id, first = slice_of(tl.program_id(1), n_outs, blocks * BLOCK_COLS)
    b_address = tl.load(select(b_tables, slice_id) + key)
    if b_address == 0:
        wait_for_predecessor(PDL)
        return
    rank = tl.load(select(rank_tables, slice_id) + key)
    scale = tl.load(select(scale_tables, slice_id) + key)
    n_out = select(n_outs, slice_id)
    has_row = rows >= 0
    b_ptr = tl.multiple_of(b_address.to(tl.pointer_type(tl.bfloat16)), 16)
    out_rows = rows.to(tl.int64) * select(out_strides, slice_id)
    out_row_ptrs = select(out_ptrs, slice_id) + out_rows[:, None]  # [TILE_ROWS, 1]
    plane_stride = num_rows.to(tl.int64) * max_rank
    planes = SEGMENTS if SEGMENTS > 0 else 1
    xa_type: tl.constexpr = tl.float32 if SEGMENTS > 0 else tl.bfloat16
    xa_ptr = xa_ptr.to(tl.pointer_type(xa_type)) + slice_id * planes * plane_stride
    xa_ptrs = xa_ptr + rows.to(tl.int64) * max_rank  # [TILE_ROWS]
    begin = (tl.program_id(1) - first) * blocks * BLOCK_COLS
    if not LOOP:
        _one_block(
            xa_ptrs, b_ptr, out_row_ptrs, has_row, begin, n_out, rank, max_rank, plane_stride,
            scale, BLOCK_COLS, BLOCK_K, SEGMENTS, PARTS, SWAP, FOLD, PDL,
        )  # fmt: skip
    else:
        end = min(begin + blocks * BLOCK_COLS, n_out)
        _run_of_blocks(
            xa_ptrs, b_ptr, out_row_ptrs, has_row, begin, end, n_out, rank, max_rank, plane_stride,
            scale, TILE_ROWS, BLOCK_COLS, BLOCK_K, SEGMENTS, STAGES, AHEAD, SWAP, FOLD, PDL,
        )  # fmt: skip


@functools.lru_cache(4096)
def expand_launch(
    num_rows: int,
    num_tiles: int,
    max_rank: int,
    segments: int,
    n_outs: tuple[int, ...],
    out_strides: tuple[int, ...],
    are_aligned: tuple[bool, ...],
    has_plan: bool,
    tile: tiles.ExpandTile,
    folds: bool,
    has_late_shrink: bool,
    pdl: bool,
) -> Launch:
    """The launch of an expand: xa, outs, B tables, scale tables, rank tables, tile_key, tile_rows.

    `segments` is 0 where xa is bfloat16 and ready, else the number of fp32 segment sums to add.
    outs: one [num_rows, n_out] bfloat16 view per slice, changed in place: the deltas are folded
    into them, or, without `folds`, stored as they are. After a shrink that started it late
    (`has_late_shrink`), all that came before that shrink is complete when it starts.
    """
    # Read ahead are outs in whole vectors only: those loads go past the first-level cache, in which
    # something older could be.
    is_wide = all(are_aligned) and all(n % 16 == 0 for n in (*n_outs, *out_strides))
    ahead = tile.ahead and (is_wide or not folds)
    parts = min(tile.block_cols // 8, tile.num_warps * 32 // tile.tile_rows)
    column_programs = sum(tiles.cdiv(n, tile.block_cols * tile.blocks) for n in n_outs)
    return Launch(
        expand_kernel,
        (max_rank, n_outs, out_strides, has_plan, are_aligned),
        (num_tiles, column_programs, 1),
        (num_rows, max_rank, n_outs, out_strides, tile.blocks),
        (
            tile.tile_rows,
            tile.block_cols,
            tile.block_k,
            segments,
            tile.blocks > 1,
            tile.num_stages,
            folds,
            ahead and has_late_shrink,
            parts if ahead and folds else 0,
            tile.tile_rows < 16,
            pdl,
        ),
        num_warps=tile.num_warps,
        num_stages=1,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
