"""Numerics "gemv" on the CPU: plain IEEE fp32 sums in the fixed order of 64 lanes.

The order is section 2 of the contract. `lorafold.ops.reference` is the entrance that the rest of
the library uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorafold.ops.operands import (
    blocks,
    broadcast_batch,
    exponents,
    operand_block,
    require_subnormals,
)

__all__ = ["gemv_dot"]

_LANES = 64
_VECTOR = 8  # elements that a lane takes at a time
_BLOCK_LANES = 1 << 15  # accumulators worked on at a time: 128 KiB, which stays in L2
_HELD_PRODUCTS = 1 << 17  # products of several steps made at a time: 512 KiB


def gemv_dot(x: Tensor, w: Tensor) -> Tensor:
    """Dot products of rows of x with rows of w, summed by 64 lanes in plain IEEE fp32.

        y[i, j] = tree over 64 lanes of (a chain of fused multiply-adds over the lane's elements)

    Args:
        x: [..., n, K] bfloat16 on the CPU.
        w: [..., m, K] bfloat16 on the CPU; leading dimensions broadcast against those of x.

    Returns:
        [..., n, m] float32. Each element depends on its own row of x and of w only.

    Raises:
        RouteError: if x and w do not fit together.
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> x = torch.ones(2, 1000, dtype=torch.bfloat16)
        >>> gemv_dot(x, x[:1])
        tensor([[1000.],
                [1000.]])
    """
    batch = broadcast_batch(x, w)
    require_subnormals()
    out = torch.zeros((*batch, int(x.shape[-2]), int(w.shape[-2])), dtype=torch.float32)
    runs = _runs(int(x.shape[-1]))
    if not runs or not out.numel():
        return out
    lanes = 1 << (max(count for _, _, count in runs) - 1).bit_length()
    # The longer of the two inner dimensions lies contiguous in memory, for the vector units.
    rows_inner = int(w.shape[-2]) > lanes
    if x.shape[:-2] == w.shape[:-2]:  # one pass over both, which counts when they are small
        both = torch.cat([x, w], -2)
        exact = _products_are_exact(both, both) or _products_are_exact(x, w)
        steps = _by_lane(both, lanes, rows_inner)
        left, right = steps[..., : x.shape[-2], :], steps[..., x.shape[-2] :, :]
    else:
        exact = _products_are_exact(x, w)
        dims = len(batch) + 2
        left, right = (_by_lane(t[(None,) * (dims - t.dim())], lanes, rows_inner) for t in (x, w))
    left, right = left.unsqueeze(-2), right.unsqueeze(-3)
    accumulate = _accumulate if exact else _accumulate_fused
    for block in blocks((*out.shape, lanes), _BLOCK_LANES):
        a, b, part = operand_block(left, block, 1), operand_block(right, block, 1), out[block]
        acc = _empty((*part.shape, lanes), rows_inner).zero_()
        for start, stop, count in runs:
            active = (acc, a[start:stop], b[start:stop])
            accumulate(*(t if count == lanes else t.narrow(-1, 0, count) for t in active))
        part.copy_(_lane_tree(acc))
    return out


def _runs(k: int) -> list[tuple[int, int, int]]:
    """(first step, end, lanes that have an element) of the steps of one element per lane."""
    vectors, tail = divmod(k, _VECTOR)
    full, rest = divmod(vectors, _LANES)
    split, end = full * _VECTOR, (full + bool(rest)) * _VECTOR
    runs = [(0, split, _LANES), (split, end, rest), (end, end + 1, tail)]
    return [run for run in runs if run[0] < run[1] and run[2]]


def _by_lane(t: Tensor, lanes: int, rows_inner: bool) -> Tensor:
    """[..., rows, K] bf16 -> [steps, ..., rows, lanes] fp32, undefined where no element belongs."""
    *outer, k = t.shape
    vectors, tail = divmod(k, _VECTOR)
    rounds = -(-vectors // lanes)
    steps = rounds * _VECTOR
    out = _empty((steps + bool(tail), *outer, lanes), rows_inner)
    if rounds:
        source = t[..., : vectors * _VECTOR] if tail else t
        if vectors % lanes:
            source = torch.nn.functional.pad(source, (0, (rounds * lanes - vectors) * _VECTOR))
        source = source.view(*outer, rounds, lanes, _VECTOR)
        order = (-3, -1, *range(len(outer)), -2)  # the round and the element of the vector first
        out[:steps].view(rounds, _VECTOR, *outer, lanes).copy_(source.permute(order))
    if tail:
        out[steps, ..., :tail] = t[..., vectors * _VECTOR :]
    return out


def _empty(shape: Sequence[int], rows_inner: bool) -> Tensor:
    """An fp32 tensor [..., rows, lanes], the rows contiguous if rows_inner, else the lanes."""
    if not rows_inner:
        return torch.empty(*shape)
    return torch.empty(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def _accumulate(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a[step] * b[step], steps ascending, where every product fits fp32 exactly."""
    held = max(1, _HELD_PRODUCTS // acc.numel())
    for start in range(0, a.shape[0], held):
        for product in (a[start : start + held] * b[start : start + held]).unbind():
            acc += product


def _accumulate_fused(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """The same for all inputs: a fused multiply-add, that is one rounding per element."""
    a, b = a.double(), b.double()
    for step in range(a.shape[0]):
        # A product has 16 bits, so rounding to 53 bits first makes no midpoint of fp32.
        acc.copy_(acc.double() + a[step] * b[step])


def _lane_tree(acc: Tensor) -> Tensor:
    """[..., lanes] -> [...]: a balanced tree in each half of 32 lanes, then half 0 + half 1."""
    lanes = int(acc.shape[-1])
    if lanes < _LANES:
        acc = acc + 0.0  # the lanes left out hold +0, and adding that to -0 gives +0
    halves = acc.view(*acc.shape[:-1], -1, min(lanes, _LANES // 2))
    while halves.shape[-1] > 1:
        low, high = halves.chunk(2, -1)
        halves = low + high
    total = halves[..., 0, 0]
    return total + halves[..., 1, 0] if lanes == _LANES else total


def _products_are_exact(x: Tensor, w: Tensor) -> bool:
    """Whether every product fits fp32 exactly; a needless no only costs time."""
    x_low, x_high = exponents(x)
    w_low, w_high = (x_low, x_high) if w is x else exponents(w)
    normal = min(x_low, w_low) >= -126 and max(x_high, w_high) <= 127
    # The last bit of a product is worth at least 2**-149, and the product is below 2**128.
    return normal and x_low + w_low - 14 >= -149 and x_high + w_high + 2 <= 128
