"""Device functions: one dot product per (row, weight row), in the order that the contract fixes.

`mma_chain` is one segment of numerics "mma", `gemv_total` the whole of numerics "gemv": rows of x
against rows of a weight matrix (w: A, or B) whose K elements are contiguous, in fp32.
Tile sizes, warps and stages do not enter the bits.
"""

import triton
import triton.language as tl

__all__ = ["gemv_total", "load_block", "mma_chain"]


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


@triton.jit
def _eight(t, M: tl.constexpr, LANES: tl.constexpr):
    """The eight elements of each 16-byte vector of t [M, LANES, 8] as eight fp32 [M, LANES]."""
    even, odd = tl.split(tl.reshape(t.to(tl.float32), [M, LANES, 4, 2]))
    e0, e2 = tl.split(tl.reshape(even, [M, LANES, 2, 2]))
    e1, e3 = tl.split(tl.reshape(odd, [M, LANES, 2, 2]))
    v0, v4 = tl.split(e0)
    v1, v5 = tl.split(e1)
    v2, v6 = tl.split(e2)
    v3, v7 = tl.split(e3)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _add_vectors(acc, x, w, ROWS: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr):
    """acc [ROWS, W, LANES] plus the eight products of each lane's vector, one at a time."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x, ROWS, LANES)
    w0, w1, w2, w3, w4, w5, w6, w7 = _eight(w, W, LANES)
    acc = tl.fma(x0[:, None, :], w0[None, :, :], acc)
    acc = tl.fma(x1[:, None, :], w1[None, :, :], acc)
    acc = tl.fma(x2[:, None, :], w2[None, :, :], acc)
    acc = tl.fma(x3[:, None, :], w3[None, :, :], acc)
    acc = tl.fma(x4[:, None, :], w4[None, :, :], acc)
    acc = tl.fma(x5[:, None, :], w5[None, :, :], acc)
    acc = tl.fma(x6[:, None, :], w6[None, :, :], acc)
    return tl.fma(x7[:, None, :], w7[None, :, :], acc)


@triton.jit
def _add_upper_half(t, P: tl.constexpr, N: tl.constexpr):
    """t [P, N] -> [P, N/2]: element i plus element i + N/2."""
    halves = tl.permute(tl.reshape(t, [P, 2, N // 2]), [0, 2, 1])
    lower, upper = tl.split(halves)
    return lower + upper


@triton.jit
def _tree(acc, ROWS: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr):
    """The contract's tree over 64 lanes, of which all but LANES hold +0: [ROWS, W]."""
    HALVES: tl.constexpr = 2 if LANES == 64 else 1
    P: tl.constexpr = ROWS * W * HALVES
    N: tl.constexpr = LANES // HALVES
    t = tl.reshape(acc, [P, N])
    if N >= 32:
        t = _add_upper_half(t, P, 32)
    if N >= 16:
        t = _add_upper_half(t, P, 16)
    if N >= 8:
        t = _add_upper_half(t, P, 8)
    if N >= 4:
        t = _add_upper_half(t, P, 4)
    if N >= 2:
        t = _add_upper_half(t, P, 2)
    if HALVES == 2:
        first, second = tl.split(tl.reshape(t, [ROWS, W, 2]))
        total = first + second
    else:
        # Lanes that hold +0 take part in the contract's sum: they turn -0 into +0.
        total = tl.reshape(t, [ROWS, W]) + 0.0
    return total


@triton.jit
def gemv_total(
    x_ptrs,
    x_mask,
    w_ptrs,
    w_mask,
    k_in,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    LANES: tl.constexpr,
):
    """64 lanes of 8-element vectors, then the tree: [ROWS, W].

    Lanes that never hold an element are left out: LANES is 64, or at least 8 and K / 8.
    """
    lanes = tl.arange(0, LANES)
    ks = lanes[:, None] * 8 + tl.arange(0, 8)[None, :]  # [LANES, 8]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_W, LANES], dtype=tl.float32)
    num_vectors = k_in // 8
    full = num_vectors // LANES * LANES
    for v in tl.range(0, full, LANES, num_stages=3):
        x = tl.load(x_ptrs[:, None, None] + v * 8 + ks[None], mask=x_mask[:, None, None], other=0.0)
        w = tl.load(w_ptrs[:, None, None] + v * 8 + ks[None], mask=w_mask[:, None, None], other=0.0)
        acc = _add_vectors(acc, x, w, BLOCK_ROWS, BLOCK_W, LANES)
    if full < num_vectors:
        # A lane without an element is left alone: adding zero would turn its -0 into +0.
        has_vector = full + lanes < num_vectors
        inside = has_vector[None, :, None]
        x = tl.load(
            x_ptrs[:, None, None] + full * 8 + ks[None],
            mask=x_mask[:, None, None] & inside,
            other=0.0,
        )
        w = tl.load(
            w_ptrs[:, None, None] + full * 8 + ks[None],
            mask=w_mask[:, None, None] & inside,
            other=0.0,
        )
        added = _add_vectors(acc, x, w, BLOCK_ROWS, BLOCK_W, LANES)
        acc = tl.where(has_vector[None, None, :], added, acc)
    if num_vectors * 8 < k_in:
        k = num_vectors * 8 + lanes
        inside = (k < k_in)[None, :]
        x = tl.load(x_ptrs[:, None] + k[None, :], mask=x_mask[:, None] & inside, other=0.0)
        w = tl.load(w_ptrs[:, None] + k[None, :], mask=w_mask[:, None] & inside, other=0.0)
        x = x.to(tl.float32)[:, None, :]
        w = w.to(tl.float32)[None, :, :]
        acc = tl.where((k < k_in)[None, None, :], tl.fma(x, w, acc), acc)
    return _tree(acc, BLOCK_ROWS, BLOCK_W, LANES)
