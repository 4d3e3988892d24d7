"""What an answer says, and when: each token once and in order, while the next step is computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from lorafold.engine import Answer, Delta, Engine, Request, TokenLogprob
from lorafold.engine.answering import Answering
from lorafold.engine.graphs import DecodeGraphs
from lorafold.engine.packed import PackedBatches, PackedForward
from lorafold.engine.sampler import Choice
from lorafold.runtime import attach
from tests.engine.asking import TOKENIZER, Listener, request, wait_until


def answering(said: list[Delta], **sampling: Any) -> Answering:
    return Answering(request(3, **sampling), None, said.append, TOKENIZER, end_tokens=[2])


def test_a_token_is_said_once_and_before_the_next() -> None:
    said: list[Delta] = []
    one = answering(said, max_tokens=3)
    one.say()
    assert said == []
    one.take(Choice(10))
    assert (one.tokens, said, one.may_end) == ([10], [], False)
    one.say()
    one.say()
    assert [delta.tokens for delta in said] == [(10,)]
    one.take(Choice(11))
    one.finish("cancelled")
    assert [delta.tokens for delta in said] == [(10,), (11,), ()]
    assert [delta.finish_reason for delta in said] == [None, None, "cancelled"]


def test_an_answer_that_its_last_token_ends_is_not_ended_again() -> None:
    said: list[Delta] = []
    ends: list[Answering] = []
    one = answering(said, max_tokens=1)
    one.at_end = ends.append
    one.take(Choice(10))
    one.finish("error", RuntimeError())
    assert [delta.finish_reason for delta in said] == ["length"]
    assert ends == [one]


class Picky:
    """A tokenizer that does not know token 11."""

    def decode(self, ids: list[int], **_: Any) -> str:
        if 11 in ids:
            raise KeyError(11)
        return "x" * len(ids)


def test_a_tokenizer_that_fails_ends_its_answer_once() -> None:
    said: list[Delta] = []
    ends: list[Answering] = []
    one = Answering(request(3), None, said.append, Picky(), end_tokens=[])
    one.at_end = ends.append
    for token in (10, 11, 10):  # the last one was on its way when the one before was read
        one.accept(Choice(token))
    one.finish("cancelled")
    assert [(delta.text, delta.finish_reason) for delta in said] == [("x", None), ("", "error")]
    assert isinstance(said[-1].error, KeyError)
    assert ends == [one]


def test_what_may_end_is_known_before_its_text() -> None:
    def may_end(token: int, **sampling: Any) -> bool:
        one = answering([], **sampling)
        one.take(Choice(token))
        return one.may_end

    assert not may_end(10, max_tokens=2)
    assert may_end(10, max_tokens=1)
    assert may_end(10, max_tokens=2, stop=("x",))
    assert may_end(2, max_tokens=2, ignore_eos=False)
    assert not may_end(2, max_tokens=2, ignore_eos=True)


class Words:
    """Tokens of several letters, so that a stop string may begin inside of one."""

    texts = ("ab", "c", "de", "", "f")

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.texts[token] for token in ids)


@pytest.mark.parametrize(
    ("stop", "end", "text", "shown"),
    [
        ("never", "length", "abcdef", [[0], [1], [2], [], [3, 4]]),
        ("cd", "stop", "ab", [[0], [], []]),
        ("d", "stop", "abc", [[0], [1], []]),
        ("e", "stop", "abcd", [[0], [1], [2]]),
        ("be", "length", "abcdef", [[0], [1], [2], [], [3, 4]]),
        ("bcx", "length", "abcdef", [[0], [], [1, 2], [], [3, 4]]),
        ("def", "stop", "abc", [[0], [1], [], [], []]),
        ("defx", "length", "abcdef", [[0], [1], [], [], [2, 3, 4]]),
        ("ab", "stop", "", [[]]),
    ],
)
def test_logprobs_come_with_the_text_of_their_tokens(
    stop: str, end: str, text: str, shown: list[list[int]]
) -> None:
    said: list[Delta] = []
    asked = request(3, max_tokens=5, stop=(stop,), num_logprobs=0)
    one = Answering(asked, None, said.append, Words(), end_tokens=[])
    for token in range(len(shown)):
        one.accept(Choice(token, TokenLogprob(token, -1.0)))
    assert [[each.token for each in delta.logprobs] for delta in said] == shown
    answer = Answer.of(said)
    assert (answer.text, answer.finish_reason) == (text, end)
    assert answer.tokens == tuple(range(len(shown)))


def test_what_is_held_back_at_a_cancellation_has_no_logprobs() -> None:
    said: list[Delta] = []
    asked = request(3, max_tokens=5, stop=("cx",), num_logprobs=0)
    one = Answering(asked, None, said.append, Words(), end_tokens=[])
    for token in range(2):
        one.accept(Choice(token, TokenLogprob(token, -1.0)))
    one.finish("cancelled")
    answer = Answer.of(said)
    assert (answer.text, [each.token for each in answer.logprobs]) == ("ab", [0])


class Logged:
    """An engine whose decode steps are those of graphs, without any, and what it does in order.

    Attributes:
        log: "forward" and "decode" for the steps, and the names of those who are told a token.
        fails_at: number of the decode step that fails.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.log = engine, list[str]()
        self.fails_at: int | None = None
        batches = engine._loop._batches
        assert isinstance(batches, PackedBatches)
        batches._decode = DecodeGraphs(engine.lora, batches._forward.attention, 4)
        for kind, name in ((DecodeGraphs, "decode"), (PackedForward, "forward")):
            monkeypatch.setattr(kind, "__call__", self._logged(kind.__call__, name))

    def _logged(self, real: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            self.log.append(name)
            if name == "decode" and self.log.count("decode") == self.fails_at:
                raise RuntimeError("the device is gone")
            return real(*args)

        return call

    def ask(self, **requests: Request) -> dict[str, Answer]:
        """The answers to requests that are let in together."""
        listeners = {name: Listener() for name in requests}
        with self.engine.lora.turn():  # the engine waits for its turn
            for name, asked in requests.items():
                listeners[name].hold.set()
                self.engine.submit(asked, self._noting(name, listeners[name]))
        answers = {name: listener.answer() for name, listener in listeners.items()}
        wait_until(lambda: not self.engine._loop._running)
        return answers

    def _noting(self, name: str, listener: Listener) -> Callable[[Delta], None]:
        def note(delta: Delta) -> None:
            if delta.tokens:
                self.log.append(name)
            listener(delta)

        return note


@pytest.fixture
def logged(
    plain: nn.Module, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Logged]:
    lora = attach(copy.deepcopy(plain), max_loras=1, max_rank=8)
    settings: dict[str, Any] = {"max_running": 4, "cache_tokens": 512, "chunk": 64}
    with Engine(lora, TOKENIZER, **settings) as engine:
        yield Logged(engine, monkeypatch)


def test_tokens_are_said_while_the_device_is_at_the_next(logged: Logged) -> None:
    """All but those that may be the last: the next step must not have a row of an ended answer."""
    logged.ask(a=request(4, max_tokens=4), b=request(5, max_tokens=4, stop=("never",)))
    steps = ["b", "decode", "a"] * 3
    assert logged.log == ["forward", *steps, "a", "b"]


def test_nobody_waits_for_the_launches_of_a_prompt(logged: Logged) -> None:
    logged.ask(a=request(4, max_tokens=3), long=request(100, max_tokens=2))
    assert logged.log == ["forward", "a", "forward", "decode", "a", "long", "a", "long"]


def test_a_failing_step_loses_no_token(logged: Logged) -> None:
    whole = logged.ask(a=request(4, max_tokens=6))["a"]
    logged.log.clear()
    logged.fails_at = 3
    cut = logged.ask(a=request(4, max_tokens=6))["a"]
    assert str(cut.error) == "the device is gone"
    assert cut.tokens == whole.tokens[:3]
    assert logged.log == ["forward", *["decode", "a"] * 2, "decode", "a"]
    logged.fails_at = None
    assert logged.ask(a=request(4, max_tokens=6))["a"] == whole


def test_a_cancelled_answer_has_all_its_tokens(logged: Logged) -> None:
    whole = logged.ask(a=request(4, max_tokens=40))["a"]
    listener = Listener()
    ticket = logged.engine.submit(request(4, max_tokens=40), listener)
    assert listener.has_begun.wait(10)
    ticket.cancel()
    cut = listener.answer()
    assert cut.finish_reason == "cancelled"
    assert 1 <= len(cut.tokens) < 40
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    wait_until(lambda: not logged.engine._loop._running)
    stats = logged.engine.stats()
    assert stats.answer_tokens[None] == 40 + len(cut.tokens)
