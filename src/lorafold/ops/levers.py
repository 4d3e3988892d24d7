"""Measurement levers: environment variables that are read once, at import.

`LORAFOLD_NO_APPLY=1` skips every operator, `LORAFOLD_NO_FFN=1` the deltas of feed-forward layers:
they separate the cost of applying an adapter from the cost of having one loaded, and the output is
not the adapter's while they are set. `LORAFOLD_GEMV_MAX_M=N` sends `apply_lora_delta` calls of at
most N rows through "gemv" and larger ones through "mma".
"""

from __future__ import annotations

import os

from lorafold.errors import BackendError

__all__ = ["GEMV_MAX_M", "NO_APPLY", "NO_FFN"]


def _row_count(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise BackendError(f"{name} must be a number of rows; given: {text!r}")
    return int(text)


NO_APPLY = os.environ.get("LORAFOLD_NO_APPLY") == "1"
NO_FFN = os.environ.get("LORAFOLD_NO_FFN") == "1"
GEMV_MAX_M = _row_count("LORAFOLD_GEMV_MAX_M")
