"""`lorafold convert`: an adapter of any accepted format, written as PEFT writes it today."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lorafold.adapter import Adapter, TargetShape
from lorafold.cli.output import Json, console, print_json, refusals
from lorafold.cli.shapes import base_tensors, read_shapes
from lorafold.cli.write_peft import write_peft
from lorafold.errors import LoraError
from lorafold.peft import bind, parse

__all__ = ["convert"]


def convert(
    source: Annotated[Path, typer.Argument(help="The adapter's folder.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The new folder.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(help="The model it is for: names follow its layers. kohya's files need it."),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Refuse harmless oddities too.")] = True,
    as_json: Json = False,
) -> None:
    """Write an adapter in today's PEFT layout: one safetensors file and adapter_config.json.

    Reads what lorafold loads: names of older tools, shards, kohya's alphas, rsLoRA, patterns. The
    factors are rounded to bfloat16, as loading does, and the result is read back before it appears.
    """
    with refusals(as_json=as_json):
        adapter = _read(source, model, strict=strict)
        write_peft(adapter, target)
    report = adapter.report
    if as_json:
        print_json(
            {
                "path": str(target),
                "targets": sorted(adapter.weights),
                "rank": adapter.rank,
                "decisions": report.decisions,
                "dropped": report.dropped,
                "skipped": report.skipped,
            }
        )
        return
    out = console()
    out.print(f"{target}: {len(adapter.weights)} targets, rank up to {adapter.rank}", markup=False)
    for line in (*report.decisions, *report.dropped, *report.skipped):
        out.print(f"  {line}", markup=False)


def _read(source: Path, model: str | None, *, strict: bool) -> Adapter:
    """The adapter bound to the model's layers, or, without a model, to layers of its own names."""
    spec = parse(source, strict=strict)
    if spec.config.target_parameters:
        raise LoraError(
            f"`{source}` adapts parameters ({', '.join(spec.config.target_parameters)}); "
            "only adapters of linear layers can be written"
        )
    if model is not None:
        return bind(spec, read_shapes(model).targets, base_tensor=base_tensors(model))
    if spec.experts:
        raise LoraError(
            f"`{source}` adapts experts ({spec.experts[0].path}); only adapters of linear layers "
            "can be written; hint: --model, if the model's experts are linear layers"
        )
    if any(entry.is_flat for entry in spec.entries):
        raise LoraError(
            f"`{source}` has names without dots, such as {spec.entries[0].path}; "
            "hint: name its model with --model"
        )
    shapes = {
        entry.path: TargetShape(int(entry.a.shape[1]), int(entry.b.shape[0]))
        for entry in spec.entries
    }
    return bind(spec, shapes)
