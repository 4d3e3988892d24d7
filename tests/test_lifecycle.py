"""Names, generations, slots, pins, uses and host memory under any sequence of calls."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from lorafold.adapter import Adapter
from lorafold.errors import AdapterFormatError, AdapterNotFoundError
from lorafold.store import AdapterStore
from tests.adapter_folders import NAMES, NUM_VERSIONS, make_pool, read, write_versions
from tests.pool_model import PoolModel

ONE = 2 * (16 + 16 + 24 + 16)
"""Bytes of the factors of an adapter of rank 1."""


class Lifecycle(PoolModel):
    """A store and a pool against a plain model of both.

    The store's: per name its version; names in memory in the order of their use.
    """

    folders: dict[tuple[str, int], Path]
    truth: dict[tuple[str, int], Adapter]

    @initialize(max_loras=st.integers(1, 3), budget=st.integers(4, 12), pinned=st.booleans())
    def start(self, max_loras: int, budget: int, pinned: bool) -> None:
        self.follow(make_pool(max_loras=max_loras))
        self.budget = max(budget * ONE, self.pool.image_bytes)
        self.packed = self.pool.image_bytes if pinned else None
        self.store = AdapterStore(self.pool, budget_bytes=self.budget, pinned=pinned)
        self.version: dict[str, int] = {}
        self.memory: OrderedDict[str, int] = OrderedDict()
        self.num_reads = 0

    def adapter_of(self, held: tuple[str, int]) -> Adapter:
        return self.truth[held]

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

    @rule(name=st.sampled_from(NAMES), acquire=st.booleans())
    def place(self, name: str, acquire: bool) -> None:
        adapter = self.get(name)
        if adapter is not None:
            self.place_as_expected(adapter, (name, self.version[name]), acquire=acquire)

    @invariant()
    def the_store_is_as_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert sorted(self.store.names()) == sorted(self.version)
        assert self.store.in_memory() == tuple(self.memory)
        assert self.store.nbytes == sum(self.memory.values()) <= self.budget
        assert self.store.num_reads == self.num_reads


def test_store_and_pool_do_what_a_plain_model_of_them_does(tmp_path: Path) -> None:
    Lifecycle.folders = write_versions(tmp_path)
    Lifecycle.truth = {
        key: read(key[0], folder) for key, folder in Lifecycle.folders.items() if key[1] != 0
    }
    run_state_machine_as_test(
        Lifecycle, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )
