"""The contract word by word, in Python's own integers and fractions: no tensor takes part.

Slow, and independent of everything that it judges. Every value is a Python float, which holds any
bf16 and fp32 exactly; every rounding is done on an exact number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from lorafold.numerics import HOPPER, SEGMENT, Numerics, TensorCoreModel

__all__ = ["add", "chain", "dot", "fold", "fold_row", "nearest", "step"]

_BF16 = 7  # digits after the first
_FP32 = 23
_LEAST = -126  # exponent of subnormals
_LANES = 64
_VECTOR = 8


def _exponent(value: Fraction) -> int:
    """Floor of log2 of a magnitude above 0, but at least that of a subnormal."""
    power = value.numerator.bit_length() - value.denominator.bit_length()
    return max(power if abs(value) >= Fraction(2) ** power else power - 1, _LEAST)


def _float(value: Fraction, sign_of: float) -> float:
    """A multiple of a last place as a float: infinite from 2^128, a zero with the given sign."""
    if abs(value) >= 2**128:
        return math.copysign(math.inf, value)
    return float(value) if value else math.copysign(0.0, sign_of)


def nearest(value: Fraction, digits: int) -> float:
    """Round to nearest, ties to even; what becomes zero keeps its sign.

    Example:
        >>> nearest(Fraction(257, 256), digits=7), nearest(Fraction(259, 256), digits=7)
        (1.0, 1.015625)
    """
    if not value:
        return 0.0
    unit = Fraction(2) ** (_exponent(value) - digits)
    return _float(round(value / unit) * unit, float(value.numerator))


def _bf16(value: float) -> float:
    if not math.isfinite(value) or not value:
        return value
    return nearest(Fraction(value), _BF16)


def add(value: float, product: float) -> float:
    """fp32 value + product, rounded once; the product is exact as a Python float.

    Example:
        >>> add(1.0, 2.0**-24), add(1.0, 2.0**-23)
        (1.0, 1.0000001192092896)
    """
    total = value + product
    if not math.isfinite(total) or not total:
        return total  # infinities, NaN and the sign of a zero are those of Python's own addition
    return nearest(Fraction(value) + Fraction(product), _FP32)


def _gemv(x: Sequence[float], w: Sequence[float]) -> float:
    """Section 2: 64 lanes, then a tree in each half, then the halves."""
    num_vectors = len(x) // _VECTOR
    lanes = []
    for lane in range(_LANES):
        order = [
            vector * _VECTOR + i
            for vector in range(lane, num_vectors, _LANES)
            for i in range(_VECTOR)
        ]
        order += range(num_vectors * _VECTOR + lane, len(x), _LANES)
        acc = 0.0
        for k in order:
            acc = add(acc, x[k] * w[k])
        lanes.append(acc)
    return add(_tree(lanes[: _LANES // 2]), _tree(lanes[_LANES // 2 :]))


def _tree(values: Sequence[float]) -> float:
    """acc[i] += acc[i + 16], then + 8, + 4, + 2, + 1."""
    middle = len(values) // 2
    if not middle:
        return values[0]
    return _tree([add(p, q) for p, q in zip(values[:middle], values[middle:], strict=True)])


def step(c: float, x: Sequence[float], w: Sequence[float], model: TensorCoreModel) -> float:
    """Section 3: one tensor-core step on an fp32 accumulator and at most `model.step` products."""
    products = [p * q for p, q in zip(x, w, strict=True)]
    if not all(math.isfinite(value) for value in (c, *products)):
        return sum(products, c)  # infinities and NaN only: no rounding matters
    terms = [
        (_exponent(Fraction(p)) + _exponent(Fraction(q)), Fraction(p) * Fraction(q))
        for p, q in zip(x, w, strict=True)
        if p and q
    ]
    if c:
        terms.append((_exponent(Fraction(c)), Fraction(c)))
    largest = max([exponent for exponent, _ in terms] + [-133])
    grid = Fraction(2) ** (largest - model.bits)
    total = sum((math.trunc(term / grid) * grid for _, term in terms), Fraction(0))
    if not total:
        return 0.0
    unit = Fraction(2) ** (_exponent(total) - _FP32)
    return _float(math.trunc(total / unit) * unit, 1.0)


def chain(
    x: Sequence[float], w: Sequence[float], model: TensorCoreModel = HOPPER, c: float = 0.0
) -> float:
    """Section 3: steps in ascending order, from an fp32 accumulator.

    Example:
        >>> chain([0.5] * 17, [2.0] * 17, c=1.0)
        18.0
    """
    for k in range(0, len(x), model.step):
        c = step(c, x[k : k + model.step], w[k : k + model.step], model)
    return c


def _mma(x: Sequence[float], w: Sequence[float], model: TensorCoreModel) -> float:
    """Section 3: a chain per segment, the segments added in ascending order."""
    total = 0.0
    for k in range(0, len(x), SEGMENT):
        total = add(total, chain(x[k : k + SEGMENT], w[k : k + SEGMENT], model))
    return total


def dot(
    x: Sequence[float],
    w: Sequence[float],
    numerics: Numerics,
    model: TensorCoreModel = HOPPER,
) -> float:
    """The dot product of two rows of bf16 values, an fp32 value.

    Example:
        >>> dot([1.0, 2.0**-30], [1.0, 1.0], "gemv"), dot([0.5] * 3, [2.0] * 3, "mma")
        (1.0, 3.0)
    """
    return _gemv(x, w) if numerics == "gemv" else _mma(x, w, model)


def fold(out: float, delta: float, scale: float) -> float:
    """Section 1: bf16(out + f32(scale * delta)), product and sum each rounded to fp32.

    Example:
        >>> fold(1.0, 2.0, 0.5)
        2.0
    """
    product = scale * delta  # exact: 24 + 8 bits
    if math.isfinite(product) and product:
        product = nearest(Fraction(product), _FP32)
    return _bf16(add(out, product))


def fold_row(
    out: Sequence[float],
    x: Sequence[float],
    a: Sequence[Sequence[float]],
    b: Sequence[Sequence[float]],
    scale: float,
    numerics: Numerics,
    model: TensorCoreModel = HOPPER,
) -> list[float]:
    """One row of the contract: shrink, round, expand, round, fold.

    Args:
        out: [n_out] bf16 values.
        x: [k_in] bf16 values.
        a: [rank][k_in] bf16 values.
        b: [n_out][rank] bf16 values.
        scale: an fp32 value.
        numerics: "gemv" or "mma".
        model: the tensor cores that "mma" follows.

    Returns:
        [n_out] bf16 values.

    Example:
        >>> fold_row([1.0], [2.0], [[3.0]], [[0.5]], 2.0, "gemv")
        [7.0]
    """
    shrunk = [_bf16(dot(x, row, numerics, model)) for row in a]
    deltas = [_bf16(dot(shrunk, row, numerics, model)) for row in b]
    return [fold(value, delta, scale) for value, delta in zip(out, deltas, strict=True)]
