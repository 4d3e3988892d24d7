"""One case of a check: operands by name, whose axes are named too, so that a case can be narrowed
to the smallest that still differs, written to a file and run again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lorafold.errors import LoraError
from lorafold.numerics import Numerics

__all__ = ["FIXED", "Case", "read_case", "smallest", "write_case"]

FIXED = ""
"""The name of an axis that a case cannot be narrowed along."""

_FORMAT = "lorafold-verify-case-1"
# axis -> the operand whose values count along it
_COUNTED = {"adapters": "slots", "experts": "chosen", "rank": "ranks"}


@dataclass(frozen=True, eq=False)
class Case:
    """The operands of one run of a check.

    Args:
        tensors: operands by name, on the CPU.
        axes: per operand, the names of its axes; axes of one name have one length.
        numerics: how dot products are summed.

    Example:
        >>> x = torch.zeros(4, 8, dtype=torch.bfloat16)
        >>> Case({"x": x}, {"x": ("rows", "k")}, "gemv").narrowed("rows", 1, 2)["x"].shape
        torch.Size([2, 8])
    """

    tensors: Mapping[str, Tensor]
    axes: Mapping[str, tuple[str, ...]]
    numerics: Numerics

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all operands."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def sizes(self) -> dict[str, int]:
        """The length of every axis that the case can be narrowed along."""
        found: dict[str, int] = {}
        for name, axes in self.axes.items():
            found |= dict(zip(axes, self.tensors[name].shape, strict=True))
        found.pop(FIXED, None)
        return found

    def changed(self, **tensors: Tensor) -> Case:
        """The same case with other operands of the same axes."""
        return replace(self, tensors={**self.tensors, **tensors})

    def taken(self, rows: Tensor) -> Case:
        """The rows of the given indices [n] int64, in that order."""
        return self.changed(
            **{
                name: self.tensors[name].index_select(axes.index("rows"), rows)
                for name, axes in self.axes.items()
                if "rows" in axes
            }
        )

    def narrowed(self, axis: str, start: int, length: int) -> Case:
        """The part start .. start + length of one axis of every operand that has it.

        Slots, expert ids and ranks follow: what pointed outside the part means "none" afterwards.
        """
        tensors = {}
        for name, tensor in self.tensors.items():
            parts = (
                slice(start, start + length) if each == axis else slice(None)
                for each in self.axes[name]
            )
            tensors[name] = tensor[tuple(parts)].contiguous()
        counted = _COUNTED.get(axis)
        if counted in tensors:
            values = tensors[counted] - start
            if axis == "rank":
                tensors[counted] = values.clamp(0, length)
            else:
                outside = -1 if axis == "adapters" else length
                inside = (values >= 0) & (values < length)
                tensors[counted] = torch.where(inside, values, outside).to(values.dtype)
        return replace(self, tensors=tensors)


def smallest(case: Case, still_differs: Callable[[Case], bool]) -> Case:
    """Narrow a case, axis by axis, as long as it still differs.

    Every axis is halved while one of its halves will do; then single entries are cut off its ends.

    Args:
        case: a case that differs.
        still_differs: runs the check; it may return False to end the search.
    """
    shrinking = True
    while shrinking:
        shrinking = False
        for axis, size in case.sizes().items():
            for part in _parts(size):
                smaller = case.narrowed(axis, *part)
                if still_differs(smaller):
                    case, shrinking = smaller, True
                    break
    return case


def _parts(size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of the parts of an axis to try, smaller ones first."""
    if size > 3:
        yield 0, size // 2
        yield size // 2, size - size // 2
    if size > 1:
        yield 0, size - 1
        yield 1, size - 1


def write_case(path: str | Path, case: Case, about: Mapping[str, Any]) -> None:
    """Write operands as safetensors, with everything else in the header as JSON.

    Args:
        path: the file; replaced if it exists.
        case: what to write.
        about: what more to say: values that JSON has.

    Raises:
        LoraError: if the file cannot be written.
    """
    header = {
        "format": _FORMAT,
        "numerics": case.numerics,
        "axes": json.dumps(dict(case.axes)),
        "about": json.dumps(dict(about)),
    }
    tensors = {name: tensor.contiguous() for name, tensor in case.tensors.items()}
    try:
        save_file(tensors, path, metadata=header)
    except (OSError, SafetensorError) as error:
        raise LoraError(f"the case cannot be written to `{path}`: {error}") from error


def read_case(path: str | Path) -> tuple[Case, dict[str, Any]]:
    """Read what `write_case` wrote: the case, and what was said about it.

    Raises:
        LoraError: if the file is missing, broken or no case of this version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise LoraError(f"`{path}` cannot be read as a safetensors file: {error}") from error
    if header.get("format") != _FORMAT:
        raise LoraError(
            f"`{path}` must be a case that `lorafold verify` wrote ({_FORMAT}); given: "
            f"{header.get('format', 'a file without that mark')}"
        )
    try:
        axes = {name: tuple(names) for name, names in json.loads(header["axes"]).items()}
        about = dict(json.loads(header["about"]))
        if axes.keys() != tensors.keys() or header["numerics"] not in ("gemv", "mma"):
            raise ValueError("operands and header do not agree")
        if any(len(axes[name]) != tensor.dim() for name, tensor in tensors.items()):
            raise ValueError("operands and the axes of the header do not agree")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise LoraError(f"the header of `{path}` is broken: {error}") from error
    numerics: Numerics = "gemv" if header["numerics"] == "gemv" else "mma"
    return Case(tensors, axes, numerics), about
