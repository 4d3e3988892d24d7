"""The kernel behind `weighted.fold_delta`: one program per row and block of columns."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafold.ops.tiles import cdiv

__all__ = ["fold_delta_kernel", "fold_delta_triton"]

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_columns"])
def fold_delta_kernel(
    out_ptr,
    delta_ptr,
    weights_ptr,
    keys_ptr,
    a_table_ptr,
    num_columns,
    out_stride,
    delta_stride,
    BLOCK: tl.constexpr,
):
    """out[row] += weight[row] * delta[row], product and sum each rounded to fp32."""
    row = tl.program_id(0).to(tl.int64)
    key = tl.load(keys_ptr + row)
    if key < 0:
        return
    if tl.load(a_table_ptr + key) == 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    scaled = tl.load(delta_ptr + row * delta_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        scaled = tl.load(weights_ptr + row) * scaled
    out_ptrs = out_ptr + row * out_stride + columns
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, (out + scaled).to(out_ptr.dtype.element_ty), mask=mask)


def fold_delta_triton(
    out: Tensor, delta: Tensor, weights: Tensor | None, keys: Tensor, a_table: Tensor
) -> None:
    """Launch `fold_delta_kernel`; see `weighted.fold_delta`."""
    num_rows, num_columns = out.shape
    fold_delta_kernel[(num_rows, cdiv(num_columns, _BLOCK))](
        out,
        delta,
        weights,
        keys,
        a_table,
        num_columns,
        out.stride(0),
        delta.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
