"""`lorafold inspect`: what an adapter is, and whether it would be accepted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from lorafold.adapter import LoraWeights
from lorafold.cli.options import Layout
from lorafold.cli.output import Json, console, number, print_json, refusals, table
from lorafold.cli.shapes import base_tensors, read_shapes
from lorafold.peft import AdapterSpec, bind, parse
from lorafold.peft.layouts import ExpertLayout
from lorafold.refusal import printable

__all__ = ["inspect"]


@dataclass(frozen=True)
class _Row:
    """One adapted module; no norm where only a model could tell how its factors are stored."""

    target: str
    kind: str
    rank: int
    scale: float
    delta_norm: float | None
    tensors: tuple[str, ...]

    @property
    def family(self) -> tuple[str, str, int, float]:
        """Equal for the same module of all layers."""
        segments = ["*" if each.isdecimal() else each for each in self.target.split(".")]
        return ".".join(segments), self.kind, self.rank, self.scale


@dataclass(frozen=True)
class _Summary:
    """What is printed: a row per module, and what was decided on the way."""

    path: str
    model: str
    base_model: str
    rank: int
    num_tensors: int
    targets: tuple[_Row, ...]
    decisions: tuple[str, ...]
    dropped: tuple[str, ...]
    skipped: tuple[str, ...]


def inspect(
    path: Annotated[Path, typer.Argument(help="The adapter's folder.", show_default=False)],
    model: Annotated[
        str | None, typer.Option(help="Also fit it to the model of this folder (its config).")
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Refuse harmless oddities too, as loading does.")
    ] = True,
    allow_inert: Annotated[
        bool, typer.Option("--allow-inert", help="Accept an adapter that changes nothing.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="One line per module instead of one for all layers.")
    ] = False,
    expert_layout: Layout = None,
    as_json: Json = False,
) -> None:
    """Show what an adapter is: modules, ranks, scales, norms, and how its file was read.

    What lorafold would not load is refused here for the same reason, with exit code 1.
    """
    with refusals(as_json=as_json):
        spec = parse(path, strict=strict, allow_inert=allow_inert)
        summary = _of_spec(spec) if model is None else _of_model(spec, model, expert_layout)
    if as_json:
        print_json(asdict(summary))
    else:
        _print(summary, every=every)


def _of_spec(spec: AdapterSpec) -> _Summary:
    """Without a model: the modules as the file names them."""
    rows = []
    for entry in spec.entries:
        norm = LoraWeights(entry.a, entry.b, entry.scale).delta_norm
        rank = int(entry.a.shape[0])
        rows.append(_Row(entry.path, entry.kind, rank, entry.scale, norm, entry.tensors))
    for expert in spec.experts:
        known = None
        if expert.form == "single":
            known = LoraWeights(expert.a, expert.b, expert.scale).delta_norm
        kind = f"experts.{expert.projection or '?'} ({expert.form})"
        rows.append(_Row(expert.path, kind, expert.rank, expert.scale, known, expert.tensors))
    return _Summary(
        path=spec.source,
        model="",
        base_model=spec.config.base_model or "",
        rank=max(row.rank for row in rows),
        num_tensors=spec.num_tensors,
        targets=tuple(rows),
        decisions=spec.decisions,
        dropped=spec.dropped,
        skipped=spec.skipped,
    )


def _of_model(spec: AdapterSpec, model: str, layout: ExpertLayout | None) -> _Summary:
    """The targets of a model that the adapter changes."""
    shapes = read_shapes(model)
    adapter = bind(
        spec, shapes.targets, base_tensor=base_tensors(model, shapes), expert_layout=layout
    )
    report = adapter.report
    rows = [
        _Row(line.target, line.kind, line.rank, line.scale, line.delta_norm, line.tensors)
        for line in report.bound
    ]
    return _Summary(
        path=spec.source,
        model=shapes.name,
        base_model=adapter.base_model or "",
        rank=adapter.rank,
        num_tensors=report.num_tensors,
        targets=tuple(rows),
        decisions=report.decisions,
        dropped=report.dropped,
        skipped=report.skipped,
    )


def _print(summary: _Summary, *, every: bool) -> None:
    out = console()
    out.print(summary.path, style="bold", markup=False)
    trained_on = printable(summary.base_model) or "the file does not say"
    out.print(f"trained on: {trained_on}", markup=False)
    fits = f", fits {summary.model}" if summary.model else ""
    out.print(
        f"{len(summary.targets)} modules, {summary.num_tensors} tensors, rank up to "
        f"{summary.rank}{fits}\n"
    )
    families: dict[tuple[str, ...], list[_Row]] = {}
    for row in summary.targets:
        key = (row.target,) if every else tuple(map(str, row.family))
        families.setdefault(key, []).append(row)
    rows = table(
        "module", "kind", "count", "rank", "scale", "norm of the delta", right=("count", "rank")
    )
    for (name, *_), members in families.items():
        one = members[0]
        norms = [row.delta_norm for row in members if row.delta_norm is not None]
        rows.add_row(
            escape(name),
            one.kind,
            str(len(members)),
            str(one.rank),
            number(one.scale),
            _range(norms),
        )
    out.print(rows)
    for title, lines in (
        ("decided", summary.decisions),
        ("left out, not needed for inference", summary.dropped),
        ("let pass by --no-strict", summary.skipped),
    ):
        if lines:
            out.print(f"\n{title}:")
            for line in lines:
                out.print(f"  {line}", markup=False)


def _range(norms: list[float]) -> str:
    if not norms:
        return "only with --model"
    low, high = number(min(norms)), number(max(norms))
    return low if low == high else f"{low} to {high}"
