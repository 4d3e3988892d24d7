"""Numerics "gemv" on the CPU: plain IEEE fp32 sums in the fixed order of 64 lanes.

The order is section 2 of the contract. `lorafold.ops.reference` is the entrance that the rest of
the library uses.
"""

from __future__ import annotations

import itertools
import math
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

__all__ = ["gemv_dot", "gemv_tiles"]

_LANES = 64
_VECTOR = 8  # elements that a lane takes at a time
_BLOCK_LANES = 1 << 15  # accumulators worked on at a time: 128 KiB, which stays in L2
_TILE_LANES = 1 << 17  # of many small matrices, where fewer operations count more: 512 KiB


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
    num_x, num_w, k = int(x.shape[-2]), int(w.shape[-2]), int(x.shape[-1])
    out = torch.zeros((*batch, num_x, num_w), dtype=torch.float32)
    if not k or not out.numel():
        return out
    lanes = _lanes(k)
    # The longer of the two inner dimensions lies contiguous in memory, for the vector units.
    rows_inner = num_w > lanes
    if x.shape[:-2] == w.shape[:-2]:  # one pass over both, which counts when they are small
        both = torch.cat([x, w], -2)
        exact = _products_are_exact(both, both) or _products_are_exact(x, w)
        runs = [run.split_with_sizes([num_x, num_w], -2) for run in _runs(both, rows_inner)]
    else:
        exact = _products_are_exact(x, w)
        dims = len(batch) + 2
        sides = [_runs(t[(None,) * (dims - t.dim())], rows_inner) for t in (x, w)]
        runs = list(zip(*sides, strict=True))
    pairs = [(left.unsqueeze(-2), right.unsqueeze(-3)) for left, right in runs]
    accumulate = _add_exact if exact else _add_fused
    for block in blocks((*out.shape, lanes), _BLOCK_LANES):
        part = out[block]
        acc = _zeros((*part.shape, lanes), rows_inner)
        for left, right in pairs:
            count = left.shape[-1]
            active = acc if count == lanes else acc.narrow(-1, 0, count)
            accumulate(active, operand_block(left, block, 1), operand_block(right, block, 1))
        part.copy_(_lane_tree(acc, rows_inner).view(part.shape))
    return out


def gemv_tiles(x: Tensor, w: Tensor, widths: Sequence[int]) -> Tensor:
    """Dot products of many small matrices side by side, in few steps: as `gemv_dot`, same bits.

        y[t, s, i, j] = x[s, t, i] . w_s[i, j]    w holds w_0, w_1, ... one after the other

    Args:
        x: [len(widths) or 1, n, tiles, K] bfloat16 on the CPU; one for all where it is 1.
        w: [tiles * sum(widths), K] bfloat16 on the CPU: for each width, [tiles, width, K].
        widths: columns of each matrix, per group.

    Returns:
        [n, tiles * sum(widths)] float32: for each width, [tiles, width].

    Raises:
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> x = torch.ones(1, 1, 2, 8, dtype=torch.bfloat16)
        >>> w = torch.tensor([1, 2, 3, 4, 5, 6]).bfloat16().unsqueeze(1).repeat(1, 8)
        >>> gemv_tiles(x, w, widths=[1, 2]).tolist()  # two of one column, two of two columns
        [[8.0, 16.0, 24.0, 32.0, 40.0, 48.0]]
    """
    require_subnormals()
    num_rows, num_columns, k = int(x.shape[1]), int(w.shape[0]), int(w.shape[1])
    lanes = _lanes(k)
    rows_inner = max(widths) > lanes
    accumulate = _add_exact if _products_are_exact(x, w) else _add_fused
    groups = _side_by_side(x.transpose(0, 1), w, widths, rows_inner)
    held = max(1, _TILE_LANES // (num_columns * lanes))
    parts = []
    for start in range(0, num_rows, held):
        acc = _zeros((min(held, num_rows - start), num_columns, lanes), rows_inner)
        column = 0
        for shape, runs in groups:
            size = math.prod(shape)
            own = acc.narrow(1, column, size).view(len(acc), *shape, lanes)
            for left, right in runs:
                active = own.narrow(-1, 0, left.shape[-1])
                accumulate(active, left[:, start : start + held], right)
            column += size
        parts.append(_lane_tree(acc, rows_inner).view(-1, num_columns))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _side_by_side(
    x: Tensor, w: Tensor, widths: Sequence[int], rows_inner: bool
) -> list[tuple[tuple[int, int, int], list[tuple[Tensor, Tensor]]]]:
    """The runs of each stretch of groups of equal width, which are worked on at once.

    Args:
        x: [n, len(widths) or 1, tiles, K].
        w: [columns, K].
        widths: per group.
        rows_inner: the layout in memory.

    Returns:
        Per stretch (groups, tiles, width) and its runs: x [steps, n, groups or 1, tiles, 1, lanes]
        and w [steps, 1, groups, tiles, width, lanes].
    """
    left, right = _bodies(x, rows_inner), _bodies(w, rows_inner)
    found, column, group = [], 0, 0
    for width, equal in itertools.groupby(widths):
        count = len(list(equal))
        shape = (count, int(x.shape[2]), width)
        runs: list[tuple[Tensor, Tensor]] = []
        for own, columns in zip(left, right, strict=True):
            mine = own if x.shape[1] == 1 else own.narrow(2, group, count)
            theirs = columns.narrow(1, column, math.prod(shape))
            theirs = theirs.view(len(columns), 1, *shape, -1)
            runs.extend(zip(_rounds(mine.unsqueeze(-2)), _rounds(theirs), strict=True))
        found.append((shape, runs))
        column, group = column + math.prod(shape), group + count
    return found


def _lanes(k: int) -> int:
    """A power of two: lanes from this one on have no element of K."""
    vectors, tail = divmod(k, _VECTOR)
    return 1 << (max(min(vectors, _LANES), tail) - 1).bit_length()


def _runs(t: Tensor, rows_inner: bool) -> list[Tensor]:
    """[..., rows, K] bf16 -> one [steps, ..., rows, lanes] fp32 after the other.

    A step is one element per lane. A run has the lanes that have an element: all of them while
    there are vectors for all, then those with a last vector, then those with one of the tail.
    """
    return [run for body in _bodies(t, rows_inner) for run in _rounds(body)]


def _rounds(body: Tensor) -> Sequence[Tensor]:
    """[..., vectors] -> one [..., lanes] per round of all lanes; the last may have fewer."""
    return (body,) if body.shape[-1] <= _LANES else torch.split(body, _LANES, -1)


def _bodies(t: Tensor, rows_inner: bool) -> list[Tensor]:
    """[..., rows, K] bf16 -> [8, ..., rows, vectors] and [1, ..., rows, tail], if any, fp32."""
    vectors, tail = divmod(int(t.shape[-1]), _VECTOR)
    bodies = []
    if vectors:
        body = t[..., : vectors * _VECTOR] if tail else t
        bodies.append(_by_lane(body, _VECTOR, rows_inner))
    if tail:
        bodies.append(_by_lane(t[..., vectors * _VECTOR :], 1, rows_inner))
    return bodies


def _by_lane(t: Tensor, steps: int, rows_inner: bool) -> Tensor:
    """[..., rows, lanes * steps] bf16 -> [steps, ..., rows, lanes] fp32."""
    *outer, k = t.shape
    if rows_inner:
        return _transposed(t.reshape(-1, k)).view(k // steps, steps, *outer).movedim(0, -1)
    return _transposed(t.reshape(-1, steps)).view(steps, *outer, k // steps)


def _transposed(t: Tensor) -> Tensor:
    """[rows, columns] bf16 | fp32 -> [columns, rows] fp32, contiguous."""
    # One strided copy that also converts takes half the time of `t().contiguous()`.
    return torch.empty(t.shape[1], t.shape[0]).copy_(t.t())


def _zeros(shape: Sequence[int], rows_inner: bool) -> Tensor:
    """An fp32 tensor [..., rows, lanes]; in memory the lanes come first if rows_inner."""
    if not rows_inner:
        return torch.zeros(*shape)
    return torch.zeros(shape[-1], *shape[:-1]).movedim(0, -1)


def _add_exact(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a[step] * b[step], steps ascending, where every product fits fp32 exactly.

    Then `addcmul_` gives the same bits whether or not a machine fuses it, as it may.
    """
    for left, right in zip(a.unbind(), b.unbind(), strict=True):
        acc.addcmul_(left, right)


def _add_fused(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """The same for all inputs: a fused multiply-add, that is one rounding per element."""
    for left, right in zip(a.double().unbind(), b.double().unbind(), strict=True):
        # A product has 16 bits, so rounding to 53 bits first makes no midpoint of fp32.
        acc.copy_(acc.double() + left * right)


def _lane_tree(acc: Tensor, rows_inner: bool) -> Tensor:
    """[..., lanes] -> flat [...]: a balanced tree in each half of 32 lanes, then their sum."""
    lanes = int(acc.shape[-1])
    by_lane = acc.movedim(-1, 0) if rows_inner else _transposed(acc.view(-1, lanes))
    levels = min(lanes, _LANES // 2).bit_length() - 1
    halves = by_lane.reshape(-1, *[2] * levels, by_lane[0].numel())
    for _ in range(levels):
        low, high = halves.unbind(1)
        halves = low + high
    # Lanes left out hold +0, and adding that once changes no more than adding it at every level.
    return halves[0] + (halves[1] if lanes == _LANES else 0.0)


def _products_are_exact(x: Tensor, w: Tensor) -> bool:
    """Whether every product fits fp32 exactly; a needless no only costs time."""
    x_low, x_high = exponents(x)
    w_low, w_high = (x_low, x_high) if w is x else exponents(w)
    normal = min(x_low, w_low) >= -126 and max(x_high, w_high) <= 127
    # The last bit of a product is worth at least 2**-149, and the product is below 2**128.
    return normal and x_low + w_low - 14 >= -149 and x_high + w_high + 2 <= 128
