"""Kernels compiled ahead of the checks, side by side: compiling is most of a first run on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context

import torch

from lorafold.numerics import Numerics
from lorafold.verify.check import Check, Extent

__all__ = ["rehearsal"]

Work = Sequence[tuple[Check, Numerics]]


@contextmanager
def rehearsal(work: Work, extent: Extent) -> Iterator[Callable[[], None]]:
    """Have threads call what the checks will call, for the sake of the kernels alone.

    Triton compiles outside of Python's lock, and whoever needs a kernel that is being compiled
    waits for it, so that the checks inside the `with` block need not wait for anything else.
    Results and errors are dropped here: the checks have their own. Does nothing on a CPU.

    Args:
        work: checks and numerics, in the order in which they run.
        extent: what they try.

    Yields:
        A function that returns when no thread uses the device any more.
    """
    if not extent.is_cuda:
        yield lambda: None
        return
    from triton import AsyncCompileMode

    threads = max(2, min(16, os.cpu_count() or 2))
    with ThreadPoolExecutor(threads) as compilers, AsyncCompileMode(compilers, ignore_errors=True):
        pool, calls = ThreadPoolExecutor(threads + 1), list[Future[None]]()

        def start(call: Callable[[], object]) -> Future[None]:
            return pool.submit(copy_context().run, _tried, call, extent.device)

        def start_all() -> None:
            for check, numerics in work:
                for call in _calls(check, extent, numerics):
                    calls.append(start(call))

        def finish() -> None:
            feeder.result()
            wait(calls)

        feeder = start(start_all)
        try:
            yield finish
        finally:
            pool.shutdown(cancel_futures=True)


def _calls(check: Check, extent: Extent, numerics: Numerics) -> Iterator[Callable[[], object]]:
    """What launches every kernel of a check: its calls for the first case of every shape."""
    seen = set()
    for case in check.cases(extent, numerics):
        shapes = tuple((name, tensor.shape) for name, tensor in case.tensors.items())
        if shapes not in seen:
            seen.add(shapes)
            yield from check.calls(case, extent.device)


def _tried(call: Callable[[], object], device: torch.device) -> None:
    """Call, whatever comes of it."""
    with suppress(Exception), torch.cuda.device(device):
        call()
