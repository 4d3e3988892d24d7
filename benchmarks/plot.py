"""Redraw docs/performance.svg: time over the memory floor on each site, ours and the peers'.

    python -m benchmarks.plot [FILE ...] [--out docs/performance.svg]

Reads result files of `benchmarks.ops --peers`; without any, those of the newest date under
benchmarks/results. Files of one device may hold different sites and ranks. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS
from lorafold.bench import plot as bench
from lorafold.bench.plot import OURS, Series

__all__ = ["draw", "main", "newest"]

PICTURE = Path(__file__).parents[1] / "docs" / "performance.svg"

SERIES = (
    Series("vllm_us", "vLLM {vllm}", {"color": "#bbbbbb", "marker": "s"}),
    Series("vllm_bi_us", "vLLM {vllm}, batch-invariant", {"color": "#ddaa33", "marker": "D"}),
    Series(
        "sglang_us", "SGLang {sglang}, its fastest back end", {"color": "#66ccee", "marker": "v"}
    ),
    Series("mma_us", "lorafold", OURS),
)
"""Labels with places for the peers' versions; later lines are drawn on top."""


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
    devices = {record["device"] for record in records}
    if len(devices) != 1:
        raise SystemExit(f"one picture shows one device; given: {', '.join(sorted(devices))}")
    versions = records[-1]["peer_versions"]
    series = [replace(line, label=line.label.format(**versions)) for line in SERIES]
    title = f"LoRA on a Llama-3-8B layer, {devices.pop()}, {records[-1]['date']}"
    rows = [row for record in records for row in record["rows"]]
    bench.draw(rows, series, path, title=title)


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
