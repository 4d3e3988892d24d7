"""Device functions: one segment of a dot product of numerics "mma", in the contract's order.

Rows of x against rows of a weight matrix (w: A, or B) whose K elements are contiguous, in fp32.
Tile sizes, warps and stages do not enter the bits.
"""

import triton
import triton.language as tl

__all__ = ["load_block", "mma_chain"]


@triton.jit
def load_block(row_ptrs, row_mask, ks, k_end, EVEN_K: tl.constexpr):
    """[rows, len(ks)] elements of the rows, +0 outside them and from k_end on."""
    mask = row_mask[:, None]
    if not EVEN_K:
        mask = mask & (ks < k_end)[None, :]
    return tl.load(row_ptrs[:, None] + ks[None, :], mask=mask, other=0.0)


@triton.jit
def mma_chain(
    x_ptrs, x_mask, w_ptrs, w_mask, k_begin, k_end, acc, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr
):
    """acc [BLOCK_W, BLOCK_ROWS] continued by the steps of k_begin .. k_end in ascending order."""
    for k in range(k_begin, k_end, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        x = load_block(x_ptrs, x_mask, ks, k_end, EVEN_K)
        w = load_block(w_ptrs, w_mask, ks, k_end, EVEN_K)
        acc = tl.dot(w, tl.trans(x), acc)
    return acc
