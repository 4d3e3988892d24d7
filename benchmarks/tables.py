"""The tables of docs/performance.md, from result files.

    python -m benchmarks.tables [ops | experts]

`docs/performance.md` holds what this prints for the newest results; a test compares them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.record import RESULTS
from lorafold.bench import H200_COPY_BYTES_PER_US

__all__ = ["experts_table", "main", "misses", "newest", "ops_table"]

PEERS = ("vllm_us", "vllm_bi_us", "sglang_us")


def newest(benchmark: str) -> dict[str, Any]:
    """The record of the newest date."""
    files = sorted(RESULTS.glob(f"{benchmark}-*.json"))
    record: dict[str, Any] = json.loads(files[-1].read_text())
    return record


def misses(row: dict[str, Any]) -> str:
    """Which targets a row of the dense operators misses: letters of docs/performance.md.

    Example:
        >>> row = {"site": "o", "floor_us": 1.0, "mma_us": 5.0, "vllm_us": 9.0}
        >>> misses(row | {"vllm_bi_us": None, "sglang_us": 9.5})
        'ac'
    """
    ours, floor = row["mma_us"], row["floor_us"]
    best = min(row[peer] for peer in PEERS if row[peer] is not None)
    is_near_floor = ours <= 1.35 * floor
    moves_much = floor * H200_COPY_BYTES_PER_US >= 16e6
    most = 5.5 if row["site"] == "down" else 4.5
    missed = {
        "a": best < 2 * ours and not is_near_floor,
        "b": moves_much and not is_near_floor,
        "c": floor < 1.5 and ours > most,
    }
    return "".join(letter for letter, is_missed in missed.items() if is_missed)


def ops_table(record: dict[str, Any]) -> Iterator[str]:
    """One line per site, rank and batch: floor, ours, peers, best peer over ours, misses."""
    yield "| site | R | T | L | floor | ours | vLLM | vLLM-BI | SGLang | x | misses |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in record["rows"]:
        best = min(row[peer] for peer in PEERS if row[peer] is not None)
        times = [row["floor_us"], row["mma_us"], *(row[peer] for peer in PEERS)]
        batch = (row["site"], row["rank"], row["rows"], row["adapters"])
        yield _line(*batch, *map(_us, times), f"{best / row['mma_us']:.2f}", misses(row))


def experts_table(record: dict[str, Any]) -> Iterator[str]:
    """One line per rank and batch: plan, projections and layer with their floors, vLLM's layer."""
    yield (
        "| R | adapters | tokens | pairs in use | plan | gate_up (floor) | down (floor) "
        "| layer (floor) | vLLM | vLLM-BI | x |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in record["rows"]:
        parts = [
            f"{_us(row[f'{p} us'])} ({_us(row[f'{p} floor_us'])})"
            for p in ("gate_up", "down", "layer")
        ]
        peers = [row["layer vllm_us"], row["layer vllm_bi_us"]]
        best = min(peer for peer in peers if peer is not None)
        batch = (row["rank"], row["adapters"], row["tokens"], row["pairs"])
        ratio = f"{best / row['layer us']:.2f}"
        yield _line(*batch, _us(row["plan_us"]), *parts, *map(_us, peers), ratio)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> None:
    tables = {"ops": ops_table, "experts": experts_table}
    for name in (sys.argv[1:] if arguments is None else arguments) or tables:
        print(*tables[name](newest(name)), sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
