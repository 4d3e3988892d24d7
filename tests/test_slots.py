"""Slots under any sequence of calls: the pool does what a plain model of it does."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lorafold.adapter import Adapter
from lorafold.errors import AdapterNotFoundError, PoolFullError, RouteError
from lorafold.pool import Pool
from lorafold.slots import SlotLedger
from tests.pool_contents import SHAPES, addresses, assert_empty, assert_holds, make_adapter

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model: per slot the adapter, its users and age; per name slot and pin."""

    @initialize(max_loras=st.integers(1, 4), max_rank=st.sampled_from([3, 4, 12]))
    def start(self, max_loras: int, max_rank: int) -> None:
        self.pool = Pool(SHAPES, max_loras=max_loras, max_rank=max_rank)
        self.addresses = addresses(self.pool)
        self.held: dict[int, Adapter] = {}
        self.users = dict.fromkeys(range(max_loras), 0)
        self.age: dict[int, int] = {}
        self.slot: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.generations: list[int] = []
        self.clock = 0

    def touch(self, slot: int) -> None:
        self.clock += 1
        self.age[slot] = self.clock

    def expected_slot(self, name: str) -> int | None:
        own = self.slot.get(name)
        if own is not None and not self.users[own]:
            return own
        empty = [slot for slot in self.users if slot not in self.held]
        if empty:
            return empty[0]
        idle = [s for n, s in self.slot.items() if not self.users[s] and n not in self.pinned]
        return min(idle, key=self.age.__getitem__) if idle else None

    def forget(self, name: str) -> None:
        """Take a name away, and its adapter unless somebody uses it."""
        slot = self.slot.pop(name)
        if not self.users[slot]:
            del self.held[slot]

    @rule(
        name=NAMES,
        ranks=st.dictionaries(st.sampled_from(sorted(SHAPES)), st.integers(1, 3), min_size=1),
        seed=st.integers(0, 50),
    )
    def place(self, name: str, ranks: dict[str, int], seed: int) -> None:
        adapter, expected = make_adapter(name, ranks, seed=seed), self.expected_slot(name)
        if expected is None:
            with pytest.raises(PoolFullError):
                self.pool.place(adapter)
            return
        assert self.pool.place(adapter) == expected
        for other in [n for n, s in self.slot.items() if n == name or s == expected]:
            self.forget(other)
            if other != name:
                self.pinned.discard(other)
        self.held[expected], self.slot[name] = adapter, expected
        self.touch(expected)
        self.generations.append(self.pool.generation(name))

    @rule(name=NAMES)
    def evict(self, name: str) -> None:
        if name not in self.slot:
            with pytest.raises(AdapterNotFoundError):
                self.pool.evict(name)
            return
        self.pool.evict(name)
        self.forget(name)
        self.pinned.discard(name)

    @rule(name=NAMES)
    def acquire(self, name: str) -> None:
        if name not in self.slot:
            with pytest.raises(AdapterNotFoundError):
                self.pool.acquire(name)
            return
        assert self.pool.acquire(name) == self.slot[name]
        self.users[self.slot[name]] += 1
        self.touch(self.slot[name])

    @precondition(lambda self: any(self.users.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([slot for slot, users in self.users.items() if users]))
        self.pool.release(slot)
        self.users[slot] -= 1
        if not self.users[slot] and slot not in self.slot.values():
            del self.held[slot]

    @rule(slot=st.integers(-1, 5))
    def release_too_often(self, slot: int) -> None:
        if not self.users.get(slot):
            with pytest.raises(RouteError):
                self.pool.release(slot)

    @rule(name=NAMES, is_pinned=st.booleans())
    def pin(self, name: str, is_pinned: bool) -> None:
        change = self.pool.pin if is_pinned else self.pool.unpin
        if name not in self.slot:
            with pytest.raises(AdapterNotFoundError):
                change(name)
            return
        change(name)
        (self.pinned.add if is_pinned else self.pinned.discard)(name)

    @invariant()
    def pool_is_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert addresses(self.pool) == self.addresses
        assert self.pool.names() == tuple(sorted(self.slot, key=self.slot.__getitem__))
        assert self.generations == sorted(set(self.generations))
        for slot in self.users:
            if slot in self.held:
                assert_holds(self.pool, slot, self.held[slot])
            else:
                assert_empty(self.pool, slot)


def test_the_pool_does_what_a_plain_model_of_it_does() -> None:
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


def test_a_ledger_without_tensors_follows_the_same_rules() -> None:
    ledger = SlotLedger(2)
    for name in "ab":
        assert ledger.occupy(ledger.begin(name)) is None
    assert ledger.acquire("a") == 0
    assert ledger.begin("c") == 1
    assert ledger.names() == ("a",)
    ledger.vacate(1)
    assert ledger.begin("a") == 1
    assert ledger.slot("a") == 0  # until the new one is there
    assert ledger.occupy(1) is None
    assert (ledger.names(), ledger.slot("a")) == (("a",), 1)
    assert ledger.release(0) == 0
    with pytest.raises(RouteError):
        ledger.release(0)


def test_a_slot_that_is_being_written_is_nobodys() -> None:
    ledger = SlotLedger(2)
    ledger.occupy(ledger.begin("a"))
    ledger.pin("a", is_pinned=True)
    assert ledger.begin("a") == 0
    assert ledger.is_arriving("a")
    assert not ledger.is_arriving("b")
    with pytest.raises(AdapterNotFoundError):
        ledger.acquire("a")
    with pytest.raises(RouteError, match="slot 0 holds no adapter"):
        ledger.generation_in(0)
    with pytest.raises(RouteError, match="not in use"):
        ledger.release(0)
    assert ledger.begin("b") == 1
    with pytest.raises(PoolFullError):
        ledger.begin("c")
    for index in (0, 1):
        assert ledger.occupy(index) is None
    assert ledger.generation_in(1) > ledger.generation_in(0) > 1
    # The pin of the name has stayed.
    assert ledger.begin("c") == 1


def test_a_name_that_is_written_again_is_the_old_one_until_then() -> None:
    ledger = SlotLedger(2)
    ledger.occupy(ledger.begin("a"))
    assert ledger.acquire("a") == 0
    index = ledger.begin("a")
    assert (index, ledger.acquire("a")) == (1, 0)
    assert not ledger.is_arriving("a")
    ledger.release(0)
    ledger.release(0)
    # Its last user has gone before the new one is there: somebody must empty the slot.
    assert ledger.occupy(index) == 0
    assert ledger.slot("a") == 1
