"""One benchmark run as one line of JSON: what was measured, on what, with which versions, when."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import lorafold
from lorafold.bench import geomean, rounded

__all__ = ["RESULTS", "add_json_option", "describe", "geomean", "rounded", "save"]

RESULTS = Path(__file__).parent / "results"
"""Where result files go unless `--json` names another place."""


def add_json_option(parser: argparse.ArgumentParser, name: str) -> None:
    """`--json [FILE]`; without a file, results/<name>-<date>.json."""
    default = RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.json"
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=default,
        metavar="FILE",
        help="also write the record to FILE (benchmarks/results/<name>-<date>.json)",
    )


def describe(benchmark: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The record: one dictionary that says what ran, and where."""
    gpu = torch.cuda.is_available()
    try:
        from triton import __version__ as triton
    except ModuleNotFoundError:
        triton = None
    return {
        "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
        "triton": triton,
        "lorafold": lorafold.__version__,
        **more,
        "rows": rows,
    }


def save(record: dict[str, Any], path: Path | None) -> None:
    """Write the record as one line; without a path, nothing.

    Benchmarks call this after every row, so that a run that breaks leaves what it has measured.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record) + "\n")
