"""Sections 1 to 3 of the numeric contract, sentence by sentence, in Python integers and fractions.

Slow, and shares nothing with the library: every rounding is done on exact numbers here.
Values are Python floats, which hold every bf16 and fp32 exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

ZERO_TO_ONE = (0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x8080, 0x3F80, 0xBF80)
LARGEST_TO_NAN = (0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1)
ROOTS_OF_THE_ENDS = (0x1F80, 0x2000, 0xA000, 0x5F80, 0x6000, 0xE07F)
SPECIAL = (*ZERO_TO_ONE, *LARGEST_TO_NAN, *ROOTS_OF_THE_ENDS)
"""Patterns of bf16 that random ones rarely hit; products of the last group reach fp32's ends."""


def exponent(value: float) -> int:
    """The exponent that a value other than 0 has in fp32: -126 for subnormals."""
    return max(math.frexp(value)[1] - 1, -126)


def scaled(value: Fraction, digits: int) -> tuple[Fraction, Fraction]:
    """(value as a multiple of its last place, that place) in an fp32-like format."""
    top = value.numerator.bit_length() - value.denominator.bit_length()
    top -= abs(value) < Fraction(2) ** top
    unit = Fraction(2) ** (max(top, -126) - digits)
    return value / unit, unit


def nearest(value: Fraction, digits: int = 23, sign: float = 1.0) -> float:
    """Round to nearest even to fp32 (23 digits after the first) or bf16 (7)."""
    if value == 0:
        return math.copysign(0.0, sign)
    multiple, unit = scaled(value, digits)
    rounded = round(multiple) * unit  # Python's round of a Fraction is to even
    if abs(rounded) >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(abs(rounded)), value)


def truncated(value: Fraction) -> float:
    """Toward zero to fp32; zero is +0, and what is too large is infinity."""
    if value == 0:
        return 0.0
    multiple, unit = scaled(value, 23)
    result = math.trunc(multiple) * unit
    if abs(result) >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return float(result) if result else 0.0


def fma(a: float, b: float, c: float) -> float:
    product = a * b  # exact: 16 bits, and within the range of a Python float
    if not (math.isfinite(product) and math.isfinite(c)) or product + c == 0.0:
        return product + c
    return nearest(Fraction(product) + Fraction(c))


def gemv(x: Sequence[float], w: Sequence[float]) -> float:
    vectors = len(x) // 8
    lanes = []
    for lane in range(64):
        acc = 0.0
        for v in range(lane, vectors, 64):
            for e in range(8):
                acc = fma(x[8 * v + e], w[8 * v + e], acc)
        for k in range(8 * vectors + lane, len(x), 64):
            acc = fma(x[k], w[k], acc)
        lanes.append(acc)
    halves = [lanes[:32], lanes[32:]]
    for half in halves:
        for offset in (16, 8, 4, 2, 1):
            for i in range(offset):
                half[i] = fma(half[i], 1.0, half[i + offset])
    return fma(halves[0][0], 1.0, halves[1][0])


def step(c: float, a: Sequence[float], b: Sequence[float], bits: int) -> float:
    """STEP: one tensor-core instruction."""
    products = [p * q for p, q in zip(a, b, strict=True)]
    if not all(map(math.isfinite, [c, *products])):
        return sum(products, c)  # infinities and NaN only: no rounding matters
    pairs = [(p, q) for p, q in zip(a, b, strict=True) if p and q]
    terms = [(exponent(p) + exponent(q), Fraction(p * q)) for p, q in pairs]
    if c:
        terms.append((exponent(c), Fraction(c)))
    top = max([e for e, _ in terms] + [-133])
    grid = Fraction(2) ** (top - bits)
    return truncated(sum(math.trunc(term / grid) for _, term in terms) * grid)


def chain(
    x: Sequence[float], w: Sequence[float], c: float = 0.0, width: int = 16, bits: int = 25
) -> float:
    x, w = ([*t, *[0.0] * (-len(t) % width)] for t in (x, w))
    for k in range(0, len(x), width):
        c = step(c, x[k : k + width], w[k : k + width], bits)
    return c


def mma(x: Sequence[float], w: Sequence[float]) -> float:
    total = 0.0
    for k in range(0, len(x), 1024):
        total = fma(chain(x[k : k + 1024], w[k : k + 1024]), 1.0, total)
    return total


def fold(out: float, delta: float, scale: float) -> float:
    """scale is an fp32; the product and the sum are rounded one after the other."""
    product = scale * delta  # exact: 32 bits
    if math.isfinite(product) and product:
        product = nearest(Fraction(scale) * Fraction(delta))
    total = fma(product, 1.0, out)
    if not math.isfinite(total):
        return total
    return nearest(Fraction(total), 7, total)


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
