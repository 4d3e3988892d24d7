"""Tables of what the contract in words gives (`lorafold.verify.literal`), and bf16 for them.

Values are Python floats, which hold every bf16 and fp32 exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from lorafold.numerics import TensorCoreModel
from lorafold.verify import literal
from lorafold.verify.literal import fold

__all__ = ["Fraction", "fold"]

ZERO_TO_ONE = (0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x8080, 0x3F80, 0xBF80)
LARGEST_TO_NAN = (0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1)
ROOTS_OF_THE_ENDS = (0x1F80, 0x2000, 0xA000, 0x5F80, 0x6000, 0xE07F)
SPECIAL = (*ZERO_TO_ONE, *LARGEST_TO_NAN, *ROOTS_OF_THE_ENDS)
"""Patterns of bf16 that random ones rarely hit; products of the last group reach fp32's ends."""


gemv = partial(literal.dot, numerics="gemv")
mma = partial(literal.dot, numerics="mma")


def nearest(value: Fraction, digits: int = 23, sign: float = 1.0) -> float:
    """Round to nearest even to fp32 (23 digits after the first) or bf16 (7)."""
    return literal.nearest(value, digits) if value else math.copysign(0.0, sign)


def fma(a: float, b: float, c: float) -> float:
    return literal.add(c, a * b)  # exact: 16 bits, and within the range of a Python float


def chain(
    x: Sequence[float], w: Sequence[float], c: float = 0.0, width: int = 16, bits: int = 25
) -> float:
    return literal.chain(x, w, TensorCoreModel(width, bits), c)


def table(function, x: Tensor, w: Tensor, *more: Tensor) -> Tensor:
    """function of every row of x with every row of w (and the element of `more`), as fp32."""
    rows = [
        [
            function(x_row, w_row, *(float(t[i, j]) for t in more))
            for j, w_row in enumerate(w.double().tolist())
        ]
        for i, x_row in enumerate(x.double().tolist())
    ]
    return torch.tensor(rows, dtype=torch.float64).float()


def bits(t: Tensor) -> Tensor:
    """fp32 or bf16 as integers, every NaN as one value."""
    integer = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[t.dtype]
    return torch.where(t.isnan(), torch.full_like(t, math.nan), t).view(integer)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    wrong = (bits(actual) != bits(expected)).nonzero()
    assert not len(wrong), (
        f"{len(wrong)} of {actual.numel()} differ, first at {wrong[0].tolist()}: "
        f"{actual[tuple(wrong[0])]:.9g} instead of {expected[tuple(wrong[0])]:.9g}"
    )


def from_patterns(patterns: Sequence[int], *shape: int) -> Tensor:
    """bf16 from 16-bit patterns."""
    words = torch.tensor(patterns, dtype=torch.int32).to(torch.int16)
    return words.view(torch.bfloat16).view(shape)


def random_bf16(seed: int, *shape: int, spread: float = 0.0) -> Tensor:
    """Gaussian, times 2**(another Gaussian * spread), which reaches every exponent."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    powers = torch.randn(*shape, generator=generator, dtype=torch.float64) * spread
    return (values * 2.0**powers).bfloat16()
