"""Whether an engine's result is ours up to bf16 rounding: the gate before any of its times.

The engines round at other places than we do (vLLM multiplies the scale into B in bf16, SGLang
rounds the delta after scaling), so bits differ and only a tolerance can tell right from wrong. An
element may be off by 1/64 of its own size before and after the call and of its row's typical
delta: some two times what those roundings reach among tens of millions of elements, and a small
part of what a wrong adapter, a wrong slice or a forgotten scale does to most of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["worst_error"]

_TOLERANCE = 2.0**-6


def worst_error(before: Tensor, ours: Tensor, theirs: Tensor) -> float:
    """The largest difference between two results, in units of what is tolerated.

    Args:
        before: [rows, columns] what the call found in its output.
        ours: [rows, columns] our result, whose bits are checked elsewhere.
        theirs: [rows, columns] the result to judge.

    Returns:
        At most 1.0 where the results agree; infinity where theirs is not finite.

    Example:
        >>> before, ours = torch.zeros(1, 2), torch.tensor([[1.0, 2.0]])
        >>> worst_error(before, ours, ours), worst_error(before, ours, 4 / 3 * ours) > 1
        (0.0, True)
    """
    worst = 0.0
    for old, own, other in zip(*(t.split(512) for t in (before, ours, theirs)), strict=True):
        a, b, c = old.float(), own.float(), other.float()
        typical = (b - a).square().mean(1, keepdim=True).sqrt()
        allowed = _TOLERANCE * (a.abs() + b.abs() + typical)
        error = (c - b).abs() / allowed.clamp(min=torch.finfo(torch.float32).tiny)
        worst = max(worst, error.nan_to_num(nan=float("inf")).max().item())
    return worst
