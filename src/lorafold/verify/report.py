"""What `lorafold.verify.run` found: a line per check, and the smallest case that fails."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from lorafold.numerics import Numerics, device_model
from lorafold.verify.case import Case, write_case

__all__ = ["Failure", "Line", "Machine", "Report", "machine_of"]

Status = Literal["same", "differs", "error", "skipped"]


@dataclass(frozen=True)
class Machine:
    """The device and the software that were asked.

    Args:
        device: such as "cpu" or "cuda:0".
        name: of the processor or the GPU.
        capability: compute capability such as "9.0", "" on a CPU.
        tensor_cores: the known model, such as "step 16, 25 bits"; "" where there is none.
        versions: of Python, torch, Triton, CUDA and lorafold.
    """

    device: str
    name: str
    capability: str
    tensor_cores: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Line:
    """One check under one numerics.

    Args:
        check: its name.
        promise: what it is about, as a sentence.
        numerics: "gemv" or "mma".
        status: "same", "differs", "error" or "skipped".
        elements: outputs compared.
        differences: outputs whose bits differ.
        seconds: how long it took.
        note: why it was skipped, or what went wrong.
    """

    check: str
    promise: str
    numerics: Numerics
    status: Status
    elements: int = 0
    differences: int = 0
    seconds: float = 0.0
    note: str = ""


@dataclass(frozen=True, eq=False)
class Failure:
    """A case that fails, as small as it could be made.

    Args:
        check: the name of the check.
        case: the operands.
        first: where, computed and expected, of the first difference; None after an error.
        differences: outputs of the case whose bits differ.
        note: what went wrong, after an error.
    """

    check: str
    case: Case
    first: Mapping[str, Any] | None
    differences: int
    note: str = ""


@dataclass(frozen=True, eq=False)
class Report:
    """All lines of a run.

    Args:
        machine: what was asked.
        lines: one per check and numerics.
        seconds: how long it took.
        failure: the smallest failing case, None if nothing failed.
        quick: whether fewer and smaller cases were tried.
        seed: of the random operands.

    Example:
        >>> from lorafold.verify import run
        >>> report = run(quick=True, device="cpu", only=["base rows"])
        >>> report.ok, report.differences
        (True, 0)
    """

    machine: Machine
    lines: tuple[Line, ...]
    seconds: float
    failure: Failure | None = field(default=None, repr=False)
    quick: bool = False
    seed: int = 0

    @property
    def ok(self) -> bool:
        """Whether something was compared, and nothing differed or went wrong."""
        return self.elements > 0 and all(line.status in ("same", "skipped") for line in self.lines)

    @property
    def elements(self) -> int:
        """Outputs compared."""
        return sum(line.elements for line in self.lines)

    @property
    def differences(self) -> int:
        """Outputs whose bits differ."""
        return sum(line.differences for line in self.lines)

    def write_failure(self, path: str | Path) -> None:
        """Write the smallest failing case, for `lorafold.verify.replay`.

        Args:
            path: a safetensors file; replaced if it exists.

        Raises:
            LoraError: if the file cannot be written.
            ValueError: if nothing failed.
        """
        if self.failure is None:
            raise ValueError("nothing failed: there is no case to write")
        about = {
            "check": self.failure.check,
            "differences": self.failure.differences,
            "first": self.failure.first,
            "note": self.failure.note,
            "machine": asdict(self.machine),
        }
        write_case(path, self.failure.case, about)

    def to_json(self) -> dict[str, Any]:
        """The report as values that JSON has; the failing case by its sizes only."""
        failure = None
        if self.failure is not None:
            failure = {
                "check": self.failure.check,
                "numerics": self.failure.case.numerics,
                "sizes": self.failure.case.sizes(),
                "differences": self.failure.differences,
                "first": self.failure.first,
                "note": self.failure.note,
            }
        return {
            "ok": self.ok,
            "elements": self.elements,
            "differences": self.differences,
            "seconds": round(self.seconds, 3),
            "quick": self.quick,
            "seed": self.seed,
            "machine": asdict(self.machine),
            "checks": [asdict(line) for line in self.lines],
            "failure": failure,
        }

    def __str__(self) -> str:
        """The report as plain text, a line per check."""
        machine = self.machine
        rows = [
            f"{machine.device} ({machine.name}), tensor cores: {machine.tensor_cores or 'none'}"
        ]
        rows += [
            f"{line.status:8} {line.check:14} {line.numerics:4} {line.elements:>12,} compared "
            f"{line.differences:>8,} differ  {line.note or line.promise}"
            for line in self.lines
        ]
        verdict = "every bit agrees" if self.ok else "NOT the same bits"
        rows.append(
            f"{verdict}: {self.elements:,} compared, {self.differences:,} differ, "
            f"{self.seconds:.1f} s"
        )
        return "\n".join(rows)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def machine_of(device: torch.device) -> Machine:
    """Describe a device and the software at hand."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {package: _version(package) for package in ("triton", "lorafold")}
    if device.type != "cuda":
        name = platform.processor() or platform.machine()
        return Machine(str(device), name, "", "step 16, 25 bits (computed)", versions)
    versions["cuda"] = str(torch.version.cuda)
    model = device_model(device)
    return Machine(
        device=str(device),
        name=torch.cuda.get_device_name(device),
        capability=".".join(map(str, torch.cuda.get_device_capability(device))),
        tensor_cores=f"step {model.step}, {model.bits} bits" if model else "",
        versions=versions,
    )
