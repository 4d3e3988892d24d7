"""Adapters are placed by a thread of their own, while other requests run."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from lorafold.adapter import Adapter
from lorafold.engine import Engine, Request
from lorafold.engine.placing import SlotHolder
from lorafold.engine.shelf import Loaded, Shelf
from lorafold.engine.tally import Tally
from lorafold.errors import BackendError, PoolFullError, RouteError
from lorafold.pool import Pool
from lorafold.runtime import MultiLora, attach
from tests.engine.asking import TOKENIZER, Listener, request, wait_until


@pytest.fixture
def lora(plain: nn.Module) -> MultiLora:
    return attach(copy.deepcopy(plain), max_loras=2, max_rank=8)


@pytest.fixture
def shelf(lora: MultiLora, folders: list[Path]) -> Shelf:
    shelf = Shelf(lora)
    for at in range(4):
        shelf.load(f"a{at}", folders[at])
    return shelf


@pytest.fixture
def holder(lora: MultiLora, shelf: Shelf) -> Iterator[SlotHolder]:
    holder = SlotHolder(lora.pool, shelf, Tally(), lambda: None)
    yield holder
    holder.close()


def held(holder: SlotHolder, loaded: Loaded) -> int:
    """Ask until the adapter has come."""
    slots = []

    def is_held() -> bool:
        slots.append(holder.hold(loaded))
        return slots[-1] is not None

    wait_until(is_held)
    return slots[-1]


def test_an_adapter_comes_when_it_is_asked_for_and_stays_held(
    holder: SlotHolder, shelf: Shelf, lora: MultiLora
) -> None:
    first, second, third, _ = shelf.all()
    assert holder.hold(first) is None
    slot = held(holder, first)
    assert held(holder, first) == slot  # a second user
    assert held(holder, second) != slot
    for _ in range(3):
        assert holder.hold(third) is None
    assert not holder.is_placing  # as both slots are held
    holder.let_go(first, slot)
    assert holder.hold(third) is None
    assert not holder.is_placing
    holder.let_go(first, slot)
    assert held(holder, third) == slot
    assert set(lora.names()) == {second.key, third.key}


def test_what_came_and_is_not_fetched_blocks_nobody(holder: SlotHolder, shelf: Shelf) -> None:
    first, second, third, fourth = shelf.all()
    for loaded in (first, second):
        assert holder.hold(loaded) is None
    wait_until(lambda: not holder.is_placing)
    assert held(holder, third) in (0, 1)
    assert held(holder, fourth) in (0, 1)
    holder.forget_unwanted([])
    assert holder.hold(first) is None


def test_slots_of_others_are_waited_for_only_if_one_is_held(
    holder: SlotHolder, shelf: Shelf, lora: MultiLora, folders: list[Path]
) -> None:
    first, second, third, _ = shelf.all()
    slot = held(holder, first)
    lora.load("mine", folders[1])
    lora.pool.pin("mine")
    assert holder.hold(second) is None
    wait_until(lambda: not holder.is_placing)
    for _ in range(3):
        assert holder.hold(second) is None
        assert not holder.is_placing
    holder.let_go(first, slot)
    assert held(holder, second) == slot
    holder.let_go(second, slot)
    held(holder, first)
    lora.pool.pin(first.key)
    holder.let_go(first, slot)
    with pytest.raises(PoolFullError):
        held(holder, third)


def test_slots_that_were_held_for_a_while_are_no_reason_to_give_up(
    holder: SlotHolder, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third, _ = shelf.all()
    may_place, real = threading.Event(), Pool.place

    def slow(pool: Pool, adapter: Adapter) -> int:
        assert adapter.name != third.key or may_place.wait(30)
        return real(pool, adapter)

    monkeypatch.setattr(Pool, "place", slow)
    slots = {first: held(holder, first)}
    assert holder.hold(second) is None
    wait_until(lambda: not holder.is_placing)
    assert holder.hold(third) is None  # as nobody holds the second yet
    slots[second] = held(holder, second)
    may_place.set()
    wait_until(lambda: not holder.is_placing)  # and has found no slot
    for loaded, slot in slots.items():
        holder.let_go(loaded, slot)
    assert held(holder, third) in slots.values()


def test_an_adapter_that_cannot_be_placed_says_why_and_may_be_asked_for_again(
    holder: SlotHolder, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shelf.all()[0]

    def fail(pool: Pool, adapter: Adapter) -> int:
        raise BackendError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "place", fail)
        with pytest.raises(BackendError, match="no memory"):
            held(holder, first)
    assert held(holder, first) == 0


def test_requests_run_on_while_an_adapter_is_on_its_way(
    lora: MultiLora, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive, real = threading.Event(), Pool.place

    def slow(pool: Pool, adapter: Adapter) -> int:
        assert arrive.wait(30)
        return real(pool, adapter)

    monkeypatch.setattr(Pool, "place", slow)
    with Engine(lora, TOKENIZER, cache_tokens=512) as engine:
        engine.load("a0", folders[0])
        listener = Listener()
        listener.hold.set()
        engine.submit(request(5, "a0"), listener)
        assert engine.answer([request(5), request(9)])[1].finish_reason == "length"
        assert listener.deltas.empty()
        # One that is cancelled meanwhile leaves nothing behind.
        ticket = engine.submit(request(6, "a0"), lambda delta: None)
        ticket.cancel()
        wait_until(lambda: engine.stats().finished["a0", "cancelled"] == 1)
        arrive.set()
        assert listener.answer().finish_reason == "length"
        engine.unload("a0")
        wait_until(lambda: engine.lora.names() == ())


def test_what_was_unloaded_on_its_way_does_not_stay(
    lora: MultiLora, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, arrive, real = threading.Event(), threading.Event(), Pool.place

    def slow(pool: Pool, adapter: Adapter) -> int:
        begun.set()
        assert arrive.wait(30)
        return real(pool, adapter)

    monkeypatch.setattr(Pool, "place", slow)
    with Engine(lora, TOKENIZER, cache_tokens=512) as engine:
        engine.load("a0", folders[0])
        ticket = engine.submit(request(5, "a0"), lambda delta: None)
        assert begun.wait(30)
        engine.unload("a0")
        ticket.cancel()
        wait_until(lambda: not engine.stats().waiting["a0"])
        arrive.set()
        wait_until(lambda: engine.stats().num_places == 1)
        wait_until(lambda: engine.lora.names() == ())
        assert engine.stats().slots == ()


def test_host_memory_may_be_limited_and_adapters_are_read_again(
    lora: MultiLora, folders: list[Path]
) -> None:
    with pytest.raises(RouteError, match="budget of host memory must be at least 1"):
        Engine(lora, TOKENIZER, host_bytes=0)
    sizes = [lora.read("a", folder).nbytes for folder in folders]
    with Engine(lora, TOKENIZER, cache_tokens=512, host_bytes=max(sizes)) as engine:
        for at in range(6):
            engine.load(f"a{at}", folders[at])
        asked = [request(5, f"a{at}") for at in range(6)]
        first = [engine.answer([each])[0] for each in asked]
        assert engine.answer(asked) == first
        assert len({answer.tokens for answer in first}) > 4
        assert engine.stats().num_loads == 6
        engine.unload("a0")
        assert engine.answer([Request([5], "a1")])[0].finish_reason is not None
