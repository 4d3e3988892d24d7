"""A server on the CPU whose model says when each of its forwards began and ended.

    python -m benchmarks.forward_clock FILE serve ...

Two float64 per forward go to FILE, seconds of `time.perf_counter`, which processes of one machine
share. What lies between two forwards is the server's own work: sampling, text, scheduling, HTTP. On
a GPU a forward ends before its work does, so there this clock would say nothing.
"""

from __future__ import annotations

import itertools
import statistics
import struct
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

from lorafold.integrations import transformers

__all__ = ["main", "own_ms"]

_PAIR = struct.Struct("dd")


def own_ms(file: Path, begin: float, end: float) -> float | None:
    """The median of the milliseconds between forwards that lie between two moments."""
    content = file.read_bytes()
    whole = content[: len(content) // _PAIR.size * _PAIR.size]
    forwards = [each for each in _PAIR.iter_unpack(whole) if begin <= each[0] and each[1] <= end]
    gaps = [1e3 * (after - before) for (_, before), (after, _) in itertools.pairwise(forwards)]
    return statistics.median(gaps) if gaps else None


def _clocked(model: Any, file: BinaryIO) -> Any:
    """The model with hooks that write times."""
    began = [0.0]

    def before(*_: Any) -> None:
        began[0] = time.perf_counter()

    def after(*_: Any) -> None:
        file.write(_PAIR.pack(began[0], time.perf_counter()))

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after)
    return model


def main() -> None:
    path, sys.argv[1:] = sys.argv[1], sys.argv[2:]
    load_model = transformers.load_model

    with Path(path).open("wb", buffering=0) as file:
        transformers.load_model = lambda *args, **options: _clocked(
            load_model(*args, **options), file
        )
        from lorafold.cli import main as run

        run()


if __name__ == "__main__":
    main()
