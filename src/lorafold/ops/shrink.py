"""The shrink: xa = x A^T for rows of many keys, rounded to bf16 once.

    xa[slice, row, j] = bf16( dot(x[source(row), :], A[slice, key(row)][j, :]) )

Under "mma" one program takes one segment of K. Where there are several, their fp32 sums are stored
as they are, and the expand adds them in ascending order and rounds.

With a plan, the plan, the tables and A are read ahead of the wait for the kernel before:
`make_plan` ends with a fence, so all that was written before it is there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafold.numerics import SEGMENT
from lorafold.ops import tiles
from lorafold.ops.compiled import is_aligned, launch
from lorafold.ops.dot import gemv_total, load_block, mma_chain
from lorafold.ops.rows import let_next_start, program_rows, select, wait_for_predecessor
from lorafold.ops.scratch import num_segments

__all__ = ["shrink_kernel", "shrink_triton"]


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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    GEMV: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """xa[plane, row, j] = dot(x[source(row)], A[j]) over one segment; under GEMV, over all of K."""
    WHOLE: tl.constexpr = BLOCK_K == SEGMENT and not GEMV
    if AHEAD and WHOLE:
        let_next_start(PDL)
    elif not AHEAD:
        wait_for_predecessor(PDL)
        let_next_start(PDL)
    key, rows = program_rows(tile_key_ptr, tile_rows_ptr, num_rows, TILE_ROWS, BLOCK_ROWS)
    if key < 0:
        if AHEAD:
            wait_for_predecessor(PDL)
        return
    rank_blocks = tl.cdiv(max_rank, BLOCK_RANKS)
    slice_id = tl.program_id(1) // rank_blocks
    ranks = tl.program_id(1) % rank_blocks * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
    a_address = tl.load(select(a_tables, slice_id) + key)
    rank = tl.load(select(rank_tables, slice_id) + key)
    has_rank = (ranks < rank) & (a_address != 0)
    a_ptr = tl.multiple_of(a_address.to(tl.pointer_type(tl.bfloat16)), 16)
    a_ptrs = a_ptr + ranks.to(tl.int64) * k_in  # [BLOCK_RANKS]
    has_row = rows >= 0
    segment = tl.program_id(2)
    begin = segment * SEGMENT
    end = min(begin + SEGMENT, k_in)
    ks = begin + tl.arange(0, BLOCK_K)
    plane = slice_id * tl.num_programs(2) + segment
    if WHOLE:
        # All of A that this program needs is on its way before the wait.
        a = load_block(a_ptrs, has_rank, ks, end, EVEN_K)
    if AHEAD:
        wait_for_predecessor(PDL)
        if not WHOLE:
            let_next_start(PDL)
    if tl.program_id(1) % rank_blocks * BLOCK_RANKS >= rank:
        return
    if source_ptr is None:
        sources = rows // top_k
    else:
        sources = tl.load(source_ptr + rows, mask=has_row, other=0)
    x_ptrs = x_ptr + sources.to(tl.int64) * x_stride  # [BLOCK_ROWS]
    if GEMV:
        xa = gemv_total(
            x_ptrs, has_row, a_ptrs, has_rank, k_in, BLOCK_ROWS, BLOCK_RANKS, BLOCK_K // 8
        )
    elif WHOLE:
        x = load_block(x_ptrs, has_row, ks, end, EVEN_K)
        xa = tl.trans(tl.dot(a, tl.trans(x)))
    else:
        zero = tl.zeros([BLOCK_RANKS, BLOCK_ROWS], dtype=tl.float32)
        chain = mma_chain(x_ptrs, has_row, a_ptrs, has_rank, begin, end, zero, BLOCK_K, EVEN_K)
        xa = tl.trans(chain)
    offsets = (plane.to(tl.int64) * num_rows + rows)[:, None] * max_rank + ranks[None, :]
    mask = has_row[:, None] & has_rank[None, :]
    tl.store(xa_ptr + offsets, xa.to(xa_ptr.dtype.element_ty), mask=mask)


def shrink_triton(
    x: Tensor,
    xa: Tensor,
    a_tables: tuple[Tensor, ...],
    rank_tables: tuple[Tensor, ...],
    tile_key: Tensor | None,
    tile_rows: Tensor | None,
    source: Tensor | None,
    num_rows: int,
    top_k: int,
    k_in: int,
    max_rank: int,
    tile: tiles.ShrinkTile,
    gemv: bool,
    pdl: bool,
) -> None:
    """Launch the shrink.

    xa is float32 [slices, segments, num_rows, max_rank] under "mma" with several segments, else
    bfloat16 [slices, num_rows, max_rank]; only what a row and a rank own is written.
    """
    rank_blocks = tiles.cdiv(max_rank, tile.block_ranks)
    segments = 1 if gemv else num_segments(k_in)
    launch(
        shrink_kernel,
        (len(a_tables), k_in, max_rank, x.stride(0), top_k, source is None, is_aligned(x)),
        (tile.programs(num_rows, tile_key), len(a_tables) * rank_blocks, segments),
        (
            x,
            xa,
            a_tables,
            rank_tables,
            tile_key,
            tile_rows,
            source,
            num_rows,
            top_k,
            k_in,
            max_rank,
            x.stride(0),
        ),
        (
            tile.tile_rows,
            tile.block_rows,
            tile.block_ranks,
            tile.block_k,
            k_in % tile.block_k == 0,
            SEGMENT,
            gemv,
            tile_key is not None,
            pdl,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
        launch_pdl=pdl,
    )
