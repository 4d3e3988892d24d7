"""The engine's clocks as a scraper sees them, and as the serving benchmark reads them."""

from __future__ import annotations

import re
import time

import httpx
import openai
from benchmarks.serve_target import metrics_clock

from tests.server.conftest import KEY
from tests.server.process import Process

CLOCKS = ("steps", "step_seconds", "forward_seconds")


def clocks(server: Process) -> dict[str, float]:
    """What /metrics says of the engine's steps."""
    text = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    found = {name: re.search(rf"^lorafold_{name}_total (\S+)$", text, re.M) for name in CLOCKS}
    assert all(f"# TYPE lorafold_{name}_total counter" in text for name in CLOCKS)
    return {name: float(each[1]) for name, each in found.items() if each is not None}


def complete(client: openai.OpenAI, max_tokens: int) -> None:
    body = {"ignore_eos": True}
    client.completions.create(model="a0", prompt="hi", max_tokens=max_tokens, extra_body=body)


def test_steps_and_their_times_are_counted(server: Process, client: openai.OpenAI) -> None:
    complete(client, 2)
    server.wait_for(running=0, waiting=0)
    time.sleep(0.2)  # the last step is counted after its answer is given
    before, start = clocks(server), time.perf_counter()
    complete(client, 20)
    time.sleep(0.2)
    after, wall_s = clocks(server), time.perf_counter() - start
    steps, whole, forwards = (after[name] - before[name] for name in CLOCKS)
    assert steps == 20
    assert 0 < forwards < whole < wall_s
    assert clocks(server) == after


def test_the_benchmark_reads_them(server: Process, client: openai.OpenAI) -> None:
    clock = metrics_clock(server.url, KEY)
    assert clock is not None
    before = clocks(server)
    complete(client, 20)
    time.sleep(0.2)
    own_ms, after = clock(), clocks(server)
    steps, whole, forwards = (after[name] - before[name] for name in CLOCKS)
    assert own_ms is not None
    assert abs(own_ms - 1e3 * (whole - forwards) / steps) < 1e-6
