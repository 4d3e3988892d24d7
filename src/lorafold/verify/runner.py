"""Runs the checks on a device, narrows what fails, and runs a written case again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from lorafold.device import usable_device
from lorafold.errors import BackendError, LoraError
from lorafold.numerics import Numerics
from lorafold.verify.apply import model_of
from lorafold.verify.case import Case, read_case, smallest
from lorafold.verify.check import Check, Extent, Outcome, compare
from lorafold.verify.checks import CHECKS, check_of
from lorafold.verify.rehearsal import rehearsal
from lorafold.verify.report import Failure, Line, Report, machine_of
from lorafold.verify.tensor_cores import fitting_model

__all__ = ["replay", "run"]

Progress = Callable[[int, int, str], None]
"""Called with (checks done, checks in all, the one that starts)."""

_NARROWING_SECONDS = 20.0


def run(
    *,
    quick: bool = False,
    device: torch.device | str | None = None,
    seed: int = 0,
    only: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Prove the contract on the machine at hand.

    Every check computes the same outputs in two ways and compares their bits. Where one fails, the
    operands are narrowed to a small case that still fails, which the report carries.

    Args:
        quick: fewer and smaller cases: seconds instead of a minute or two.
        device: where the operators run; None for CUDA where there is a device, else the CPU.
        seed: of the random operands.
        only: names of the checks to run; None for all.
        progress: told about every check that starts.

    Returns:
        The report; it also holds the checks that this machine cannot run, with the reason.

    Raises:
        BackendError: if the device is not there, or a name in `only` is no check.

    Example:
        >>> print(run(quick=True, device="cpu", only=["slots"]).elements)
        1338
    """
    device = usable_device(device)
    extent = Extent(device, quick=quick, seed=seed)
    work = [(check, n) for check in _chosen(only) for n in check.numerics]
    lines: list[Line] = []
    failures: list[Failure] = []
    started = time.monotonic()
    reasons = [_skip_reason(check, extent, numerics) for check, numerics in work]
    to_run = [each for each, reason in zip(work, reasons, strict=True) if not reason]
    with _on(device), rehearsal(to_run, extent) as end_of_rehearsal:
        for done, ((check, numerics), reason) in enumerate(zip(work, reasons, strict=True)):
            if progress is not None:
                progress(done, len(work), f"{check.name} ({numerics})")
            if check.is_exclusive and not reason:
                end_of_rehearsal()
            line, failure = _line(check, extent, numerics, reason)
            lines.append(line)
            failures += [failure] if failure is not None else []
    if progress is not None:
        progress(len(work), len(work), "")
    return Report(
        machine=machine_of(device),
        lines=tuple(lines),
        seconds=time.monotonic() - started,
        failure=min(failures, key=lambda failure: failure.case.nbytes, default=None),
        quick=quick,
        seed=seed,
    )


def replay(path: str | Path, *, device: torch.device | str | None = None) -> Report:
    """Run the case of a file once more.

    Args:
        path: a file that `Report.write_failure` wrote.
        device: where the operators run; None for the kind of device that the case failed on.

    Returns:
        A report of one line.

    Raises:
        LoraError: if the file is missing, broken, or of a check that this version does not have.
        BackendError: if the device is not there.
    """
    case, about = read_case(path)
    check = check_of(str(about.get("check")))
    if check is None or case.numerics not in check.numerics:
        known = ", ".join(each.name for each in CHECKS)
        raise LoraError(
            f"`{path}` is a case of the check {about.get('check')!r}; this version has: {known}"
        )
    if device is None:
        recorded = about.get("machine")
        device = str(recorded.get("device", "cpu")) if isinstance(recorded, dict) else "cpu"
        device = "cuda" if device.startswith("cuda") else device
    device = usable_device(device)
    started = time.monotonic()
    with _on(device):
        reason = _skip_reason(check, Extent(device), case.numerics)
        if reason:
            raise BackendError(f"`{path}` cannot be run on {device}: {reason}")
        outcome, note = _try(check, case, device)
    seconds = time.monotonic() - started
    line = _verdict(check, case.numerics, outcome, note, seconds)
    failure = None
    if line.status != "same":
        failure = Failure(check.name, case, outcome.first, outcome.differences, note)
    return Report(machine_of(device), (line,), seconds, failure)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _chosen(only: Sequence[str] | None) -> tuple[Check, ...]:
    if only is None:
        return CHECKS
    names = [check.name for check in CHECKS]
    unknown = [name for name in only if name not in names]
    if unknown or not only:
        raise BackendError(f"checks are: {', '.join(names)}; given: {', '.join(unknown) or 'none'}")
    return tuple(check for check in CHECKS if check.name in only)


def _skip_reason(check: Check, extent: Extent, numerics: Numerics) -> str:
    """Why a check is not run, "" if it is."""
    device = extent.device
    if extent.quick and not check.in_quick:
        return "left out of a quick run"
    if check.needs_cuda and device.type != "cuda":
        return "needs a CUDA device"
    if check.needs_model and numerics == "mma" and model_of(device) is None:
        fitting = fitting_model(device)
        if fitting is None:
            return "no model of these tensor cores is known, and no known one fits"
        return (
            f"no model of these tensor cores is known; they follow step {fitting.step}, "
            f"{fitting.bits} bits"
        )
    return ""


def _line(
    check: Check, extent: Extent, numerics: Numerics, reason: str
) -> tuple[Line, Failure | None]:
    """Run one check, whatever happens in it, unless there is a reason to skip it."""
    if reason:
        return Line(check.name, check.promise, numerics, "skipped", note=reason), None
    started = time.monotonic()
    outcome, note = Outcome(), ""
    try:
        outcome = check.run(extent, numerics)
    except Exception as error:  # a broken kernel is a result of this run, not its end
        outcome, note = _error_case(check, extent, numerics), _one_line(error)
    line = _verdict(check, numerics, outcome, note, time.monotonic() - started)
    if line.status == "same" or outcome.failing is None:
        return line, None
    return line, _narrowed(check, outcome.failing, extent.device)


def _verdict(check: Check, numerics: Numerics, outcome: Outcome, note: str, seconds: float) -> Line:
    if note:
        return Line(check.name, check.promise, numerics, "error", seconds=seconds, note=note)
    return Line(
        check.name,
        check.promise,
        numerics,
        "differs" if outcome.differences else "same",
        outcome.elements,
        outcome.differences,
        seconds,
    )


def _try(check: Check, case: Case, device: torch.device) -> tuple[Outcome, str]:
    """One case: what differs, or the error that it raises."""
    try:
        return compare(case, *check.sides(case, device)), ""
    except Exception as error:  # see `_line`
        return Outcome(), _one_line(error)


def _error_case(check: Check, extent: Extent, numerics: Numerics) -> Outcome:
    """The first case that raises, for a check of which one did."""
    for case in check.cases(extent, numerics):
        if _try(check, case, extent.device)[1]:
            return Outcome(failing=case)
    return Outcome()


def _narrowed(check: Check, case: Case, device: torch.device) -> Failure:
    """The smallest case that fails in the same manner, within some seconds."""
    deadline = time.monotonic() + _NARROWING_SECONDS
    outcome, note = _try(check, case, device)

    def still_differs(smaller: Case) -> bool:
        if time.monotonic() > deadline:
            return False
        found, error = _try(check, smaller, device)
        return bool(error) if note else found.differences > 0

    if outcome.differences or note:
        case = smallest(case, still_differs)
        outcome, note = _try(check, case, device)
    return Failure(check.name, case, outcome.first, outcome.differences, note)


def _one_line(error: Exception) -> str:
    """The error's class and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0][:300] if message else ''}"
