"""The bits of bf16 tensor cores, computed on the CPU: numerics "mma" of the contract.

Not for speed and not for the GPU: the kernels in `shrink` and `expand` get these very bits from the
hardware. `lorafold.ops.reference` is the entrance that the rest of the library uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.numerics import HOPPER, SEGMENT, TensorCoreModel
from lorafold.ops.operands import (
    blocks,
    broadcast_batch,
    exponents,
    operand_block,
    require_subnormals,
)

__all__ = ["mma_chain", "mma_dot"]

_BLOCK_PRODUCTS = 1 << 15  # products of a step worked on at a time: 128 KiB, which stays in L2
_HELD_PRODUCTS = 1 << 17  # products of several steps made at a time: 512 KiB
_LEAST_TOP = -100  # least exponent of a product that the fast chain takes
_FP32_OF_FP64 = -(1 << 29)  # keeps the 23 mantissa bits that an fp32 has


def mma_dot(
    x: Tensor, w: Tensor, *, model: TensorCoreModel = HOPPER, segment: int = SEGMENT
) -> Tensor:
    """Dot products of rows of x with rows of w as tensor cores sum them, in segments of K.

        y[i, j] = ((0 + seg_0) + seg_1) + ...   in fp32;  seg_g = one chain of steps from +0

    Args:
        x: [..., n, K] bfloat16 on the CPU.
        w: [..., m, K] bfloat16 on the CPU; leading dimensions broadcast against those of x.
        model: the tensor cores to follow.
        segment: elements of K per chain, a multiple of ``model.step``.

    Returns:
        [..., n, m] float32. Each element depends on its own row of x and of w only.

    Raises:
        RouteError: if x and w do not fit together, or segment is no multiple of the step.
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> x = torch.ones(2, 1025, dtype=torch.bfloat16)
        >>> mma_dot(x, x[:1])
        tensor([[1025.],
                [1025.]])
    """
    batch = broadcast_batch(x, w)
    if segment < model.step or segment % model.step:
        raise RouteError(
            f"`segment` must be a positive multiple of the step of {model.step}; given: {segment}"
        )
    if x.shape[-1] <= segment:
        return mma_chain(x, w, model=model)  # never -0, so adding it to +0 changes nothing
    # Segments do not depend on each other, so they run side by side as one more batch dimension.
    x, w = (_cut(t, len(batch), segment).movedim(-2, 0) for t in (x, w))
    parts = mma_chain(x, w, model=model)
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    return total


def mma_chain(
    x: Tensor, w: Tensor, c: Tensor | None = None, *, model: TensorCoreModel = HOPPER
) -> Tensor:
    """One unbroken chain of tensor-core steps over the whole of K, from the accumulator c.

        c <- STEP(c, x[k : k + step], w[k : k + step])   for k ascending

    A last step that is not full is filled with +0. The two steps of 8 that make up one instruction
    on older devices are simply chained.

    Args:
        x: [..., n, K] bfloat16 on the CPU.
        w: [..., m, K] bfloat16 on the CPU; leading dimensions broadcast against those of x.
        c: [..., n, m] float32, the accumulator to start from; None means +0.
        model: the tensor cores to follow.

    Returns:
        [..., n, m] float32, a new tensor.

    Raises:
        RouteError: if x, w and c do not fit together.
        BackendError: if this thread flushes subnormal numbers to zero.

    Example:
        >>> x = torch.tensor([[2.0**12, 2.0**-14, -(2.0**12)]]).bfloat16()
        >>> w = torch.ones(1, 3, dtype=torch.bfloat16)
        >>> mma_chain(x, w).item()  # the small term lies below the grid that the large ones set
        0.0

    Source: section 3 of the contract; arXiv 2511.10909 and arXiv 2512.07004.
    """
    batch = broadcast_batch(x, w)
    require_subnormals()
    shape = (*batch, int(x.shape[-2]), int(w.shape[-2]))
    if c is None:
        out = torch.zeros(shape, dtype=torch.float32)
    elif c.dtype == torch.float32 and c.device.type == "cpu" and tuple(c.shape) == shape:
        out = c.clone(memory_format=torch.contiguous_format)
    else:
        raise RouteError(
            f"`c` must be float32 {shape} on the CPU; given: "
            f"{c.dtype} {tuple(c.shape)} on {c.device}"
        )
    if not x.shape[-1] or not out.numel():
        return out
    chain = _chain if _is_ordinary(x, w, c, model) else _chain_any
    left = _steps(x, len(batch), model.step).unsqueeze(-1)
    right = _steps(w, len(batch), model.step).unsqueeze(-2)
    for block in blocks(shape, max(1, _BLOCK_PRODUCTS // model.step)):
        a, b = operand_block(left, block, 2), operand_block(right, block, 2)
        out[block] = chain(out[block], a, b, model.bits)
    return out


def _is_ordinary(x: Tensor, w: Tensor, c: Tensor | None, model: TensorCoreModel) -> bool:
    """Whether `_chain` can hold every number that may occur; a needless no only costs time."""
    (x_low, x_high), (w_low, w_high) = exponents(x), exponents(w)
    c_low, c_high = (0, 0) if c is None else exponents(c)
    terms = int(x.shape[-1]) + model.step
    return (
        _LEAST_TOP - model.bits >= -126  # so that what is left of a sum is no subnormal
        and min(x_low, w_low) >= -126
        and x_low + w_low >= _LEAST_TOP
        and c_low - 23 >= _LEAST_TOP - model.bits
        and max(x_high + w_high + 2 + terms.bit_length(), c_high + 1) <= 126
        and max(x_high, w_high) <= 127  # an infinity or NaN is not
    )


def _chain(c: Tensor, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """The chain for ordinary numbers: no subnormal, no overflow, no exponent below _LEAST_TOP.

    Powers of two are handled by their fp32 patterns, and a conversion to int32 truncates. Where
    the exponent of the grid is raised to _LEAST_TOP, no term has a bit below that grid.

    Args:
        c: [..., n, m] fp32.
        a: [steps, step, ..., n, 1] fp32.
        b: [steps, step, ..., 1, m] fp32.
        bits: of the model.
    """
    steps, step = a.shape[:2]
    c = c.clone(memory_format=torch.contiguous_format)
    terms = torch.empty(step + 1, *c.shape)
    multiples = torch.empty(step + 1, *c.shape, dtype=torch.int32)
    total = torch.empty(c.shape, dtype=torch.float64)
    top = torch.empty(c.shape, dtype=torch.int32)
    scale = top.view(torch.float32)
    total_pattern, c_pattern = total.view(torch.int64), c.view(torch.int32)
    held = max(1, _HELD_PRODUCTS // terms.numel())
    for start in range(0, steps, held):
        left, right = a[start : start + held], b[start : start + held]
        tops = (_leading_bit(left) * _leading_bit(right)).amax(1).view(torch.int32)
        tops.clamp_(min=(127 + _LEAST_TOP) << 23)
        for products, products_top in zip((left * right).unbind(), tops.unbind(), strict=True):
            torch.bitwise_and(c_pattern, 0x7F80_0000, out=top)
            torch.maximum(top, products_top, out=top)
            torch.sub((254 + bits) << 23, top, out=top)  # now `scale` is 2**bits / 2**top
            torch.mul(products, scale, out=terms[:step])
            torch.mul(c, scale, out=terms[step])
            multiples.copy_(terms)
            torch.sum(multiples, 0, dtype=torch.float64, out=total)
            total.div_(scale)
            total_pattern.bitwise_and_(_FP32_OF_FP64)
            c.copy_(total)
    return c


def _chain_any(c: Tensor, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """The chain for all inputs (as `_chain`), in float64, whose own range is never left."""
    left, right = a.double(), b.double()
    left_top, right_top = _magnitude(left), _magnitude(right)
    for step in range(a.shape[0]):
        wide = c.double()
        top = (left_top[step] * right_top[step]).amax(0)
        # An infinity must not make the grid infinite too, or inf * 0 would turn it into NaN.
        top = torch.maximum(top, _magnitude(wide)).clamp_(2.0**-133, 2.0**300)
        scale = 2.0**bits / top
        total = (left[step] * right[step]).mul_(scale).trunc_().sum(0)
        total += wide.mul_(scale).trunc_()
        c = _truncate(total.div_(scale))
    return c


def _truncate(t: Tensor) -> Tensor:
    """float64 to fp32, toward zero: what becomes zero is +0, what is too large is infinity."""
    t.view(torch.int64).bitwise_and_(_FP32_OF_FP64)
    # Below the normal range an fp32 has fewer bits: multiples of 2**-149 only.
    t = torch.where(t.abs() < 2.0**-126, t.mul(2.0**149).trunc_().mul_(2.0**-149), t)
    return t.add_(0.0).float()


def _leading_bit(t: Tensor) -> Tensor:
    """fp32 without subnormals -> 2**exponent, 0 for 0."""
    return (t.view(torch.int32) & 0x7F80_0000).view(torch.float32)


def _magnitude(t: Tensor) -> Tensor:
    """float64 -> 2**exponent with the exponent that fp32 has: -126 for its subnormals; 0 for 0."""
    power = (t.view(torch.int64) & 0x7FF0_0000_0000_0000).view(torch.float64)
    return torch.where(power > 0, power.clamp(min=2.0**-126), power)


def _cut(t: Tensor, batch_dims: int, size: int) -> Tensor:
    """[..., rows, K] -> [batch_dims ..., rows, pieces, size], the last piece filled with +0."""
    pieces = -(-int(t.shape[-1]) // size)
    t = t[(None,) * (batch_dims + 2 - t.dim())]
    t = torch.nn.functional.pad(t, (0, pieces * size - int(t.shape[-1])))
    return t.view(*t.shape[:-1], pieces, size)


def _steps(t: Tensor, batch_dims: int, step: int) -> Tensor:
    """[..., rows, K] bfloat16 -> [steps, step, batch_dims ..., rows] float32."""
    t = _cut(t, batch_dims, step)
    return t.permute(-2, -1, *range(batch_dims + 1)).contiguous().float()
