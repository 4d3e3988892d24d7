"""How a dot product is summed: the two numerics of the contract, as values.

"gemv" is plain IEEE fp32 in a fixed order of 64 lanes, the same bits on every device. "mma" is a
chain of tensor-core steps, for which `TensorCoreModel` is the exact model. Which one is used never
depends on the batch.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import Literal, cast

import torch

from lorafold.errors import BackendError

__all__ = ["HOPPER", "SEGMENT", "Numerics", "TensorCoreModel", "default_numerics", "resolve"]

Numerics = Literal["gemv", "mma"]

SEGMENT = 1024
"""Elements of K that one "mma" chain covers; segments are added in ascending order in fp32."""


@dataclass(frozen=True)
class TensorCoreModel:
    """What one bf16 tensor-core instruction computes: `step` products and the accumulator are
    truncated to `bits` bits below the largest exponent among them and added exactly.

    Example:
        >>> TensorCoreModel(step=16, bits=25)
        TensorCoreModel(step=16, bits=25)

    Source: arXiv 2511.10909 and arXiv 2512.07004; settled by recordings of an H200.
    """

    step: int
    bits: int


HOPPER = TensorCoreModel(step=16, bits=25)

# Compute capability -> model. 9.0 was measured by us; the others are published, and
# `lorafold verify` asks the device at hand. Only measured ones get "mma" by default.
_MEASURED = frozenset({(9, 0)})
_MODELS = {
    (8, 0): TensorCoreModel(step=8, bits=24),
    (8, 6): TensorCoreModel(step=8, bits=24),
    (8, 9): TensorCoreModel(step=8, bits=24),
    (9, 0): HOPPER,
    (10, 0): HOPPER,
    (12, 0): HOPPER,
}


def device_model(device: torch.device) -> TensorCoreModel | None:
    """The tensor-core model of a device, or None where none is known."""
    if device.type != "cuda":
        return None
    return _MODELS.get(torch.cuda.get_device_capability(device))


def default_numerics(device: torch.device) -> Numerics:
    """The numerics of a device: "mma" on a GPU whose tensor cores were measured, else "gemv".

    The environment variable ``LORAFOLD_NUMERICS`` overrides it.

    Raises:
        BackendError: if ``LORAFOLD_NUMERICS`` holds another word.

    Example:
        >>> default_numerics(torch.device("cpu"))
        'gemv'
    """
    chosen = os.environ.get("LORAFOLD_NUMERICS", "").strip().lower()
    if chosen:
        return resolve(chosen, device)
    return "mma" if device.type == "cuda" and _is_measured(device) else "gemv"


@functools.cache
def _is_measured(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in _MEASURED


def resolve(numerics: str | None, device: torch.device) -> Numerics:
    """The numerics to use: the given word if it is one, the device's default for None.

    Raises:
        BackendError: if the word is neither "gemv" nor "mma".
    """
    if numerics is None:
        return default_numerics(device)
    if numerics in {"gemv", "mma"}:
        return cast("Numerics", numerics)
    raise BackendError(
        f'numerics must be "gemv" or "mma", or None for the default; given: {numerics!r}'
    )
