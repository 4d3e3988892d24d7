"""Numbers as results show them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["geomean", "rounded"]


def rounded(value: float) -> float:
    """Four significant digits, which is more than repeats of a run agree on.

    Example:
        >>> rounded(0.0123456), rounded(123.456)
        (0.01235, 123.5)
    """
    return float(f"{value:.4g}")


def geomean(values: Sequence[float]) -> float | None:
    """The geometric mean, rounded; None of nothing.

    Example:
        >>> geomean([0.5, 2.0]), geomean([])
        (1.0, None)
    """
    return rounded(statistics.geometric_mean(values)) if values else None
