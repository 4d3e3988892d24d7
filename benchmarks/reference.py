"""How long the CPU reference takes: dot products of both numerics and whole deltas of a batch.

    python -m benchmarks.reference [--threads 2] [--repeats 20]

Each shape is first checked: one row alone must have the bits of that row in the batch. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.ops.reference import delta_gathered, delta_rows, dot

# rows, columns, K; what it stands for
SHAPES = [
    (32, 64, 4096, "shrink, rank 64"),
    (32, 4096, 64, "expand, rank 64"),
    (8, 16, 576, "decode shrink, rank 16"),
    (8, 576, 16, "decode expand, rank 16"),
    (1, 16, 4096, "one row, shrink"),
    (1, 4096, 16, "one row, expand"),
]
NUMERICS: tuple[Numerics, ...] = ("gemv", "mma")


def medians(work: Callable[[], Tensor], repeats: int) -> tuple[float, float]:
    """Median and least milliseconds of one call."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times), min(times)


def random_bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the CPU reference.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results: dict[str, float] = {}

    def report(name: str, work: Callable[[], Tensor], row: Callable[[], Tensor]) -> None:
        if not torch.equal(work()[:1], row()):
            raise SystemExit(f"{name}: a row alone has other bits than in the batch")
        median, least = medians(work, options.repeats)
        results[name] = round(median, 3)
        print(f"{name:<55} {median:9.3f} ms   (least {least:.3f})")

    for n, m, k, what in SHAPES:
        x, w = random_bf16(n, k), random_bf16(m, k)
        for numerics in NUMERICS:
            name = f"{numerics:<4} {what}: [{n}, {k}] x [{m}, {k}]"
            report(name, partial(dot, x, w, numerics), partial(dot, x[:1], w, numerics))
    x, a, b = random_bf16(8, 576), random_bf16(8, 16, 576), random_bf16(8, 576, 16)
    for numerics in NUMERICS:
        mixed = partial(delta_gathered, x, a, b, numerics)
        alone = partial(delta_rows, x[:1], a[0], b[0], numerics)
        report(f"{numerics:<4} 8 rows, 8 adapters, rank 16: 576 to 576", mixed, alone)
    setting = {"threads": options.threads, "torch": torch.__version__}
    print(json.dumps({"milliseconds": results, "processor": platform.machine(), **setting}))


if __name__ == "__main__":
    main()
