"""A plain model of a pool, which the pool follows under any sequence of calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lorafold.adapter import Adapter
from lorafold.errors import AdapterNotFoundError, PoolFullError, RouteError
from lorafold.pool import Pool
from tests.pool_contents import addresses, assert_empty, assert_holds

ANY_NAME = st.sampled_from(["a", "b", "c", "d", "e"])


class PoolModel(RuleBasedStateMachine):
    """Per slot what it holds, its users, its age and its generation; per name its slot and pin.

    What a slot holds is a word of the subclass, of which `adapter_of` makes the adapter.
    """

    def follow(self, pool: Pool) -> None:
        """Begin with an empty pool."""
        self.pool = pool
        self.addresses = addresses(pool)
        self.held: dict[int, Any] = {}
        self.users = dict.fromkeys(range(pool.max_loras), 0)
        self.age: dict[int, int] = {}
        self.slot: dict[str, int] = {}
        self.pinned: set[str] = set()
        self.generation: dict[int, int] = {}
        self.clock = 0

    def adapter_of(self, held: Any) -> Adapter:
        raise NotImplementedError

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

    def place_as_expected(self, adapter: Adapter, held: Any, *, acquire: bool) -> None:
        name, expected = adapter.name, self.expected_slot(adapter.name)
        if expected is None:
            with pytest.raises(PoolFullError):
                self.pool.place(adapter, acquire=acquire)
            return
        assert self.pool.place(adapter, acquire=acquire) == expected
        for other in [n for n, s in self.slot.items() if n == name or s == expected]:
            self.forget(other)
            if other != name:
                self.pinned.discard(other)
        self.held[expected], self.slot[name] = held, expected
        self.touch(expected)
        if acquire:
            self.users[expected] += 1
            self.touch(expected)
        generation = self.pool.generation(name)
        assert generation > max(self.generation.values(), default=0)
        self.generation[expected] = generation

    @rule(name=ANY_NAME)
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

    @rule(name=ANY_NAME, call=st.sampled_from(["evict", "pin", "unpin"]))
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
    def the_pool_is_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert addresses(self.pool) == self.addresses
        assert self.pool.names() == tuple(sorted(self.slot, key=self.slot.__getitem__))
        for slot in self.users:
            if slot in self.held:
                assert_holds(self.pool, slot, self.adapter_of(self.held[slot]))
                assert self.pool.generation_in(slot) == self.generation[slot]
            else:
                assert_empty(self.pool, slot)
                with pytest.raises(RouteError, match="holds no adapter"):
                    self.pool.generation_in(slot)
