"""Redraw docs/performance.svg: time over the memory floor on each site, ours and the peers'.

    python -m benchmarks.plot [FILE ...] [--out docs/performance.svg]

Reads result files of `benchmarks.ops --peers`; without any, those of the newest date under
benchmarks/results. Files of one device may hold different sites and ranks. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS

__all__ = ["draw", "main", "newest"]

PICTURE = Path(__file__).parents[1] / "docs" / "performance.svg"

SERIES = (
    ("vllm_us", "vLLM {vllm}", {"color": "#bbbbbb", "marker": "s"}),
    ("vllm_bi_us", "vLLM {vllm}, batch-invariant", {"color": "#ddaa33", "marker": "D"}),
    ("sglang_us", "SGLang {sglang}, its fastest back end", {"color": "#66ccee", "marker": "v"}),
    ("mma_us", "lorafold", {"color": "#004488", "marker": "o", "linewidth": 2.2}),
)
"""Column, label, style; later ones are drawn on top."""


def newest(results: Path) -> list[dict[str, Any]]:
    """The records of the newest date that hold the dense operators beside the peers.

    Raises:
        SystemExit: if there are none.
    """
    files = sorted(results.glob("*.json"))
    records = [r for r in map(_read, files) if r["benchmark"] == "ops" and "peer_versions" in r]
    if not records:
        raise SystemExit(
            f"no result of the dense operators with peers in {results}\n"
            "hint: python -m benchmarks.ops --peers --json"
        )
    date = max(record["date"] for record in records)
    return [record for record in records if record["date"] == date]


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw one panel per rank and site.

    Raises:
        SystemExit: if the records are of several devices.
    """
    import matplotlib
    from matplotlib.figure import Figure

    devices = {record["device"] for record in records}
    if len(devices) != 1:
        raise SystemExit(f"one picture shows one device; given: {', '.join(sorted(devices))}")
    rows = [row for record in records for row in record["rows"]]
    ranks, sites = _distinct(rows, "rank"), _distinct(rows, "site")
    with matplotlib.rc_context({"svg.hashsalt": "lorafold", "font.size": 8}):
        figure = Figure(
            figsize=(1.2 + 2.4 * len(sites), 1.3 + 2.1 * len(ranks)), layout="constrained"
        )
        panels = figure.subplots(len(ranks), len(sites), sharey=True, squeeze=False)
        for i, rank in enumerate(ranks):
            for j, site in enumerate(sites):
                some = [r for r in rows if (r["rank"], r["site"]) == (rank, site)]
                _panel(panels[i][j], some, records[-1]["peer_versions"])
                panels[i][j].set_title(f"{site}, rank {rank}", fontsize=8)
        panels[0][0].legend(
            *panels[0][0].get_legend_handles_labels(), frameon=False, fontsize=6, loc="upper right"
        )
        figure.supylabel("time over the memory floor (1 is the floor)")
        figure.supxlabel("rows / adapters")
        what = f"LoRA on a Llama-3-8B layer, {devices.pop()}, {records[-1]['date']}"
        figure.suptitle(f"{what}: lower is better")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panel(axes: Any, rows: Sequence[dict[str, Any]], versions: dict[str, str]) -> None:
    loads = [f"{row['rows']}/{row['adapters']}" for row in rows]
    for column, label, style in SERIES:
        places = [i for i, row in enumerate(rows) if row.get(column) is not None]
        ratios = [rows[i][column] / rows[i]["floor_us"] for i in places]
        axes.plot(places, ratios, label=label.format(**versions), markersize=4, **style)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(loads)), loads)
    axes.grid(axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _distinct(rows: Iterable[dict[str, Any]], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=PICTURE)
    args = parser.parse_args(arguments)
    records = [_read(path) for path in args.files] or newest(RESULTS)
    draw(records, args.out)
    print(f"{args.out}: {sum(len(record['rows']) for record in records)} rows")


if __name__ == "__main__":
    main()
