"""Names, generations, slots, pins, uses and host memory under any sequence of calls."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

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
from lorafold.errors import AdapterFormatError, AdapterNotFoundError, PoolFullError, RouteError
from lorafold.store import AdapterStore
from tests.adapter_folders import NAMES, NUM_VERSIONS, make_pool, read, write_versions
from tests.pool_contents import addresses, assert_empty, assert_holds

ONE = 2 * (16 + 16 + 24 + 16)
"""Bytes of the factors of an adapter of rank 1."""


class Lifecycle(RuleBasedStateMachine):
    """A store and a pool against a plain model of both.

    The model: per name its version; names in memory in the order of their use; per slot what it
    holds, its users and its age; per name its slot and its pin.
    """

    folders: dict[tuple[str, int], Path]
    truth: dict[tuple[str, int], Adapter]

    @initialize(max_loras=st.integers(1, 3), budget=st.integers(4, 12), pinned=st.booleans())
    def start(self, max_loras: int, budget: int, pinned: bool) -> None:
        self.pool = make_pool(max_loras=max_loras)
        self.budget = max(budget * ONE, self.pool.image_bytes)
        self.packed = self.pool.image_bytes if pinned else None
        self.store = AdapterStore(self.pool, budget_bytes=self.budget, pinned=pinned)
        self.addresses = addresses(self.pool)
        self.version: dict[str, int] = {}
        self.memory: OrderedDict[str, int] = OrderedDict()
        self.num_reads = 0
        self.held: dict[int, tuple[str, int]] = {}
        self.users = dict.fromkeys(range(max_loras), 0)
        self.age: dict[int, int] = {}
        self.slot: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.generation: dict[int, int] = {}
        self.clock = 0

    def touch(self, slot: int) -> None:
        self.clock += 1
        self.age[slot] = self.clock

    def size(self, name: str) -> int:
        return self.packed or self.truth[name, self.version[name]].nbytes

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, NUM_VERSIONS - 1))
    def register(self, name: str, version: int) -> None:
        self.store.register(name, self.folders[name, version])
        self.version[name] = version
        self.memory.pop(name, None)

    @rule(name=st.sampled_from(NAMES))
    def unregister(self, name: str) -> None:
        if name not in self.version:
            with pytest.raises(AdapterNotFoundError):
                self.store.unregister(name)
            return
        self.store.unregister(name)
        del self.version[name]
        self.memory.pop(name, None)

    def get(self, name: str) -> Adapter | None:
        """Ask both for an adapter; None where both refuse."""
        if name not in self.version:
            with pytest.raises(AdapterNotFoundError):
                self.store.get(name)
            return None
        if name not in self.memory:
            self.num_reads += 1
        if self.version[name] == 0:
            with pytest.raises(AdapterFormatError):
                self.store.get(name)
            return None
        if name not in self.memory:
            while sum(self.memory.values()) + self.size(name) > self.budget:
                self.memory.popitem(last=False)
            self.memory[name] = self.size(name)
        self.memory.move_to_end(name)
        return self.store.get(name)

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
        slot = self.slot.pop(name)
        if not self.users[slot]:
            del self.held[slot]

    @rule(name=st.sampled_from(NAMES), acquire=st.booleans())
    def place(self, name: str, acquire: bool) -> None:
        adapter = self.get(name)
        if adapter is None:
            return
        expected = self.expected_slot(name)
        if expected is None:
            with pytest.raises(PoolFullError):
                self.pool.place(adapter, acquire=acquire)
            return
        assert self.pool.place(adapter, acquire=acquire) == expected
        for other in [n for n, s in self.slot.items() if n == name or s == expected]:
            self.forget(other)
            if other != name:
                self.pinned.discard(other)
        self.held[expected], self.slot[name] = (name, self.version[name]), expected
        self.touch(expected)
        if acquire:
            self.users[expected] += 1
            self.touch(expected)
        generation = self.pool.generation(name)
        assert generation > max(self.generation.values(), default=0)
        self.generation[expected] = generation

    @rule(name=st.sampled_from(NAMES))
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

    @rule(name=st.sampled_from(NAMES), call=st.sampled_from(["evict", "pin", "unpin"]))
    def change(self, name: str, call: str) -> None:
        if name not in self.slot:
            with pytest.raises(AdapterNotFoundError):
                getattr(self.pool, call)(name)
            return
        getattr(self.pool, call)(name)
        if call == "evict":
            self.forget(name)
        (self.pinned.add if call == "pin" else self.pinned.discard)(name)

    @invariant()
    def both_are_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert addresses(self.pool) == self.addresses
        assert self.pool.names() == tuple(sorted(self.slot, key=self.slot.__getitem__))
        assert sorted(self.store.names()) == sorted(self.version)
        assert self.store.in_memory() == tuple(self.memory)
        assert self.store.nbytes == sum(self.memory.values()) <= self.budget
        assert self.store.num_reads == self.num_reads
        for slot in self.users:
            if slot in self.held:
                assert_holds(self.pool, slot, self.truth[self.held[slot]])
                assert self.pool.generation_in(slot) == self.generation[slot]
            else:
                assert_empty(self.pool, slot)
                with pytest.raises(RouteError, match="holds no adapter"):
                    self.pool.generation_in(slot)


def test_store_and_pool_do_what_a_plain_model_of_them_does(tmp_path: Path) -> None:
    Lifecycle.folders = write_versions(tmp_path)
    Lifecycle.truth = {
        key: read(key[0], folder) for key, folder in Lifecycle.folders.items() if key[1] != 0
    }
    run_state_machine_as_test(
        Lifecycle, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )
