"""Tables of what was measured to be fastest, looked up by the shape of a call."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

__all__ = ["Shape", "nearest"]

Shape = tuple[int, ...]
"""The sizes that a table is looked up by, all positive."""

_Value = TypeVar("_Value")


def nearest(
    table: Iterable[tuple[Shape, _Value]],
    shape: Shape,
    weights: tuple[float, ...],
    *,
    larger: float = 1.0,
    farthest: float = math.inf,
) -> _Value | None:
    """What the entry has whose shape is the fewest factors of two away, the first of equals.

    Args:
        table: measured shapes, and what was fastest.
        shape: of the call.
        weights: how much a factor of two matters in each part of a shape.
        larger: how much more it does where the call is larger than what was measured.
        farthest: the distance beyond which a measurement says nothing.

    Returns:
        None where nothing is near enough.

    Example:
        >>> table = [((8, 16), "small"), ((64, 16), "large")]
        >>> nearest(table, (16, 16), (1, 1)), nearest(table, (16, 99), (1, 1), farthest=2)
        ('small', None)
    """

    def distance(entry: tuple[Shape, object]) -> float:
        total = 0.0
        for weight, measured, wanted in zip(weights, entry[0], shape, strict=True):
            factors = math.log2(measured / wanted)
            total += weight * (factors if factors >= 0 else -larger * factors)
        return total

    found = min(table, key=distance, default=None)
    return None if found is None or distance(found) > farthest else found[1]
