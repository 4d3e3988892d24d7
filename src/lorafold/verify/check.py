"""What a check is: a promise, the two sides that must agree in every bit, and the cases to try."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.verify.case import Case

__all__ = ["BOTH", "Calls", "Check", "Extent", "Outcome", "Sides", "bits", "compare"]

Sides = tuple[Tensor, Tensor]
"""(computed, expected): CPU tensors of one shape and dtype."""

Calls = Iterable[Callable[[], object]]
"""Calls that may run side by side."""

BOTH: tuple[Numerics, ...] = ("gemv", "mma")

_PATTERNS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True)
class Extent:
    """How much to try.

    Args:
        device: where the operators run.
        quick: fewer and smaller cases.
        seed: of the random operands.
    """

    device: torch.device
    quick: bool = False
    seed: int = 0

    @property
    def is_cuda(self) -> bool:
        """Whether kernels run."""
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Args:
        elements: outputs compared.
        differences: outputs whose bits differ.
        failing: the first case that differed.
        first: where, what was computed and what was expected, for the first difference in it.
    """

    elements: int = 0
    differences: int = 0
    failing: Case | None = None
    first: dict[str, Any] | None = None


@dataclass(frozen=True)
class Check:
    """One thing that is promised, and how to try it.

    Args:
        name: a short name, unique among the checks.
        promise: what holds if nothing differs, as a sentence.
        sides: computes, for a case and a device, what must agree.
        cases: the cases to try, for an extent and a numerics.
        numerics: the numerics to try it under.
        needs_cuda: whether it can be tried on a CUDA device only.
        needs_model: whether "mma" can be tried only where the tensor-core model is known.
        in_quick: whether it is part of a quick run.
        launches: calls that together launch every kernel of `sides`, for sides that do much else
            or launch many; None for `sides` itself.
        is_exclusive: whether nothing else may use the device meanwhile.
    """

    name: str
    promise: str
    sides: Callable[[Case, torch.device], Sides]
    cases: Callable[[Extent, Numerics], Iterable[Case]]
    numerics: tuple[Numerics, ...] = BOTH
    needs_cuda: bool = False
    needs_model: bool = False
    in_quick: bool = True
    launches: Callable[[Case, torch.device], Calls] | None = None
    is_exclusive: bool = False

    def calls(self, case: Case, device: torch.device) -> Calls:
        """What launches the check's kernels; an exclusive one has those of others."""
        if self.is_exclusive:
            return ()
        if self.launches is None:
            return (partial(self.sides, case, device),)
        return self.launches(case, device)

    def run(self, extent: Extent, numerics: Numerics) -> Outcome:
        """Try all cases.

        Returns:
            (elements, differences, first failing case) over all of them.
        """
        total = Outcome()
        for case in self.cases(extent, numerics):
            outcome = compare(case, *self.sides(case, extent.device))
            first = total if total.failing is not None else outcome
            total = Outcome(
                total.elements + outcome.elements,
                total.differences + outcome.differences,
                first.failing,
                first.first,
            )
        return total


def bits(t: Tensor) -> Tensor:
    """bf16 or fp32 as integers of that size with every NaN as one value; integers as they are.

    Example:
        >>> nan = torch.tensor([0x7FC1, 0x7FC0], dtype=torch.int16).view(torch.bfloat16)
        >>> bits(nan).tolist(), bits(torch.tensor([-0.0, 0.0])).tolist()
        ([32704, 32704], [-2147483648, 0])
    """
    if t.dtype not in _PATTERNS:
        return t
    nan = torch.full((), torch.nan, dtype=t.dtype)
    return torch.where(t.isnan(), nan, t).view(_PATTERNS[t.dtype])


def compare(case: Case, computed: Tensor, expected: Tensor) -> Outcome:
    """Count the elements of two sides whose bits differ."""
    if computed.shape != expected.shape or computed.dtype != expected.dtype:
        raise ValueError(
            f"sides of a check must fit; given: {computed.dtype} {tuple(computed.shape)} and "
            f"{expected.dtype} {tuple(expected.shape)}"
        )
    wrong = (bits(computed) != bits(expected)).nonzero()
    if not len(wrong):
        return Outcome(computed.numel())
    at = tuple(wrong[0].tolist())
    first = {
        "index": list(at),
        "computed": _shown(computed[at]),
        "expected": _shown(expected[at]),
    }
    return Outcome(computed.numel(), len(wrong), case, first)


def _shown(value: Tensor) -> str:
    """A number with its pattern, such as "1.5 (0x3fc0)"."""
    if value.dtype not in _PATTERNS:
        return str(value.item())
    width = value.element_size() * 8
    pattern = int(value.view(_PATTERNS[value.dtype])) & ((1 << width) - 1)
    return f"{float(value):.9g} (0x{pattern:0{width // 4}x})"
