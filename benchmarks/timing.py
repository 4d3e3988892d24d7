"""Device time of many calls inside one CUDA graph: the median over replays, per call."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

__all__ = ["COPY_BYTES_PER_US", "graph_us"]

COPY_BYTES_PER_US = 4.3e6
"""Bytes per microsecond that a large copy moves on an H200, read and written; the floor's rate."""


def graph_us(calls: Sequence[Callable[[], None]], replays: int = 9) -> float:
    """Microseconds per call: all calls captured in one graph, replayed, median of the replays.

    The calls should work on different memory, together several times the L2, so that each finds
    its operands cold.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compile and load before the capture
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    with torch.cuda.stream(stream):
        graph.replay()
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)
