"""What both dot products of the CPU reference ask of their operands before they start.

Checks, the range of exponents (which decides between a fast and a general way to the same bits),
and the cutting of a result into blocks that stay in a core's own memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from lorafold.errors import BackendError, RouteError

__all__ = ["blocks", "broadcast_batch", "exponents", "operand_block", "require_subnormals"]

_SMALLEST_SUBNORMAL = 5e-324
# dtype -> the mask of all bits but the sign, as an integer of that size (a tensor is faster than a
# number), and where the exponent starts
_PATTERN = {
    torch.bfloat16: (torch.tensor(0x7FFF, dtype=torch.int16, device="cpu"), 7),
    torch.float32: (torch.tensor(0x7FFF_FFFF, dtype=torch.int32, device="cpu"), 23),
}


def broadcast_batch(x: Tensor, w: Tensor) -> tuple[int, ...]:
    """The broadcast leading dimensions of x [..., n, K] and w [..., m, K].

    Raises:
        RouteError: if they are not two bfloat16 CPU tensors of one K whose batches broadcast.

    Example:
        >>> x, w = (torch.zeros(s, dtype=torch.bfloat16) for s in [(5, 1, 2, 8), (3, 4, 8)])
        >>> broadcast_batch(x, w)
        (5, 3)
    """
    for name, t in (("x", x), ("w", w)):
        if t.dtype != torch.bfloat16 or t.device.type != "cpu" or t.dim() < 2:
            raise RouteError(
                f"`{name}` must be bfloat16 [..., rows, K] on the CPU; given: "
                f"{t.dtype} {tuple(t.shape)} on {t.device}"
            )
    batch = _broadcast(tuple(x.shape[:-2]), tuple(w.shape[:-2]))
    if batch is None or x.shape[-1] != w.shape[-1]:
        raise RouteError(
            "x [..., n, K] and w [..., m, K] must have one K, and leading dimensions that "
            f"broadcast; given: {tuple(x.shape)} and {tuple(w.shape)}"
        )
    return batch


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that both broadcast to, None if there is none."""
    pairs = list(zip_longest(reversed(one), reversed(other), fillvalue=1))
    if any(p not in (q, 1) and q != 1 for p, q in pairs):
        return None
    return tuple(q if p == 1 else p for p, q in reversed(pairs))


def require_subnormals() -> None:
    """Refuse to work where this thread flushes subnormal numbers to zero, which changes bits.

    Raises:
        BackendError: if it does.

    Example:
        >>> require_subnormals()
    """
    # The mode holds for Python's own floats too, which are asked much faster than a tensor.
    if _SMALLEST_SUBNORMAL * 1.0 == 0.0:
        raise BackendError(
            "the CPU reference needs subnormal numbers, but this thread flushes them to zero; "
            "hint: call torch.set_flush_denormal(False)"
        )


def exponents(t: Tensor) -> tuple[int, int]:
    """Exponents of the smallest and the largest non-zero magnitude in t; 0 and 0 if all are zero.

    Args:
        t: bfloat16 or float32, any shape.

    Returns:
        Two numbers from -126 to 127; -127 stands for subnormals, 128 for infinity and NaN.

    Example:
        >>> exponents(torch.tensor([0.0, -0.75, 5.0]))
        (-1, 2)
    """
    if not t.numel():
        return 0, 0
    mask, shift = _PATTERN[t.dtype]
    magnitude = t.view(mask.dtype) & mask
    low, high = map(int, magnitude.aminmax())
    if not high:
        return 0, 0
    if not low:  # once more, with zero turned into the largest pattern
        low = int((magnitude.sub_(1) & mask).amin()) + 1
    return (low >> shift) - 127, (high >> shift) - 127


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Cut a shape into blocks of at most `limit` elements, without ever cutting the last dimension.

    Yields:
        Slices for the first dimensions; the others are whole.

    Example:
        >>> list(blocks((3, 100), 200))
        [(slice(0, 2, None),), (slice(2, 4, None),)]
    """
    inner, dim = shape[-1], len(shape) - 1
    while dim and inner * shape[dim - 1] <= limit:
        dim -= 1
        inner *= shape[dim]
    if not dim:
        yield ()
        return
    chunk = max(1, limit // inner)
    outer = shape[: dim - 1]
    for flat in range(torch.Size(outer).numel()):
        index, left = [], flat
        for size in reversed(outer):
            left, at = divmod(left, size)
            index.append(slice(at, at + 1))
        for start in range(0, shape[dim - 1], chunk):
            yield (*reversed(index), slice(start, start + chunk))


def operand_block(operand: Tensor, block: tuple[slice, ...], skip: int) -> Tensor:
    """The part of a broadcast operand that a block of the result needs.

    Args:
        operand: `skip` dimensions of its own, then those of the result, or 1 where it broadcasts.
        block: one of `blocks` of the result.
        skip: the dimensions of the operand that the result does not have.

    Example:
        >>> operand_block(torch.zeros(7, 1, 4), (slice(0, 2), slice(2, 4)), 1).shape
        torch.Size([7, 1, 2])
    """
    if not block:
        return operand
    sizes = operand.shape[skip:]
    own = (slice(None) if n == 1 else part for part, n in zip(block, sizes, strict=False))
    return operand[(slice(None),) * skip + tuple(own)]
