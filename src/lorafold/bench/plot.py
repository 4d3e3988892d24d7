"""Time over the memory floor on each site, as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafold.picture import load_matplotlib, writing

__all__ = ["OURS", "Series", "draw"]


@dataclass(frozen=True)
class Series:
    """One line of every panel.

    Args:
        column: of the rows, in microseconds; where it is missing or None there is no point.
        label: in the legend.
        style: of the line, as matplotlib takes it.
    """

    column: str
    label: str
    style: Mapping[str, Any] = field(default_factory=dict)


OURS = {"color": "#004488", "marker": "o", "linewidth": 2.2}
"""The style of lorafold's own line."""


def draw(
    rows: Sequence[Mapping[str, Any]], series: Sequence[Series], path: str | Path, *, title: str
) -> None:
    """Draw one panel per rank and site: time over `floor_us` by rows and adapters.

    Args:
        rows: with site, rank, rows, adapters, floor_us and the columns of the series.
        series: later ones are drawn on top.
        path: the picture; its ending chooses the format.
        title: above all.

    Raises:
        BackendError: if matplotlib is not installed.
        LoraError: if the file cannot be written.
    """
    matplotlib, figure_type = load_matplotlib()
    ranks, sites = _distinct(rows, "rank"), _distinct(rows, "site")
    with matplotlib.rc_context({"svg.hashsalt": "lorafold", "font.size": 8}):
        figure = figure_type(
            figsize=(1.2 + 2.4 * len(sites), 1.3 + 2.1 * len(ranks)), layout="constrained"
        )
        panels = figure.subplots(len(ranks), len(sites), sharey=True, squeeze=False)
        for i, rank in enumerate(ranks):
            for j, site in enumerate(sites):
                some = [row for row in rows if (row["rank"], row["site"]) == (rank, site)]
                _panel(panels[i][j], some, series)
                panels[i][j].set_title(f"{site}, rank {rank}", fontsize=8)
        panels[0][0].legend(
            *panels[0][0].get_legend_handles_labels(), frameon=False, fontsize=6, loc="upper right"
        )
        figure.supylabel("time over the memory floor (1 is the floor)")
        figure.supxlabel("rows / adapters")
        figure.suptitle(f"{title}: lower is better")
        path = Path(path)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]], series: Sequence[Series]) -> None:
    loads = [f"{row['rows']}/{row['adapters']}" for row in rows]
    for line in series:
        places = [i for i, row in enumerate(rows) if row.get(line.column) is not None]
        ratios = [rows[i][line.column] / rows[i]["floor_us"] for i in places]
        axes.plot(places, ratios, label=line.label, markersize=4, **line.style)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(loads)), loads)
    axes.grid(axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _distinct(rows: Iterable[Mapping[str, Any]], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))
