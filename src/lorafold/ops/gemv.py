"""Numerics "gemv" on the CPU: plain IEEE fp32 sums in the fixed order of 64 lanes.

The order is section 2 of the contract. `lorafold.ops.reference` is the entrance that the rest of
the library uses.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

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
_REMEMBERED = 64  # shapes of tiles: a decode step of a mixed batch has about eight


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
    accumulate = _adder(exact)
    for block in blocks((*out.shape, lanes), _BLOCK_LANES):
        part = out[block]
        acc = _zeros((*part.shape, lanes), rows_inner)
        for left, right in pairs:
            count = left.shape[-1]
            active = acc if count == lanes else acc.narrow(-1, 0, count)
            own = (operand_block(side, block, 1) for side in (left, right))
            for a, b in zip(*own, strict=True):
                accumulate(active, a, b)
        by_lane = acc.movedim(-1, 0) if rows_inner else acc.view(-1, lanes).t()
        tree, one, other = _tree(by_lane.reshape(lanes, -1).contiguous())
        for low, high in tree:
            low.add_(high)
        part.copy_((one + other).view(part.shape))
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
    accumulate = _adder(_products_are_exact(x, w))
    x_groups, num_rows, tiles, k = x.shape
    num_columns = int(w.shape[0])
    # Blocks of one size: the last begins early, and makes some rows twice.
    held = max(1, _TILE_LANES // (num_columns * _lanes(k)))
    size = -(-num_rows // -(-num_rows // held))
    with torch.inference_mode():  # views and small operations cost less there
        sums = _SUMS.of(_TileShape(size, x_groups, tiles, k, tuple(widths)))
        sums.take_w(w)
        out = torch.empty(num_rows, num_columns, dtype=torch.float32, device="cpu")
        for start in range(0, num_rows, size):
            first = min(start, num_rows - size)
            sums.take_x(x.narrow(1, first, size).transpose(0, 1))
            sums.sum_into(out.narrow(0, first, size), accumulate)
    return out


class _TileShape(NamedTuple):
    """Rows at a time, groups that x has (one for all, or each its own), tiles, K, and widths."""

    num_rows: int
    x_groups: int
    tiles: int
    k: int
    widths: tuple[int, ...]

    @property
    def num_columns(self) -> int:
        return self.tiles * sum(self.widths)

    @property
    def rows_inner(self) -> bool:
        return max(self.widths) > _lanes(self.k)

    @property
    def sizes(self) -> list[int]:
        """Elements of x, w, the accumulators, and these once more by lane if they are not yet."""
        accumulators = self.num_rows * self.num_columns * _lanes(self.k)
        x = self.num_rows * self.x_groups * self.tiles * self.k
        by_lane = 0 if self.rows_inner else accumulators
        return [x, self.num_columns * self.k, accumulators, by_lane]


class _TileSums:
    """Memory and views for tiles of one shape.

    A decode step has few shapes, and each many times; making the views takes as long as the sums.

    Args:
        shape: of the tiles.
        memory: float32, as much as the shape says; others may use it between two calls.
    """

    def __init__(self, shape: _TileShape, memory: Tensor) -> None:
        x, w, acc, by_lane = memory.split_with_sizes(shape.sizes)
        lanes = _lanes(shape.k)
        x_shape = (shape.num_rows, shape.x_groups, shape.tiles, shape.k)
        self._x = _Room(x, x_shape, shape.rows_inner)
        self._w = _Room(w, (shape.num_columns, shape.k), shape.rows_inner)
        self._acc = acc
        rows = _laid_out(acc, (shape.num_rows, shape.num_columns), lanes, shape.rows_inner)
        self._steps = list(self._pair(shape, rows))
        self._turned = (
            None if shape.rows_inner else (by_lane.view(lanes, -1), acc.view(-1, lanes).t())
        )
        self._tree, *self._root = _tree((acc if shape.rows_inner else by_lane).view(lanes, -1))

    def _pair(self, shape: _TileShape, acc: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Accumulators, elements of x and elements of w, step by step.

        Groups of equal width that stand side by side make a step together.
        """
        column, group = 0, 0
        for width, equal in itertools.groupby(shape.widths):
            count = len(list(equal))
            by_group = (count, shape.tiles, width)
            columns = math.prod(by_group)
            own = acc.narrow(1, column, columns).view(shape.num_rows, *by_group, -1)
            for x, w in zip(self._x.bodies, self._w.bodies, strict=True):
                left = x if shape.x_groups == 1 else x.narrow(2, group, count)
                right = w.narrow(1, column, columns).view(len(w), 1, *by_group, -1)
                for a, b in zip(_rounds(left.unsqueeze(-2)), _rounds(right), strict=True):
                    active = own.narrow(-1, 0, a.shape[-1])
                    yield from ((active, one, other) for one, other in zip(a, b, strict=True))
            column, group = column + columns, group + count

    def take_x(self, x: Tensor) -> None:
        """Lay x [num_rows, x_groups, tiles, K] bf16 out by lanes."""
        self._x.fill(x)

    def take_w(self, w: Tensor) -> None:
        """Lay w [columns, K] bf16 out by lanes."""
        self._w.fill(w)

    def sum_into(self, out: Tensor, accumulate: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        """Write the dot products to out [num_rows, columns] float32."""
        self._acc.zero_()
        for acc, left, right in self._steps:
            accumulate(acc, left, right)
        if self._turned is not None:
            by_lane, by_column = self._turned
            by_lane.copy_(by_column)
        for low, high in self._tree:
            low.add_(high)
        torch.add(*self._root, out=out.view(-1))


class _SumsOfThread(threading.local):
    """Sums of the latest shapes of a thread, which work one after the other in the same memory.

    The memory is as large as the largest needs: what one call converts to fp32 at a time.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")
        self._known: dict[_TileShape, _TileSums] = {}

    def of(self, shape: _TileShape) -> _TileSums:
        found = self._known.get(shape)
        if found is None:
            size = sum(shape.sizes)
            if size > self._memory.numel() or len(self._known) == _REMEMBERED:
                self._known.clear()
            if size > self._memory.numel():
                self._memory = torch.empty(size, dtype=torch.float32, device="cpu")
            found = self._known[shape] = _TileSums(shape, self._memory[:size])
        return found


_SUMS = _SumsOfThread()


class _Room:
    """Memory for an operand by lanes.

    Args:
        memory: float32, an element for each.
        shape: [..., K] of the operand.
        rows_inner: the layout in memory.

    Attributes:
        bodies: as `_bodies`.
    """

    def __init__(self, memory: Tensor, shape: tuple[int, ...], rows_inner: bool) -> None:
        *outer, k = shape
        self.bodies: list[Tensor] = []
        self._by_vector: list[tuple[int, int, Tensor]] = []  # where a body begins in K, its size
        start = 0
        for steps, count in zip((_VECTOR, 1), divmod(k, _VECTOR), strict=True):
            if count:
                end = start + steps * count
                part = memory[math.prod(outer) * start : math.prod(outer) * end]
                body = _laid_out(part, (steps, *outer), count, rows_inner)
                self.bodies.append(body)
                self._by_vector.append((start, end - start, body.movedim(0, -1)))
                start = end

    def fill(self, t: Tensor) -> None:
        """Write t, bf16, of the operand's shape, here."""
        # One strided copy that also converts takes half the time of `t().contiguous()`.
        for start, size, body in self._by_vector:
            part = t if size == t.shape[-1] else t.narrow(-1, start, size)
            body.copy_(part.view(body.shape))


def _laid_out(memory: Tensor, outer: Sequence[int], lanes: int, rows_inner: bool) -> Tensor:
    """A view [*outer, lanes]; in memory the lanes come first if rows_inner."""
    if rows_inner:
        return memory.view(lanes, *outer).movedim(0, -1)
    return memory.view(*outer, lanes)


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
    memory = torch.empty(t.numel(), dtype=torch.float32, device="cpu")
    room = _Room(memory, tuple(t.shape), rows_inner)
    room.fill(t)
    return room.bodies


def _zeros(shape: Sequence[int], rows_inner: bool) -> Tensor:
    """An fp32 tensor [..., rows, lanes]; in memory the lanes come first if rows_inner."""
    *outer, lanes = shape
    return _laid_out(torch.zeros(math.prod(shape), dtype=torch.float32), outer, lanes, rows_inner)


def _adder(is_exact: bool) -> Callable[[Tensor, Tensor, Tensor], object]:
    """What adds the products of one element per lane to the accumulators, in place.

    Where every product fits fp32 exactly, `addcmul_` gives the same bits whether or not a machine
    fuses it, as it may.
    """
    return Tensor.addcmul_ if is_exact else _add_fused


def _add_fused(acc: Tensor, left: Tensor, right: Tensor) -> None:
    """For all inputs: a fused multiply-add, that is one rounding per element."""
    # A product has 16 bits, so rounding to 53 bits first makes no midpoint of fp32.
    acc.copy_(acc.double() + left.double() * right.double())


def _tree(by_lane: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    """The balanced tree in each half of 32 lanes, as pairs of which the first takes the second.

    Args:
        by_lane: [lanes, n], contiguous.

    Returns:
        The pairs, and where the two halves are then: [n] each.
    """
    levels = min(len(by_lane), _LANES // 2).bit_length() - 1
    halves, pairs = by_lane.view(-1, *[2] * levels, by_lane.shape[1]), []
    for _ in range(levels):
        low, high = halves.unbind(1)
        pairs.append((low, high))
        halves = low
    # Lanes left out hold +0, and adding that once changes no more than adding it at every level.
    return pairs, halves[0], halves[1] if len(halves) == 2 else by_lane.new_zeros(())


def _products_are_exact(x: Tensor, w: Tensor) -> bool:
    """Whether every product fits fp32 exactly; a needless no only costs time."""
    x_low, x_high = exponents(x)
    w_low, w_high = (x_low, x_high) if w is x else exponents(w)
    normal = min(x_low, w_low) >= -126 and max(x_high, w_high) <= 127
    # The last bit of a product is worth at least 2**-149, and the product is below 2**128.
    return normal and x_low + w_low - 14 >= -149 and x_high + w_high + 2 <= 128
