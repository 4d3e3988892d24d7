"""What the tests of the engine ask, and how they listen."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from lorafold.engine import Answer, Delta, Request, Sampling
from tests.tiny_models import random_ids
from tests.tiny_text import make_tokenizer

TOKENIZER = make_tokenizer()


def request(
    length: int = 5, adapter: str | None = None, *, prompt: int = 0, **sampling: Any
) -> Request:
    settings = {"max_tokens": 8, "ignore_eos": True} | sampling
    return Request(random_ids(length, seed=prompt).tolist(), adapter, Sampling(**settings))


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.005)


class Listener:
    """Collects deltas; `hold` lets the engine wait in the first one until it is set."""

    def __init__(self) -> None:
        self.deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self.hold = threading.Event()
        self.has_begun = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.put(delta)
        self.has_begun.set()
        assert self.hold.wait(30)

    def answer(self) -> Answer:
        self.hold.set()
        found = [self.deltas.get(timeout=30)]
        while found[-1].finish_reason is None:
            found.append(self.deltas.get(timeout=30))
        return Answer.of(found)
