"""The engine's clocks: what of its steps is the model's forward, and what is its own work."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lorafold.engine import Delta, Engine, EngineStats, Request
from lorafold.engine.tally import Tally
from lorafold.runtime import attach
from tests.engine.asking import TOKENIZER, Listener, request, wait_until

PAUSE_S = 0.03


def test_steps_add_up_and_a_copy_stands_still() -> None:
    tally = Tally()
    tally.count_step(0.5, 1, 0.25)
    before = tally.read()
    tally.count_step(0.5, 2, 0.5)
    tally.count_step(0.25, 0, 0.0)
    assert (before.num_steps, before.step_seconds, before.forward_seconds) == (1, 0.5, 0.25)
    after = tally.read()
    assert (after.num_steps, after.step_seconds, after.forward_seconds) == (3, 1.25, 0.75)


def test_names_that_are_gone_leave_no_numbers(plain: nn.Module, folders: list[Path]) -> None:
    lora = attach(copy.deepcopy(plain), max_loras=1, max_rank=8)
    with Engine(lora, TOKENIZER, cache_tokens=512) as engine:
        for name in ("idle", "running"):
            engine.load(name, folders[0])
            listener = Listener()
            engine.submit(request(5, name), listener)
            assert listener.has_begun.wait(30)
            if name == "running":
                engine.unload(name)
                assert engine.stats().running[name] == 1
            assert listener.answer().finish_reason == "length"
            wait_until(lambda: not sum(engine.stats().running.values()))
        engine.unload("idle")
        wait_until(lambda: not engine.stats().finished)
        stats = engine.stats()
        for counter in (stats.running, stats.waiting, stats.prompt_tokens, stats.answer_tokens):
            assert not counter


@pytest.fixture(params=["packed", "static"])
def engine(request: pytest.FixtureRequest, plain: nn.Module) -> Iterator[Engine]:
    lora = attach(copy.deepcopy(plain), max_loras=1, max_rank=8)
    settings: dict[str, Any] = {"max_running": 2, "cache_tokens": 512}
    with Engine(lora, TOKENIZER, batching=request.param, **settings) as engine:
        yield engine


def spent(engine: Engine, asked: Request, on_delta: Callable[[], None]) -> EngineStats:
    """What a request adds to the numbers of an engine that was idle: no more than its own time."""
    time.sleep(0.2)
    before, listener = engine.stats(), Listener()

    def deliver(delta: Delta) -> None:
        on_delta()
        listener(delta)

    listener.hold.set()
    start = time.perf_counter()
    engine.submit(asked, deliver)
    listener.answer()
    expected = before.num_steps + asked.sampling.max_tokens
    wait_until(lambda: engine.stats().num_steps == expected)
    wall_s, after = time.perf_counter() - start, engine.stats()
    for name in ("num_steps", "step_seconds", "forward_seconds"):
        setattr(after, name, getattr(after, name) - getattr(before, name))
    assert 0 < after.forward_seconds < after.step_seconds < wall_s
    return after


def test_a_step_is_a_forward_and_what_the_engine_does_besides(engine: Engine) -> None:
    assert engine.stats().num_steps == engine.stats().forward_seconds == 0
    spent(engine, request(5, max_tokens=2), lambda: None)  # what is slow when first used
    quick = spent(engine, request(5, max_tokens=4), lambda: None)
    assert quick.num_steps == 4
    own = spent(engine, request(5, max_tokens=4), lambda: time.sleep(PAUSE_S))
    assert own.step_seconds - own.forward_seconds >= 4 * PAUSE_S


def test_the_time_of_a_forward_is_the_models(engine: Engine) -> None:
    spent(engine, request(5, max_tokens=2), lambda: None)
    model: Any = engine.lora.model
    model.model.norm.register_forward_hook(lambda *_: time.sleep(PAUSE_S))
    slow = spent(engine, request(5, max_tokens=4), lambda: None)
    assert slow.forward_seconds >= 4 * PAUSE_S
