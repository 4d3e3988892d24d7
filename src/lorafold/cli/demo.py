"""`lorafold demo`: answers of several adapters from one batch, with the proof underneath."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lorafold.cli.options import BASE, Device, adapter_paths
from lorafold.cli.output import (
    Json,
    console,
    number,
    print_json,
    refusals,
    table,
    usage_error,
)
from lorafold.cli.progress import progress_bar
from lorafold.demo.peft import PeftCheck
from lorafold.demo.run import PROMPTS, DemoReport, run_demo
from lorafold.device import usable_device

__all__ = ["demo"]

_RESULTS = {
    "same": "[green]same bits[/]",
    "close": "[green]close[/]",
    "differs": "[bold red]differs[/]",
    "skipped": "[yellow]skipped[/]",
}

_BITS_MEAN = """\
rows alone: a row of the batch at a layer, computed again in a call of its own.
changed: how many of the numbers the adapter changed.
rows without adapter: a layer's output before and after the fold.
base = untouched model: logits, and those of the model before it was attached to."""
_ERRORS_MEAN = """\
same token: how often the likeliest token is the same one.
error: root mean square of our logits minus those of PEFT with the model in
float32; PEFT's: of PEFT with the model in bfloat16 (ours may be twice that);
base's: of the model without the adapter."""


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Another model: a folder, or a name on the hub.", show_default=False),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Other adapters, for this model; may be repeated."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Another prompt; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer, at most.")] = 32,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Answer every prompt with the base and with every adapter, in one batch, and prove it.

    Without options: SmolLM2-135M-Instruct and the three adapters of examples/adapters. Underneath
    the answers stands what was counted in this run: rows of the batch against the same rows alone,
    base rows against the untouched model, and every adapter against PEFT.
    """
    adapters = adapter_paths(adapter or [], taken={BASE})
    if model is not None and not adapters:
        raise usage_error("--model needs adapters made for it: --adapter NAME=PATH")
    with refusals(as_json=as_json):
        report = _with_progress(
            model,
            adapters,
            tuple(prompt or PROMPTS),
            max_new_tokens,
            str(usable_device(device)),
            hidden=as_json,
        )
    if as_json:
        print_json(report.to_json())
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def _with_progress(
    model: str | None,
    adapters: dict[str, Path],
    prompts: tuple[str, ...],
    max_new_tokens: int,
    device: str,
    *,
    hidden: bool,
) -> DemoReport:
    with progress_bar(hidden=hidden, width=36) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int | None) -> None:
            bar.update(task, description=what, completed=done, total=total)

        return run_demo(
            model,
            adapters or None,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            device=device,
            progress=show,
        )


def _print(report: DemoReport) -> None:
    out = console()
    out.print(f"{report.model} on {report.device}, one batch of {len(report.answers)} rows\n")
    answers = table("prompt", "adapter", "answer")
    asked = ""
    for answer in report.answers:
        question = "" if answer.prompt == asked else answer.prompt
        asked = answer.prompt
        name = answer.adapter or BASE
        answers.add_row(escape(question), f"[bold]{escape(name)}[/]", escape(answer.text))
    out.print(answers)
    _print_bits(out, report)
    _print_peft(out, report.peft_checks)
    verdict = "every check holds" if report.ok else "not every check holds"
    if skipped := report.statuses.count("skipped"):
        verdict += f", {skipped} skipped"
    style = "bold green" if report.ok else "bold red"
    out.print(f"\n{verdict}: {report.seconds:.0f} s", style=style)


def _print_bits(out: Console, report: DemoReport) -> None:
    out.print(f'\n[bold]the same bits[/]  (numerics "{report.numerics}")')
    figures = ("rows", "compared", "changed", "differ")
    rows = table("check", *figures, "", right=figures)
    for check in report.bit_checks:
        rows.add_row(
            escape(check.what),
            f"{check.rows:,}",
            f"{check.elements:,}",
            "" if check.changed is None else f"{check.changed:,}",
            f"{check.differences:,}",
            _RESULTS[check.status] + (f": {escape(check.note)}" if check.note else ""),
        )
    out.print(rows)
    out.print(_BITS_MEAN, style="dim")


def _print_peft(out: Console, checks: Sequence[PeftCheck]) -> None:
    out.print("\n[bold]close to PEFT[/]  (logits, one adapter active, not merged)")
    figures = ("tokens", "same token", "largest difference", "error", "PEFT's", "base's")
    rows = table("adapter", *figures, "", right=figures)
    for check in checks:
        errors = (check.error, check.peft_error, check.base_error)
        compared = [f"{check.tokens}", f"{check.same_tokens}", number(check.largest)]
        rows.add_row(
            escape(check.adapter),
            *(compared if check.tokens else ["", "", ""]),
            *("" if error is None else number(error) for error in errors),
            _RESULTS[check.status] + (f": {escape(check.note)}" if check.note else ""),
        )
    out.print(rows)
    out.print(_ERRORS_MEAN, style="dim")
