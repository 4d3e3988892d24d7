"""`lorafold plan`: how much memory a pool would take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.cli.options import parse_device
from lorafold.cli.output import Json, console, print_json, refusals, size_text, table
from lorafold.cli.shapes import read_shapes
from lorafold.device import free_bytes
from lorafold.errors import ModelError
from lorafold.expert_pool import expert_pool_bytes
from lorafold.pool import pool_bytes

__all__ = ["plan"]


def plan(
    model: Annotated[str, typer.Option(help="A folder with config.json, or a name on the hub.")],
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters on the device at a time.")] = 8,
    max_rank: Annotated[int, typer.Option(min=1, help="The largest rank that fits.")] = 64,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A layer's path or its end, such as q_proj, or all-linear; may be repeated. "
            "Without it, all linear layers but the output head."
        ),
    ] = None,
    device: Annotated[
        torch.device | None,
        typer.Option(
            "--device",
            parser=parse_device,
            metavar="DEVICE",
            help="Compare with its free memory: cpu or cuda:N.",
        ),
    ] = None,
    max_expert_rank: Annotated[
        int | None,
        typer.Option(
            min=0, help="The largest rank of routed experts that fits; 0 for the routers alone."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say how much memory the adapters of a model take, from its config alone.

    With --device the exit code is 1 if they would not fit into what is free there.
    """
    with refusals(as_json=as_json):
        shapes = read_shapes(model)
        if max_expert_rank is not None and not shapes.experts:
            raise ModelError(f"{shapes.name} has no routed experts; hint: no --max-expert-rank")
        targets = shapes.chosen(target or [])
        if max_expert_rank is not None:
            targets |= shapes.routers
        experts = shapes.experts if max_expert_rank else {}
        linear_bytes = pool_bytes(targets, max_loras, max_rank)
    expert_bytes = expert_pool_bytes(experts, max_loras, max_expert_rank or 0) if experts else 0
    free = None if device is None else free_bytes(device)
    shown = {
        "model": shapes.name,
        "max_loras": max_loras,
        "max_rank": max_rank,
        "max_expert_rank": max_expert_rank,
        "num_targets": len(targets) + len(experts),
        "bytes": linear_bytes + expert_bytes,
        "bytes_per_adapter": (linear_bytes + expert_bytes) // max_loras,
        "expert_bytes": expert_bytes,
        "free_bytes": free,
        "fits": free is None or linear_bytes + expert_bytes <= free,
    }
    if as_json:
        print_json(shown)
    else:
        _print(shown, targets, experts)
    if not shown["fits"]:
        raise typer.Exit(1)


def _print(
    shown: Mapping[str, Any],
    targets: Mapping[str, TargetShape],
    experts: Mapping[str, ExpertShape],
) -> None:
    out = console()
    out.print(
        f"{shown['model']}: {shown['num_targets']} targets, {shown['max_loras']} adapters of rank "
        f"{shown['max_rank']}"
    )
    rows = table("layers", "count", "one adapter", right=("count", "one adapter"))
    for name, (count, num_bytes) in _by_kind(targets, shown["max_rank"]).items():
        rows.add_row(name, str(count), size_text(num_bytes))
    if experts:
        one = shown["expert_bytes"] // shown["max_loras"]
        name = f"experts of rank {shown['max_expert_rank']}"
        rows.add_row(name, str(len(experts)), size_text(one))
    out.print(rows)
    out.print(f"one adapter: {size_text(shown['bytes_per_adapter'])}")
    out.print(f"the pool:    {size_text(shown['bytes'])} ({shown['bytes']:,} bytes)", style="bold")
    if shown["free_bytes"] is not None:
        verdict = "fits" if shown["fits"] else "does not fit"
        out.print(f"free memory: {size_text(shown['free_bytes'])}: it {verdict}")


def _by_kind(targets: Mapping[str, TargetShape], max_rank: int) -> dict[str, tuple[int, int]]:
    """End of the path and shape -> (layers, bytes of one adapter in them)."""
    groups: dict[str, dict[str, TargetShape]] = {}
    for path, shape in targets.items():
        leaf = path.rpartition(".")[2]
        key = f"{leaf} {shape.in_features} -> {shape.out_features}"
        groups.setdefault(key, {})[path] = shape
    return {key: (len(group), pool_bytes(group, 1, max_rank)) for key, group in groups.items()}
