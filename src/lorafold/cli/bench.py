"""`lorafold bench`: how long the operators take on this machine, beside the memory floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lorafold.bench import SITES, Site, Workload, copy_bytes_per_us, geomean, measure, sites_of
from lorafold.bench.plot import OURS, Series, draw
from lorafold.cli.options import Device
from lorafold.cli.output import Json, console, number, print_json, refusals, table
from lorafold.cli.progress import progress_bar
from lorafold.cli.shapes import read_shapes
from lorafold.device import usable_device
from lorafold.errors import BackendError
from lorafold.numerics import Numerics, resolve
from lorafold.verify.report import machine_of

__all__ = ["bench"]

_ROWS = {"cuda": (1, 8, 64, 256), "cpu": (1, 8)}


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with config.json, or a name on the hub, whose linear layers are taken. "
            "Without it, those of Llama-3-8B.",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Rows of a batch; may be repeated. Without it 1, 8 and, on a GPU, 64 and 256.",
            show_default=False,
        ),
    ] = None,
    adapters: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Adapters that the rows are dealt over; may be repeated. Without it 8.",
            show_default=False,
        ),
    ] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Of the adapters; may be repeated. Without it 16.", show_default=False
        ),
    ] = None,
    numerics: Annotated[
        str | None, typer.Option(help="gemv or mma; without it, the device's default.")
    ] = None,
    device: Device = None,
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw time over floor (.svg, .png or .pdf)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time the operators at the sites of a model: layers that share an input are one site.

    Every call is first compared with the CPU reference, bit for bit; one that differs ends the run
    with exit code 1. On a GPU the time is the device's, operands cold; on a CPU it is the
    reference's. The floor is the bytes that must move over the rate of a large copy, measured here.
    """
    with refusals(as_json=as_json):
        where = usable_device(device)
        chosen = resolve(numerics, where)
        sites = list(SITES.values()) if model is None else _sites(model)
        loads = [
            (site, of_rank, num_rows, num_adapters)
            for of_rank in rank or [16]
            for site in sites
            for num_rows in rows or _ROWS[where.type]
            for num_adapters in adapters or [8]
        ]
        result = _measured(loads, where, chosen, hidden=as_json)
        result |= {"model": model or "Llama-3-8B", "machine": asdict(machine_of(where))}
        if plot_file is not None:
            title = f"LoRA on {Path(result['model']).name}, {result['machine']['name']}"
            draw(result["rows"], [Series("us", "lorafold", OURS)], plot_file, title=title)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _sites(model: str) -> list[Site]:
    shapes = read_shapes(model)
    return sites_of({path: s for path, s in shapes.linears.items() if path != shapes.head})


def _measured(
    loads: Sequence[tuple[Site, int, int, int]],
    device: torch.device,
    numerics: Numerics,
    *,
    hidden: bool,
) -> dict[str, Any]:
    """All rows of the result, and what they have in common."""
    done = []
    with (
        torch.cuda.device(device if device.type == "cuda" else -1),
        progress_bar(hidden=hidden) as bar,
    ):
        task = bar.add_task("copy", total=len(loads))
        rate = copy_bytes_per_us(device)
        for site, rank, num_rows, num_adapters in loads:
            bar.update(task, description=f"{site.name}, rank {rank}, {num_rows} rows")
            load = _workload(site, rank, num_rows, num_adapters, device, rate)
            done.append(measure(load, numerics))
            bar.advance(task)
    return {
        "numerics": numerics,
        "copy_bytes_per_s": round(rate * 1e6),
        "geomean_over_floor": geomean([row["over_floor"] for row in done]),
        "rows": done,
    }


def _workload(
    site: Site, rank: int, num_rows: int, num_adapters: int, device: torch.device, rate: float
) -> Workload:
    try:
        return Workload(site, rank, num_rows, num_adapters, device=device, copy_bytes_per_us=rate)
    except (RuntimeError, MemoryError) as error:
        raise BackendError(
            f"{device} has no memory for site {site.name} with {num_rows} rows and {num_adapters} "
            f"adapters of rank {rank}; hint: lower one of them ({error})"
        ) from error


def _print(result: dict[str, Any]) -> None:
    out = console()
    machine = result["machine"]
    out.print(
        f"{machine['device']}: {machine['name']}, numerics {result['numerics']}", style="bold"
    )
    out.print(
        f"{result['model']}; a large copy moves {result['copy_bytes_per_s'] / 1e9:,.0f} GB/s\n",
        markup=False,
    )
    figures = ("layers", "rank", "rows", "adapters", "µs", "floor µs", "over floor")
    rows = table("site", *figures, right=figures)
    for row in result["rows"]:
        counts = (str(row[name]) for name in ("layers", "rank", "rows", "adapters"))
        times = (_figure(row[name]) for name in ("us", "floor_us", "over_floor"))
        rows.add_row(row["site"], *counts, *times)
    out.print(rows)
    elements = sum(row["elements"] for row in result["rows"])
    out.print(
        f"\n{elements:,} outputs compared with the CPU reference first, none differs; "
        f"{result['geomean_over_floor']} times the floor (geometric mean)",
        style="bold green",
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else number(value)
