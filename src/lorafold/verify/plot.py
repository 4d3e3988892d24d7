"""A picture of a report: per check, what was compared and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lorafold.picture import load_matplotlib, writing
from lorafold.verify.report import Line, Report

__all__ = ["plot"]

_COLOURS = {"gemv": "#4477aa", "mma": "#66ccee"}
_DIFFERS = "#cc3311"


def plot(report: Report, path: str | Path) -> None:
    """Draw, by check, outputs compared and, in red, those of them that differ; needs matplotlib.

    Args:
        report: what to draw.
        path: the picture; its ending chooses the format.

    Raises:
        BackendError: if matplotlib is not installed.
        LoraError: if the file cannot be written.
    """
    _, figure_type = load_matplotlib()
    lines = [line for line in report.lines if line.status != "skipped"]
    checks = list(dict.fromkeys(line.check for line in lines))
    figure = figure_type(figsize=(9, 1.2 + 0.34 * len(checks)), layout="constrained")
    axes = figure.add_subplot()
    for numerics, shift in (("gemv", -0.2), ("mma", 0.2)):
        some = [line for line in lines if line.numerics == numerics]
        places = [checks.index(line.check) + shift for line in some]
        elements = [line.elements for line in some]
        axes.barh(places, elements, height=0.38, color=_COLOURS[numerics], label=numerics)
        differences = [line.differences for line in some]
        axes.barh(places, differences, height=0.38, color=_DIFFERS)
        for place, line in zip(places, some, strict=True):
            axes.annotate(
                _label(line), (max(line.elements, 0.5), place), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=7,
                color="black" if line.status == "same" else _DIFFERS,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(left=0.5, right=20 * max([line.elements for line in lines] + [1]))
    axes.set_yticks(range(len(checks)), checks)
    axes.invert_yaxis()
    axes.set_xlabel("outputs compared (red: those that differ)")
    axes.set_title(_title(report), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if len({line.numerics for line in lines}) > 1:
        axes.legend(frameon=False, loc="lower right")
    with writing(path):
        figure.savefig(path)


def _label(line: Line) -> str:
    return "error" if line.status == "error" else f"{line.differences:,} differ"


def _title(report: Report) -> str:
    parts: Sequence[str] = (
        f"{report.machine.device} ({report.machine.name})",
        f"{report.elements:,} compared",
        f"{report.differences:,} differ",
    )
    return ", ".join(parts)
