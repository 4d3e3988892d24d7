"""The engine: answers among others equal answers alone, and nothing is held, mixed up or lost."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lorafold.engine import (
    Answer,
    Delta,
    Engine,
    EngineClosedError,
    QueueFullError,
    Request,
    RequestError,
    Sampling,
)
from lorafold.engine.packed import PackedForward
from lorafold.errors import AdapterMismatchError, AdapterNotFoundError, PoolFullError
from lorafold.runtime import attach
from tests.engine.asking import TOKENIZER, Listener, request, wait_until
from tests.tiny_models import random_ids, write_adapter

Make = Callable[..., Engine]


@pytest.fixture
def make_engine(plain: nn.Module, folders: list[Path]) -> Iterator[Make]:
    """Engines over copies of the plain model, with adapters a0, a1, ...; closed at the end."""
    engines: list[Engine] = []

    def make(num_adapters: int = 3, *, max_loras: int = 3, **settings: Any) -> Engine:
        lora = attach(copy.deepcopy(plain), max_loras=max_loras, max_rank=8)
        defaults = {"max_running": 8, "cache_tokens": 1024, "chunk": 8}
        engine = Engine(lora, TOKENIZER, **(defaults | settings))
        for at in range(num_adapters):
            engine.load(f"a{at}", folders[at])
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close(timeout_s=0)


def held_slots(engine: Engine) -> list[int]:
    """Slots in use, by trying to fill the pool: what is idle gives way, what is held does not."""
    return [slot.num_uses for slot in engine.lora.pool._ledger._slots if slot is not None]


@pytest.mark.usefixtures("exact_base")
def test_each_answer_among_others_equals_it_alone_in_bits(make_engine: Make) -> None:
    engine = make_engine()
    assert engine.is_packed
    requests = [
        request(length, adapter, prompt=length, num_logprobs=3, **how)
        for length, adapter, how in (
            (5, "a0", {}),
            (21, "a1", {"temperature": 1.5, "seed": 4}),
            (9, None, {"max_tokens": 15}),
            (17, "a2", {"max_tokens": 2}),
            (5, "a1", {"temperature": 0.9, "top_p": 0.5, "seed": 1}),
            (1, "a0", {"max_tokens": 12}),
            (30, None, {"temperature": 1.0, "seed": 4}),
        )
    ]
    together = engine.answer(requests)
    for asked, among in zip(requests, together, strict=True):
        (alone,) = engine.answer([asked])
        assert alone == among
        assert len(among.tokens) == len(among.logprobs) == asked.sampling.max_tokens
        assert among.finish_reason == "length"
    assert together[0].tokens != engine.answer([request(5, "a1", prompt=5)])[0].tokens


@pytest.mark.usefixtures("exact_base")
def test_a_prompt_in_common_is_never_shared_between_adapters(make_engine: Make) -> None:
    """Keys and values depend on the adapter: reused under another, they would spoil its answer."""
    engine = make_engine(2)
    prompt = random_ids(60, seed=9).tolist()
    sampling = Sampling(max_tokens=8, ignore_eos=True, num_logprobs=1)
    requests = [Request(prompt, name, sampling) for name in ("a0", "a1", None)]
    fresh = [make_engine(2).answer([asked])[0] for asked in requests]
    for _ in range(2):  # the second time, all of them have been computed before
        assert engine.answer(requests) == fresh
        assert [engine.answer([asked])[0] for asked in reversed(requests)] == fresh[::-1]
    assert len({answer.logprobs[0].logprob for answer in fresh}) == 3


def test_greedy_answers_are_those_of_generate(make_engine: Make, folders: list[Path]) -> None:
    engine = make_engine(1)
    asked = request(9, "a0", max_tokens=6)
    engine.lora.load("same", folders[0])
    expected = engine.lora.generate(
        torch.tensor([asked.prompt]), adapters=["same"], max_new_tokens=6, min_new_tokens=6
    )
    assert list(engine.answer([asked])[0].tokens) == expected[0, 9:].tolist()


def test_deltas_add_up_and_come_one_by_one(make_engine: Make) -> None:
    engine = make_engine(1)
    deltas = list(engine.stream(request(5, "a0", max_tokens=7)))
    assert [len(delta.tokens) for delta in deltas] == [1] * 7
    assert [delta.finish_reason for delta in deltas] == [None] * 6 + ["length"]
    whole = engine.answer([request(5, "a0", max_tokens=7)])[0]
    assert Answer.of(deltas) == whole
    assert whole.text == TOKENIZER.decode(list(whole.tokens), skip_special_tokens=True)


def test_a_stop_string_ends_an_answer_before_it(make_engine: Make) -> None:
    engine = make_engine(1)
    whole = engine.answer([request(5, "a0", max_tokens=12)])[0]
    stop = whole.text[4:6]
    cut = engine.answer([request(5, "a0", max_tokens=12, stop=(stop,))])[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert len(cut.tokens) < 12


def test_an_end_token_ends_an_answer_unless_it_is_ignored(make_engine: Make) -> None:
    engine = make_engine(1)
    whole = engine.answer([request(5, "a0", max_tokens=12)])[0]
    engine.lora.model.generation_config.eos_token_id = [whole.tokens[3]]  # type: ignore[union-attr]
    other = Engine(engine.lora, TOKENIZER, cache_tokens=256)
    try:
        other.load("a0", engine.adapters()[0].path)
        short = other.answer([request(5, "a0", max_tokens=12, ignore_eos=False)])[0]
        assert (short.tokens, short.finish_reason) == (whole.tokens[:4], "stop")
        assert short.text == TOKENIZER.decode(list(whole.tokens[:3]))
        assert other.answer([request(5, "a0", max_tokens=12)])[0] == whole
    finally:
        other.close()


def test_a_seed_repeats_an_answer_and_none_does_not(make_engine: Make) -> None:
    engine = make_engine(1)

    def drawn(seed: int | None) -> tuple[int, ...]:
        asked = Request([5, 6], "a0", Sampling(max_tokens=12, temperature=2.0, seed=seed))
        return engine.answer([asked])[0].tokens

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)


def test_cancelling_ends_an_answer_and_frees_all_it_held(make_engine: Make) -> None:
    engine = make_engine(1, cache_tokens=128)
    running, waiting = Listener(), Listener()
    waiting.hold.set()
    first = engine.submit(request(5, "a0", max_tokens=100), running)
    assert running.has_begun.wait(30)
    second = engine.submit(request(5, "a0", max_tokens=100), waiting)  # no room in the cache
    second.cancel()
    first.cancel()
    assert running.answer().finish_reason == "cancelled"
    assert waiting.answer() == Answer("", (), (), "cancelled")
    wait_until(lambda: held_slots(engine) == [0])
    assert engine.answer([request(5, "a0", max_tokens=100)])[0].finish_reason == "length"
    first.cancel()
    stats = engine.stats()
    assert stats.finished["a0", "cancelled"] == 2
    assert stats.waiting["a0"] == 0


def test_leaving_a_stream_cancels_it(make_engine: Make) -> None:
    engine = make_engine(1)
    stream = engine.stream(request(5, "a0", max_tokens=110))
    next(stream)
    stream.close()
    engine.stream(request(5, "a0", max_tokens=110)).close()  # before its first delta
    wait_until(lambda: engine.stats().finished["a0", "cancelled"] == 2)


def test_a_request_keeps_its_slot_and_its_loading_to_the_end(
    make_engine: Make, folders: list[Path]
) -> None:
    engine = make_engine(2, max_loras=2)
    expected = engine.answer([request(5, "a0", max_tokens=20)])[0]
    replaced = engine.answer([request(5, "a1", max_tokens=20)])[0]
    listener = Listener()
    engine.submit(request(5, "a0", max_tokens=20), listener)
    assert listener.has_begun.wait(30)
    engine.load("a0", folders[1])  # the name now stands for something else
    engine.unload("a1")
    assert [loaded.name for loaded in engine.adapters()] == ["a0"]
    assert listener.answer() == expected
    assert engine.answer([request(5, "a0", max_tokens=20)])[0] == replaced
    engine.unload("a0")
    wait_until(lambda: engine.lora.names() == ())
    with pytest.raises(AdapterNotFoundError, match="no adapter `a0` is loaded; loaded are: none"):
        engine.submit(request(5, "a0"), listener)


def test_a_waiting_request_runs_with_what_it_was_accepted_with(
    make_engine: Make, folders: list[Path]
) -> None:
    engine = make_engine(2, max_running=1)
    expected = engine.answer([request(5, "a1", max_tokens=6)])[0]
    running, waiting = Listener(), Listener()
    waiting.hold.set()
    engine.submit(request(5, "a0"), running)
    assert running.has_begun.wait(30)
    engine.submit(request(5, "a1", max_tokens=6), waiting)
    engine.unload("a1")
    running.answer()
    assert waiting.answer() == expected
    wait_until(lambda: "a1" not in {name for _, name in engine.stats().slots})


@pytest.mark.usefixtures("exact_base")
def test_more_adapters_than_slots_take_turns(make_engine: Make) -> None:
    engine = make_engine(6, max_loras=2)
    requests = [request(4 + at, f"a{at % 6}", max_tokens=5) for at in range(24)]
    answers = engine.answer(requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert engine.answer([asked])[0] == answer
    stats = engine.stats()
    assert stats.num_evictions > 0
    assert stats.num_places == stats.num_evictions + 2
    assert sum(stats.finished.values()) == 48
    assert stats.answer_tokens["a3"] == 2 * 4 * 5


def test_a_favourite_does_not_starve_an_adapter_without_a_slot(make_engine: Make) -> None:
    engine = make_engine(2, max_loras=1, max_running=2)
    stop, turns = threading.Event(), Listener()
    turns.hold.set()

    def again(delta: Delta) -> None:
        if delta.finish_reason is not None and not stop.is_set():
            engine.submit(request(5, "a0", max_tokens=3), again)

    # Two requests of the favourite are always there, so its adapter is never idle by itself.
    for max_tokens in (2, 3):
        engine.submit(request(5, "a0", max_tokens=max_tokens), again)
    wait_until(lambda: engine.stats().answer_tokens["a0"] > 6)
    engine.submit(request(5, "a1", max_tokens=3), turns)
    assert turns.answer().finish_reason == "length"
    stop.set()


def test_pinned_slots_are_an_error_and_not_an_endless_wait(
    make_engine: Make, folders: list[Path]
) -> None:
    engine = make_engine(1, max_loras=1)
    engine.lora.load("mine", folders[1])
    engine.lora.pool.pin("mine")
    answer = engine.answer([request(5, "a0")])[0]
    assert isinstance(answer.error, PoolFullError)
    engine.lora.pool.unpin("mine")
    assert engine.answer([request(5, "a0")])[0].finish_reason == "length"


def test_requests_that_cannot_run_are_refused_at_once(make_engine: Make) -> None:
    engine = make_engine(1, max_length=64)
    for wrong, message in (
        (request(60, max_tokens=5), "64 tokens together; given: 60 and max_tokens 5"),
        (Request([96]), r"tokens must be 0 .. 95; given: 96 .. 96"),
        (Request([-1]), r"tokens must be 0 .. 95; given: -1 .. -1"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.answer([wrong])
    with pytest.raises(AdapterNotFoundError, match="no adapter `nobody` is loaded"):
        engine.answer([request(5, "a0"), request(5, "nobody")])
    wait_until(lambda: engine.stats().finished["a0", "cancelled"] == 1)
    assert set(engine.stats().waiting.items()) == {("a0", 0)}
    with pytest.raises(RequestError, match="at least one token"):
        Request([])


def test_a_full_queue_refuses(make_engine: Make) -> None:
    engine = make_engine(1, max_running=1, max_waiting=2)
    listeners = [Listener() for _ in range(3)]
    engine.submit(request(5), listeners[0])
    assert listeners[0].has_begun.wait(30)
    for listener in listeners[1:]:
        engine.submit(request(5), listener)
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.submit(request(5), listeners[0])
    assert [listener.answer().finish_reason for listener in listeners] == ["length"] * 3


def test_loading_checks_all_and_changes_nothing_when_it_fails(
    make_engine: Make, plain: nn.Module, tmp_path: Path
) -> None:
    engine = make_engine(1)
    large = write_adapter(plain, tmp_path / "large", ["q_proj"], rank=9)
    with pytest.raises(AdapterMismatchError, match="rank 9"):
        engine.load("a0", large)
    assert [loaded.name for loaded in engine.adapters()] == ["a0"]
    assert engine.adapters()[0].report.num_tensors > 0
    with pytest.raises(AdapterNotFoundError):
        engine.unload("a7")


def test_a_failing_step_fails_its_requests_and_no_others(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(2)
    real, has_failed = PackedForward.__call__, []

    def once(self: PackedForward, pieces: Any) -> Any:
        if not has_failed and len(pieces) == 2:
            has_failed.append(True)
            raise RuntimeError("out of memory")
        return real(self, pieces)

    monkeypatch.setattr(PackedForward, "__call__", once)
    answers = engine.answer([request(5, "a0"), request(5, "a1")])
    assert {str(answer.error) for answer in answers} == {"out of memory"}
    assert engine.answer([request(5, "a0")])[0].finish_reason == "length"
    wait_until(lambda: held_slots(engine) == [0, 0])
    assert "a step of the engine failed" in caplog.text


def test_a_listener_that_fails_ends_its_own_request_only(
    make_engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(1)

    def broken(delta: Delta) -> None:
        raise OSError("gone")

    engine.submit(request(5, "a0", max_tokens=100), broken)
    assert engine.answer([request(5, "a0")])[0].finish_reason == "length"
    wait_until(lambda: engine.stats().finished["a0", "cancelled"] == 1)
    assert "could not be delivered" in caplog.text


def test_closing_finishes_what_was_accepted(make_engine: Make) -> None:
    engine = make_engine(1, max_running=1)
    listeners = [Listener() for _ in range(3)]
    for listener in listeners:
        listener.hold.set()
        engine.submit(request(5, "a0", max_tokens=20), listener)
    engine.close()
    assert [listener.answer().finish_reason for listener in listeners] == ["length"] * 3
    assert not engine.is_open
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.submit(request(5), listeners[0])
    engine.close()


def test_closing_with_a_limit_cancels_the_rest(make_engine: Make) -> None:
    engine = make_engine(1, max_running=1)
    listeners = [Listener() for _ in range(2)]
    for listener in listeners:
        engine.submit(request(5, "a0", max_tokens=110), listener)
    assert listeners[0].has_begun.wait(30)
    threading.Timer(0.2, lambda: [each.hold.set() for each in listeners]).start()
    engine.close(timeout_s=0)
    assert [listener.answer().finish_reason for listener in listeners] == ["cancelled"] * 2


def test_between_requests_the_model_is_free_for_others(make_engine: Make) -> None:
    engine = make_engine(1)
    engine.answer([request(5)])
    ids = torch.tensor([[5, 6, 7]])
    assert engine.lora.generate(ids, adapters=[None], max_new_tokens=2).shape == (1, 5)


@pytest.mark.parametrize(
    "wrong",
    [{"max_running": 0}, {"max_waiting": 0}, {"max_length": 0}, {"cache_tokens": 0}, {"chunk": 0}],
    ids=str,
)
def test_numbers_below_one_are_refused(make_engine: Make, wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="must be at least 1; given: 0"):
        make_engine(0, **wrong)


def test_a_model_that_could_be_packed_can_be_served_statically(make_engine: Make) -> None:
    engine = make_engine(1, batching="static")
    assert not engine.is_packed
    assert engine.answer([request(6, "a0")])[0] == make_engine(1).answer([request(6, "a0")])[0]
