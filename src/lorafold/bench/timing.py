"""Clocks: device time of calls inside one CUDA graph, host time, and the rate of a large copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["H200_COPY_BYTES_PER_US", "copy_bytes_per_us", "graph_us", "host_us"]

H200_COPY_BYTES_PER_US = 4.3e6
"""Bytes per microsecond that a large copy moves on an H200, read and written."""


def graph_us(calls: Sequence[Callable[[], None]], replays: int = 9) -> float:
    """Microseconds per call: all calls captured in one graph, replayed, median of the replays.

    The calls should work on different memory, together several times the L2, so that each finds
    its operands cold.

    Args:
        calls: what is timed; it runs on the current CUDA device.
        replays: of the graph.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compile and load before the capture
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times: list[float] = []
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(replays):
            begin, end = _event(), _event()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def host_us(calls: Sequence[Callable[[], None]], repeats: int = 5) -> float:
    """Microseconds per call on the host's clock, median of the repeats, after one call untimed.

    Args:
        calls: what is timed.
        repeats: of all calls.

    Example:
        >>> host_us([lambda: None]) < 1e6
        True
    """
    calls[0]()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return statistics.median(times)


def copy_bytes_per_us(device: torch.device) -> float:
    """Bytes per microsecond that a large copy inside the device's memory reads and writes.

    Args:
        device: any; on a GPU the copy is far larger than its caches.
    """
    size = 1 << (30 if device.type == "cuda" else 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * size / (graph_us([copy] * 4) if device.type == "cuda" else host_us([copy]))
