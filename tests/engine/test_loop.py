"""Faults around the steps: nobody waits for ever, and the thread does not spin."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from torch import nn

from lorafold.engine import Delta, Engine, EngineClosedError
from lorafold.engine.answering import Answering
from lorafold.engine.kv import KvCache
from lorafold.errors import ModelError
from lorafold.runtime import attach
from tests.engine.asking import TOKENIZER, Listener, request, wait_until


@pytest.fixture
def engine(plain: nn.Module) -> Iterator[Engine]:
    lora = attach(copy.deepcopy(plain), max_loras=1, max_rank=8)
    with Engine(lora, TOKENIZER, cache_tokens=256) as engine:
        yield engine


def unheld() -> Listener:
    """A listener that the engine never waits for."""
    listener = Listener()
    listener.hold.set()
    return listener


def test_a_model_that_was_detached_fails_requests_and_not_for_ever(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.lora.detach()
    listeners = [unheld() for _ in range(2)]
    for listener in listeners:
        engine.submit(request(), listener)
    for listener in listeners:
        assert isinstance(listener.answer().error, ModelError)
    assert len(caplog.records) <= 2
    assert engine.stats().waiting[None] == 0


class Failing:
    """The engine's tokenizer, until it has failed once."""

    eos_token_id = None

    def __init__(self) -> None:
        self.has_failed = False

    def decode(self, ids: list[int], **settings: Any) -> str:
        if not self.has_failed:
            self.has_failed = True
            raise KeyError(ids[-1])
        return str(TOKENIZER.decode(ids, **settings))


def test_a_tokenizer_that_fails_ends_one_answer_and_no_others(plain: nn.Module) -> None:
    lora = attach(copy.deepcopy(plain), max_loras=1, max_rank=8)
    with Engine(lora, Failing(), cache_tokens=256) as engine:
        answers = engine.answer([request(), request(), request()])
        assert [answer.finish_reason for answer in answers] == ["error", "length", "length"]
        assert isinstance(answers[0].error, KeyError)
        assert engine.answer([request()])[0].finish_reason == "length"


class LateInbox(list[Answering]):
    """Lets the engine's thread end, if it can, after it was asked whether it runs."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._thread = engine._loop._thread

    def append(self, answering: Answering) -> None:
        self._thread.join(0.5)
        super().append(answering)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_nobody_waits_for_ever(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, may_go_on, late = SimpleQueue[Delta](), threading.Semaphore(0), unheld()

    def turn_by_turn(delta: Delta) -> None:
        said.put(delta)
        assert may_go_on.acquire(timeout=30)

    def fail(*_: Any) -> None:
        raise ValueError("the device is gone")

    engine.submit(request(max_tokens=9), turn_by_turn)
    said.get(timeout=30)
    ending = unheld()
    engine.submit(request(max_tokens=1), ending)
    may_go_on.release()
    said.get(timeout=30)
    # The step is not over: the end of the other request, and then of this one, cannot be noted.
    monkeypatch.setattr(KvCache, "release", fail)
    engine._loop._inbox = LateInbox(engine)
    threading.Timer(0.1, may_go_on.release, [2]).start()
    engine.submit(request(), late)
    assert ending.answer().finish_reason == "length"
    assert isinstance(said.get(timeout=30).error, ValueError)
    assert isinstance(late.answer().error, EngineClosedError)
    wait_until(lambda: not engine.is_open)
    with pytest.raises(EngineClosedError):
        engine.submit(request(), late)
