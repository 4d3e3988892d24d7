"""`lorafold verify`: the proof of the contract on this machine, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from lorafold.cli.options import Device, Seed
from lorafold.cli.output import Json, console, print_json, refusals, table, usage_error
from lorafold.cli.progress import progress_bar
from lorafold.verify import Line, Report, replay, run
from lorafold.verify.check import BOTH
from lorafold.verify.checks import CHECKS, check_of
from lorafold.verify.plot import plot

__all__ = ["verify"]

_STYLES = {"same": "green", "differs": "bold red", "error": "bold red", "skipped": "dim"}


def verify(
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and smaller cases: seconds instead of minutes.")
    ] = False,
    device: Device = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this check only; may be repeated.")
    ] = None,
    seed: Seed = 0,
    case: Annotated[
        Path, typer.Option(help="Where the smallest failing case is written, if one fails.")
    ] = Path("lorafold-verify-case.safetensors"),
    replay_file: Annotated[
        Path | None,
        typer.Option("--replay", metavar="FILE", help="Run a written case again, and no check."),
    ] = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the report (.svg, .png or .pdf)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove on this machine that a row's bits do not depend on its batch.

    Every check computes the same outputs in two ways and compares their bits: the contract word by
    word, the CPU reference, this device's tensor cores, batches in every order and company. If one
    fails, its smallest failing case is written to a file that --replay runs again.
    """
    unknown = [name for name in only or [] if check_of(name) is None]
    if unknown:
        names = ", ".join(check.name for check in CHECKS)
        raise usage_error(f"--only {unknown[0]!r}: the checks are {names}")
    if replay_file is not None and (quick or only or seed):
        raise usage_error("--replay runs one written case; --quick, --only and --seed do not apply")
    with refusals(as_json=as_json):
        if replay_file is not None:
            report = replay(replay_file, device=device)
        else:
            report = _with_progress(quick, device, seed, only, hidden=as_json)
        written = None
        if report.failure is not None and replay_file is None:
            report.write_failure(case)
            written = case
        if plot_file is not None:
            plot(report, plot_file)
    if as_json:
        print_json(report.to_json() | {"case": str(written) if written else None})
    else:
        _print(report, written)
    if not report.ok:
        raise typer.Exit(1)


def _with_progress(
    quick: bool, device: torch.device | None, seed: int, only: list[str] | None, *, hidden: bool
) -> Report:
    with progress_bar(hidden=hidden) as bar:
        task = bar.add_task("starting")

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        return run(quick=quick, device=device, seed=seed, only=only or None, progress=show)


def _cell(line: Line | None) -> str:
    """Outputs compared under one numerics, coloured by what became of them."""
    if line is None:
        return ""
    text = line.status if line.status in ("skipped", "error") else f"{line.elements:,}"
    return f"[{_STYLES[line.status]}]{text}[/]"


def _print(report: Report, written: Path | None) -> None:
    out = console()
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    out.print(f"{machine.device}: {machine.name}", style="bold")
    out.print(f"tensor cores: {machine.tensor_cores or 'no model is known'}")
    out.print(f"{versions}\n")
    rows = table("check", *BOTH, "differ", "what holds", right=(*BOTH, "differ"))
    for name in dict.fromkeys(line.check for line in report.lines):
        lines = {line.numerics: line for line in report.lines if line.check == name}
        notes = [line.note for line in lines.values() if line.note]
        is_skipped = all(line.status == "skipped" for line in lines.values())
        rows.add_row(
            name,
            *(_cell(lines.get(numerics)) for numerics in BOTH),
            "" if is_skipped else f"{sum(line.differences for line in lines.values()):,}",
            escape(notes[0]) if notes else next(iter(lines.values())).promise,
            style="dim" if is_skipped else "",
        )
    out.print(rows)
    figures = f"{report.elements:,} compared, {report.differences:,} differ, {report.seconds:.1f} s"
    if report.ok:
        out.print(f"\nevery bit agrees: {figures}", style="bold green")
        return
    out.print(f"\nnot the same bits: {figures}", style="bold red")
    failure = report.failure
    if failure is not None:
        sizes = ", ".join(f"{size} {axis}" for axis, size in failure.case.sizes().items())
        out.print(f"smallest failing case: {failure.check} ({failure.case.numerics}), {sizes}")
        if failure.first is not None:
            first = failure.first
            out.print(
                f"  at {first['index']}: {first['computed']} instead of {first['expected']}",
                markup=False,
            )
        if failure.note:
            out.print(f"  {failure.note}", markup=False)
    if written is not None:
        again = f"written to `{written}`; again: lorafold verify --replay {written}"
        out.print(again, markup=False)
