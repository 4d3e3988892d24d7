"""Recordings of an H200's tensor cores, shipped with the package: what "mma" on a CPU must give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from lorafold.numerics import HOPPER, Numerics
from lorafold.ops import reference
from lorafold.verify.case import FIXED, Case
from lorafold.verify.check import Extent, Sides

__all__ = ["RECORDINGS", "recorded", "recordings"]

RECORDINGS = Path(__file__).parents[1] / "data" / "h200_bf16_mma.safetensors"
"""Per case x [n, K] and w [m, K] bf16, out [n, m] fp32 and, for single steps, c [n, m] fp32."""

_AXES = {"x": ("rows", FIXED), "w": ("cols", FIXED), "c": ("rows", "cols"), "out": ("rows", "cols")}


def recordings(extent: Extent, numerics: Numerics) -> Iterator[Case]:
    """Every recorded case: 13 of single steps, 4 of chains over up to 4096 elements."""
    tensors = load_file(RECORDINGS)
    for prefix in sorted({name.rpartition("/")[0] for name in tensors}):
        found = {
            name.rpartition("/")[2]: tensor
            for name, tensor in tensors.items()
            if name.rpartition("/")[0] == prefix
        }
        yield Case(found, {name: _AXES[name] for name in found}, numerics)


def recorded(case: Case, device: torch.device) -> Sides:
    """The CPU model of the tensor cores, and what the tensor cores gave."""
    c = case["c"] if "c" in case.tensors else None
    return reference.mma_chain(case["x"], case["w"], c, model=HOPPER), case["out"]
