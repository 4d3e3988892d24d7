"""`lorafold convert`: an adapter of any accepted format, written as PEFT writes it today."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorafold.adapter import Adapter, ExpertShape, TargetShape
from lorafold.cli.options import Layout
from lorafold.cli.output import Json, console, print_json, refusals
from lorafold.cli.shapes import base_tensors, read_shapes
from lorafold.cli.write_peft import write_peft
from lorafold.errors import LoraError
from lorafold.peft import AdapterSpec, bind, parse
from lorafold.peft.layouts import ExpertLayout
from lorafold.refusal import listed

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(help="The adapter's folder.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The new folder.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            help="The model it is for: names follow its layers. Experts and kohya's files need it."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Refuse harmless oddities too.")] = True,
    expert_layout: Layout = None,
    as_json: Json = False,
) -> None:
    """Write an adapter in today's PEFT layout: one safetensors file and adapter_config.json.

    Reads what lorafold loads: names of older tools, shards, kohya's alphas, rsLoRA, patterns,
    experts in every layout. The factors are rounded to bfloat16, as loading does, and the result is
    read back before it appears.
    """
    with refusals(as_json=as_json):
        spec = parse(source, strict=strict)
        if model is None:
            adapter = _write_alone(spec, target)
        else:
            adapter = _write_for(spec, target, model, expert_layout)
    report = adapter.report
    targets = sorted((*adapter.weights, *adapter.experts))
    if as_json:
        print_json(
            {
                "path": str(target),
                "targets": targets,
                "rank": adapter.rank,
                "decisions": report.decisions,
                "dropped": report.dropped,
                "skipped": report.skipped,
            }
        )
        return
    out = console()
    out.print(f"{target}: {len(targets)} targets, rank up to {adapter.rank}", markup=False)
    for line in (*report.decisions, *report.dropped, *report.skipped):
        out.print(f"  {line}", markup=False)


def _write_for(
    spec: AdapterSpec, target: Path, model: str, expert_layout: ExpertLayout | None
) -> Adapter:
    """Write an adapter bound to a model's layers."""
    found = read_shapes(model)
    adapter = bind(
        spec, found.targets, base_tensor=base_tensors(model, found), expert_layout=expert_layout
    )
    write_peft(adapter, target, found.targets, parameters=found.routers)
    return adapter


def _write_alone(spec: AdapterSpec, target: Path) -> Adapter:
    """Write an adapter bound to layers of its own names."""
    if spec.experts or spec.config.target_parameters:
        names = (*(entry.path for entry in spec.experts), *spec.config.target_parameters)
        raise LoraError(
            f"`{spec.source}` adapts experts or other parameters ({names[0]}), whose shapes are "
            "the model's; hint: name its model with --model"
        )
    if any(entry.is_flat for entry in spec.entries):
        raise LoraError(
            f"`{spec.source}` has names without dots, such as {spec.entries[0].path}; "
            "hint: name its model with --model"
        )
    if spec.copies:
        raise LoraError(
            f"`{spec.source}` has full copies of {listed(spec.copies)}, which may be the model's; "
            "hint: name its model with --model"
        )
    shapes: dict[str, TargetShape | ExpertShape] = {
        entry.path: TargetShape(
            int(entry.a.shape[1]), int(entry.b.shape[0]), is_embedding=entry.kind == "embedding"
        )
        for entry in spec.entries
    }
    adapter = bind(spec, shapes)
    write_peft(adapter, target, shapes)
    return adapter
