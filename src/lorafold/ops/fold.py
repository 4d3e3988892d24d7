"""The fold by itself: out += scale * delta, where the deltas were there before the output.

    out[slice][row, n] = bf16( f32(out) + f32(scale * f32(delta)) )

It does the least that can follow a base layer, so that shrink and expand may run beside it.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from lorafold.ops import tiles
from lorafold.ops.compiled import Launch, is_aligned
from lorafold.ops.rows import fold, select, slice_of

__all__ = ["fold_kernel", "fold_launch", "fold_triton"]


@triton.jit(
    do_not_specialize=["num_rows", "num_keys"],
    do_not_specialize_on_alignment=["b_tables", "scale_tables", "keys_ptr"],
)
def fold_kernel(
    delta_ptrs,
    out_ptrs,
    b_tables,
    scale_tables,
    keys_ptr,
    num_rows,
    num_keys,
    n_outs,
    delta_strides,
    out_strides,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """out[row, n] += scale * delta[row, n] for a few rows and columns."""
    slice_id, first = slice_of(tl.program_id(1), n_outs, BLOCK_COLS)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(1) - first) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    key = tl.load(keys_ptr + rows, mask=rows < num_rows, other=-1)
    has_key = (key >= 0) & (key < num_keys)
    address = tl.load(select(b_tables, slice_id) + key, mask=has_key, other=0)
    scale = tl.load(select(scale_tables, slice_id) + key, mask=has_key, other=0.0)
    has_col = (cols < select(n_outs, slice_id))[None, :]
    rows = rows.to(tl.int64)[:, None]
    deltas = select(delta_ptrs, slice_id) + rows * select(delta_strides, slice_id) + cols[None, :]
    outs = select(out_ptrs, slice_id) + rows * select(out_strides, slice_id) + cols[None, :]
    # Rows whose adapter leaves this slice alone are read too: their addresses come later.
    delta = tl.load(deltas, mask=has_key[:, None] & has_col, other=0.0)
    out = tl.load(outs, mask=has_key[:, None] & has_col, other=0.0)
    tl.store(outs, fold(out, delta, scale[:, None]), mask=(address != 0)[:, None] & has_col)


def fold_triton(
    deltas: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    b_tables: tuple[Tensor, ...],
    scale_tables: tuple[Tensor, ...],
    keys: Tensor,
) -> None:
    """Fold deltas [num_rows, n_out] into outs of the same shapes, row i under keys[i]."""
    launch = fold_launch(
        outs[0].shape[0],
        b_tables[0].shape[0],
        tuple([out.shape[1] for out in outs]),
        tuple([delta.stride(0) for delta in deltas]),
        tuple([out.stride(0) for out in outs]),
        tuple([is_aligned(t) for t in (*deltas, *outs)]),
    )
    launch(deltas, outs, b_tables, scale_tables, keys)


@functools.lru_cache(4096)
def fold_launch(
    num_rows: int,
    num_keys: int,
    n_outs: tuple[int, ...],
    delta_strides: tuple[int, ...],
    out_strides: tuple[int, ...],
    are_aligned: tuple[bool, ...],
) -> Launch:
    """The launch of a fold: deltas, outs, B tables, scale tables, keys."""
    block_rows, block_cols = 4, 512
    columns = sum(tiles.cdiv(n, block_cols) for n in n_outs)
    return Launch(
        fold_kernel,
        (n_outs, delta_strides, out_strides, are_aligned),
        (tiles.cdiv(num_rows, block_rows), columns, 1),
        (num_rows, num_keys, n_outs, delta_strides, out_strides),
        (block_rows, block_cols),
        num_warps=4,
        enable_fp_fusion=False,
    )
