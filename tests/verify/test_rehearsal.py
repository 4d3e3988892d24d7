"""Kernels are compiled ahead: every check's calls are made, once per shape, and harm nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lorafold.verify import run, runner
from lorafold.verify.check import Check, Extent
from lorafold.verify.checks import CHECKS, check_of
from lorafold.verify.operands import Shape, dense_case
from lorafold.verify.rehearsal import rehearsal

triton = pytest.importorskip("triton")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Extent:
    """The CPU taken for a GPU: the operators run their reference, and nothing is compiled."""
    monkeypatch.setattr(Extent, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return Extent(torch.device("cpu"), quick=True)


def check(calls: Any, shapes: tuple[int, ...] = (3, 3, 4)) -> Check:
    """A check of one call per case, over cases of the given numbers of rows."""
    return Check(
        "any",
        "nothing",
        sides=calls,
        cases=lambda extent, numerics: (
            dense_case(Shape(rows, 8, 5, (2,)), numerics, 0) for rows in shapes
        ),
    )


def test_every_shape_is_called_once_in_other_threads(as_on_a_gpu: Extent) -> None:
    seen: Counter[tuple[int, str]] = Counter()
    main = threading.get_ident()

    def sides(case: Any, device: torch.device) -> Any:
        assert triton.runtime._async_compile.active_mode.get() is not None
        seen[case["x"].shape[0], case.numerics] += threading.get_ident() != main

    one = check(sides)
    with rehearsal([(one, "gemv"), (one, "mma")], as_on_a_gpu) as finish:
        finish()
        assert seen == {(rows, numerics): 1 for rows in (3, 4) for numerics in ("gemv", "mma")}
    assert triton.runtime._async_compile.active_mode.get() is None


def test_errors_are_left_to_the_checks(as_on_a_gpu: Extent) -> None:
    def broken(case: Any, device: torch.device) -> Any:
        raise RuntimeError("the kernel stopped")

    with rehearsal([(check(broken), "gemv")], as_on_a_gpu) as finish:
        finish()


def test_what_is_left_is_dropped_when_the_checks_end(as_on_a_gpu: Extent) -> None:
    began, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def slow(case: Any, device: torch.device) -> Any:
        calls.append(1)
        began.set()
        go_on.wait(20)

    with rehearsal([(check(slow, tuple(range(1, 200))), "gemv")], as_on_a_gpu):
        assert began.wait(20)
        threading.Timer(0.2, go_on.set).start()
    assert 1 <= len(calls) < 199


def test_nothing_happens_on_a_cpu() -> None:
    with rehearsal([(check(None), "gemv")], Extent(torch.device("cpu"))) as finish:
        finish()


@pytest.mark.parametrize("name", [each.name for each in CHECKS])
def test_the_calls_of_a_check_can_be_made(name: str) -> None:
    """On the CPU; what only a GPU can do says so."""
    one = check_of(name)
    assert one is not None
    device = torch.device("cpu")
    for numerics in one.numerics:
        case = next(iter(one.cases(Extent(device, quick=True), numerics)))
        calls = list(one.calls(case, device))
        assert bool(calls) != one.is_exclusive
        if not one.needs_cuda or name == "device is CPU":
            for call in calls:
                call()


def test_a_run_waits_for_the_rehearsal_before_an_exclusive_check(
    as_on_a_gpu: Extent, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def sides(name: str) -> Any:
        def noted(case: Any, device: torch.device) -> Any:
            order.append(name)
            return torch.zeros(1), torch.zeros(1)

        return noted

    @contextlib.contextmanager
    def rehearsed(work: Any, extent: Extent) -> Any:
        order.append(f"{len(work)} checks")
        yield lambda: order.append("finish")

    first, last = check(sides("first"), (3,)), check(sides("last"), (3,))
    checks = (replace(first, numerics=("gemv",)), replace(last, name="last", is_exclusive=True))
    monkeypatch.setattr(runner, "CHECKS", checks)
    monkeypatch.setattr(runner, "rehearsal", rehearsed)
    assert run(device="cpu").ok
    assert order == ["3 checks", "first", "finish", "last", "finish", "last"]


@pytest.mark.gpu
def test_a_quick_run_with_nothing_compiled_takes_seconds(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "lorafold", "verify", "--quick", "--json"],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert json.loads(result.stdout)["ok"]
    assert list(tmp_path.rglob("*.cubin"))
    assert time.monotonic() - began < 30
