"""One tensor-core step per output, with an accumulator that is given: the instruction itself."""

# Triton's decorators and language carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["step_kernel", "step_triton"]

_BLOCK_COLS = 32


@triton.jit
def step_kernel(
    x_ptr,
    w_ptr,
    c_ptr,
    out_ptr,
    num_rows,
    num_cols,
    k_in,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t] = x[t] w[t]^T + c[t], with x [t, rows, k], w [t, cols, k], c [t, rows, cols]."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(2) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    ks = tl.arange(0, BLOCK_K)
    has_row, has_col, has_k = rows < num_rows, cols < num_cols, ks < k_in
    x_ptrs = x_ptr + (tile * num_rows + rows)[:, None] * k_in + ks[None, :]
    w_ptrs = w_ptr + (tile * num_cols + cols)[:, None] * k_in + ks[None, :]
    x = tl.load(x_ptrs, mask=has_row[:, None] & has_k[None, :], other=0.0)
    w = tl.load(w_ptrs, mask=has_col[:, None] & has_k[None, :], other=0.0)
    offsets = (tile * num_rows + rows)[:, None] * num_cols + cols[None, :]
    inside = has_row[:, None] & has_col[None, :]
    c = tl.load(c_ptr + offsets, mask=inside, other=0.0)
    tl.store(out_ptr + offsets, tl.dot(x, tl.trans(w), c), mask=inside)


def step_triton(x: Tensor, w: Tensor, c: Tensor, out: Tensor, block_rows: int) -> None:
    """Launch the step on tiles of `block_rows` rows: on Hopper 16 is `mma.sync`, 64 is `wgmma`."""
    num_tiles, num_rows, k_in = x.shape
    num_cols = w.shape[1]
    grid = (num_tiles, triton.cdiv(num_rows, block_rows), triton.cdiv(num_cols, _BLOCK_COLS))
    step_kernel[grid](
        x,
        w,
        c,
        out,
        num_rows,
        num_cols,
        k_in,
        BLOCK_ROWS=block_rows,
        BLOCK_COLS=_BLOCK_COLS,
        BLOCK_K=16,
        num_warps=4 if block_rows >= 64 else 1,
        enable_fp_fusion=False,
    )
