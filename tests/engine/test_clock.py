"""The clock of forwards counts what is done, and waits for nothing."""

from __future__ import annotations

import time

import pytest
import torch

from lorafold.engine.clock import ForwardClock


def test_forwards_add_up_and_are_read_once() -> None:
    clock = ForwardClock(torch.device("cpu"))
    assert clock.read() == (0, 0.0)
    start = time.perf_counter()
    for _ in range(2):
        clock.begin()
        time.sleep(0.02)
        clock.end()
        time.sleep(0.05)
    number, seconds = clock.read()
    assert number == 2
    assert 0.04 <= seconds <= time.perf_counter() - start - 0.1
    assert clock.read() == (0, 0.0)


def test_a_forward_that_failed_or_was_cleared_is_not_counted() -> None:
    clock = ForwardClock(torch.device("cpu"))
    start = time.perf_counter()
    clock.begin()
    time.sleep(0.05)
    clock.begin()
    clock.end()
    number, seconds = clock.read()
    assert number == 1
    assert seconds <= time.perf_counter() - start - 0.05
    clock.begin()
    clock.end()
    clock.clear()
    assert clock.read() == (0, 0.0)


@pytest.mark.gpu
def test_on_the_device_its_own_time_counts_and_is_not_waited_for() -> None:
    device, cycles = torch.device("cuda"), 400_000_000
    clock = ForwardClock(device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    clock.begin()
    torch.cuda._sleep(cycles)
    clock.end()
    unread, launched = clock.read(), time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    number, seconds = clock.read()
    assert unread == (0, 0.0)
    assert number == 1
    assert launched < seconds / 2
    assert 0.05 < seconds <= whole
