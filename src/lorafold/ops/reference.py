"""The CPU truth: what every kernel on every device must compute, bit for bit.

Dot products under both numerics, the rounding points, and the delta of whole rows. PyTorch in
eager mode only: `matmul`, `einsum`, `addcmul`, `add(alpha=...)` and `torch.compile` fuse or reorder
by machine and shape, so none of them may be used here; but `gemv` may use `addcmul` where products
are exact, because fused or not is then the same. The sums are in `gemv` and `tensor_core`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.numerics import HOPPER, Numerics, TensorCoreModel, resolve
from lorafold.ops.gemv import gemv_dot, gemv_tiles
from lorafold.ops.operands import require_subnormals
from lorafold.ops.tensor_core import mma_chain, mma_dot

__all__ = [
    "apply_rows",
    "delta_gathered",
    "delta_rows",
    "dot",
    "fold",
    "gemv_dot",
    "matrix_at",
    "mma_chain",
    "mma_dot",
    "round_bf16",
    "tile_dots",
]


def dot(x: Tensor, w: Tensor, numerics: Numerics, *, model: TensorCoreModel = HOPPER) -> Tensor:
    """Dot products of rows of x [..., n, K] with rows of w [..., m, K], under the given numerics.

    Args:
        x: [..., n, K] bfloat16 on the CPU.
        w: [..., m, K] bfloat16 on the CPU; leading dimensions broadcast against those of x.
        numerics: "gemv" or "mma".
        model: the tensor cores that "mma" follows.

    Returns:
        [..., n, m] float32.

    Raises:
        RouteError: if x and w do not fit together.
        BackendError: if numerics is another word, or this thread flushes subnormal numbers to zero.

    Example:
        >>> x = torch.ones(1, 3, dtype=torch.bfloat16)
        >>> dot(x, x, "gemv").item(), dot(x, x, "mma").item()
        (3.0, 3.0)
    """
    chosen = resolve(numerics, x.device)
    return gemv_dot(x, w) if chosen == "gemv" else mma_dot(x, w, model=model)


def tile_dots(
    x: Tensor,
    w: Tensor,
    widths: Sequence[int],
    numerics: Numerics,
    *,
    model: TensorCoreModel = HOPPER,
) -> Tensor:
    """`dot` of many small matrices that lie one after the other: one call, the same bits.

    Args:
        x: [len(widths) or 1, n, tiles, K] bfloat16 on the CPU: a group's rows, or those of all.
        w: [tiles * sum(widths), K] bfloat16 on the CPU: for each group, [tiles, width, K].
        widths: columns of a tile, per group.
        numerics: "gemv" or "mma".
        model: the tensor cores that "mma" follows.

    Returns:
        [n, tiles * sum(widths)] float32: for each group, [tiles, width].

    Raises:
        BackendError: if numerics is another word, or this thread flushes subnormal numbers to zero.

    Example:
        >>> x = torch.ones(1, 1, 2, 3, dtype=torch.bfloat16)
        >>> w = torch.tensor([1, 2, 3, 4]).bfloat16().unsqueeze(1).repeat(1, 3)
        >>> tile_dots(x, w, [1, 1], "mma").tolist()
        [[3.0, 6.0, 9.0, 12.0]]
    """
    if resolve(numerics, x.device) == "gemv":
        return gemv_tiles(x, w, widths)
    num_rows, tiles, k = x.shape[1:]
    parts = [
        mma_dot(own.transpose(0, 1), part.view(tiles, -1, k), model=model)
        for own, part in zip(
            x.expand(len(widths), -1, -1, -1),
            w.split_with_sizes([tiles * n for n in widths]),
            strict=True,
        )
    ]
    return torch.cat([part.transpose(0, 1).reshape(num_rows, -1) for part in parts], 1)


def round_bf16(t: Tensor) -> Tensor:
    """Round fp32 to bf16: to nearest, ties to even, subnormals included.

    Args:
        t: any shape, float32.

    Returns:
        The same shape, bfloat16. A NaN stays one; its pattern is not part of the contract.

    Example:
        >>> round_bf16(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])).tolist()
        [1.0, 1.015625]
    """
    return t.to(torch.bfloat16)


def fold(out: Tensor, delta: Tensor, scale: float | Tensor) -> Tensor:
    """Add the scaled delta to the base layer's output, as a new tensor.

        bf16( f32( f32(out) + f32(scale * f32(delta)) ) )    product and sum each rounded

    Args:
        out: [..., n_out] bfloat16, the base layer's output.
        delta: bfloat16, the same shape.
        scale: a number, which is first rounded to fp32, or a float32 tensor that broadcasts
            against delta (such as [n, 1] for one scale per row).

    Returns:
        The shape of out, bfloat16.

    Raises:
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> ones = torch.ones(2, dtype=torch.bfloat16)
        >>> fold(ones, ones, 0.5)
        tensor([1.5000, 1.5000], dtype=torch.bfloat16)
    """
    require_subnormals()
    scale = torch.as_tensor(scale, dtype=torch.float32)
    return round_bf16(out.float() + scale * delta.float())


def delta_rows(
    x: Tensor, a: Tensor, b: Tensor, numerics: Numerics, *, model: TensorCoreModel = HOPPER
) -> Tensor:
    """The unscaled delta that one adapter adds to rows: shrink, round, expand, round.

        bf16( bf16(x A^T) B^T )

    Args:
        x: [n, k_in] bfloat16.
        a: [rank, k_in] bfloat16. The rank must be the true one: under "gemv" it decides which lane
            takes which element of the expand, and infinity times the +0 of padding is NaN.
        b: [n_out, rank] bfloat16.
        numerics: "gemv" or "mma".
        model: the tensor cores that "mma" follows.

    Returns:
        [n, n_out] bfloat16. A row depends on its own row of x only.

    Raises:
        RouteError: if x, a and b do not fit together.
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> x, a, b = (torch.ones(s, dtype=torch.bfloat16) for s in [(1, 4), (2, 4), (3, 2)])
        >>> delta_rows(x, a, b, "gemv").tolist()
        [[8.0, 8.0, 8.0]]
    """
    shrunk = round_bf16(dot(x, a, numerics, model=model))
    return round_bf16(dot(shrunk, b, numerics, model=model))


def delta_gathered(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    numerics: Numerics,
    *,
    ranks: Tensor | None = None,
    model: TensorCoreModel = HOPPER,
) -> Tensor:
    """`delta_rows` where every row has its own A and B: one call for a mixed batch, the same bits.

    Args:
        x: [n, k_in] bfloat16.
        a: [n, rank, k_in] bfloat16, padded to one rank with anything.
        b: [n, n_out, rank] bfloat16, likewise.
        numerics: "gemv" or "mma".
        ranks: [n] integer, the true ranks, where they differ; what lies beyond takes no part.
        model: the tensor cores that "mma" follows.

    Returns:
        [n, n_out] bfloat16.

    Raises:
        RouteError: if the tensors do not fit together.
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> x, a, b = (torch.ones(s, dtype=torch.bfloat16) for s in [(1, 4), (1, 2, 4), (1, 3, 2)])
        >>> delta_gathered(x, a, b, "gemv", ranks=torch.tensor([1])).tolist()
        [[4.0, 4.0, 4.0]]
    """
    if x.dim() != 2 or a.dim() != 3 or b.dim() != 3 or not len(x) == len(a) == len(b):
        raise RouteError(
            "x [n, k_in], a [n, rank, k_in] and b [n, n_out, rank] must have one n; given: "
            f"{tuple(x.shape)}, {tuple(a.shape)} and {tuple(b.shape)}"
        )
    shrunk = round_bf16(dot(x.unsqueeze(1), a, numerics, model=model))
    if ranks is None:
        return round_bf16(dot(shrunk, b, numerics, model=model)).squeeze(1)
    delta = torch.empty(b.shape[:2], dtype=torch.bfloat16)
    for rank in sorted(set(ranks.tolist())):
        rows = (ranks == rank).nonzero().squeeze(1)
        part = dot(shrunk[rows, :, :rank], b[rows, :, :rank], numerics, model=model)
        delta[rows] = round_bf16(part).squeeze(1)
    return delta


def apply_rows(
    out: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | Tensor,
    numerics: Numerics,
    *,
    model: TensorCoreModel = HOPPER,
) -> None:
    """Fold one adapter's delta of rows into the base layer's output, *in place*.

        out[i] <- fold(out[i], delta_rows(x[i]), scale)

    Args:
        out: [n, n_out] bfloat16; may be a strided view.
        x: [n, k_in] bfloat16.
        a: [rank, k_in] bfloat16.
        b: [n_out, rank] bfloat16.
        scale: as for `fold`.
        numerics: "gemv" or "mma".
        model: the tensor cores that "mma" follows.

    Raises:
        RouteError: if x, a and b do not fit together; out is then as before.
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> out = torch.zeros(1, 3, dtype=torch.bfloat16)
        >>> x, a, b = (torch.ones(s, dtype=torch.bfloat16) for s in [(1, 4), (2, 4), (3, 2)])
        >>> apply_rows(out, x, a, b, 0.5, "gemv")
        >>> out.tolist()
        [[4.0, 4.0, 4.0]]
    """
    out.copy_(fold(out, delta_rows(x, a, b, numerics, model=model), scale))


def matrix_at(address: int, rows: int, cols: int) -> Tensor:
    """The bf16 matrix at an address of CPU memory, as a view without a copy.

    The view does not keep the memory alive: whoever holds the address does.

    Args:
        address: of the first element, in bytes.
        rows: number of rows.
        cols: elements per row, which is also the distance between rows.

    Returns:
        [rows, cols] bfloat16, contiguous.

    Raises:
        RouteError: if the address is 0 (a slot without this target) or a size is below 1.

    Example:
        >>> held = torch.arange(6, dtype=torch.bfloat16)
        >>> matrix_at(held.data_ptr(), 2, 3).tolist()
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    if not address or rows < 1 or cols < 1:
        raise RouteError(
            "a matrix needs an address other than 0, and at least one row and one column; "
            f"given: address {address}, {rows} rows, {cols} columns"
        )
    # An address in the upper half comes out of an int64 table as a negative number.
    buffer: Any = (ctypes.c_uint16 * (rows * cols)).from_address(address & 0xFFFF_FFFF_FFFF_FFFF)
    return torch.frombuffer(buffer, dtype=torch.bfloat16).view(rows, cols)
