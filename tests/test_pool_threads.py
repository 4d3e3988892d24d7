"""Adapters that come and go while threads serve: who waits for whom, and what is held stays."""

from __future__ import annotations

import concurrent.futures
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lorafold.adapter import Adapter
from lorafold.errors import AdapterNotFoundError, PoolFullError, RouteError
from lorafold.pool import Pool
from lorafold.store import AdapterStore
from tests.adapter_folders import NAMES, NUM_VERSIONS, make_pool, read, write_versions
from tests.pool_contents import SHAPES, assert_empty, assert_holds, make_adapter

# What waits for a placement, and what does not


def make_small(max_loras: int) -> Pool:
    return Pool(SHAPES, max_loras=max_loras, max_rank=4)


@contextmanager
def placing(pool: Pool, adapter: Adapter, **settings: Any) -> Iterator[Future[int]]:
    """Inside, another thread is in the middle of writing this adapter; afterwards it goes on."""
    started, go, write = threading.Event(), threading.Event(), pool._write

    def slow(*args: Any) -> None:
        started.set()
        assert go.wait(20)
        write(*args)

    with ThreadPoolExecutor(1) as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_write", slow)
        future = threads.submit(pool.place, adapter, **settings)
        try:
            assert started.wait(20)
            patch.undo()
            yield future
        finally:
            go.set()


def waits(call: Any, *args: Any) -> Future[Any]:
    """A call in a thread of its own, which must not come to an end yet."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run).start()
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(0.05)
    return future


def test_others_are_served_while_an_adapter_is_written() -> None:
    pool = make_small(3)
    pool.place(make_adapter("a"))
    pool.place(make_adapter("b"))
    with placing(pool, make_adapter("c")) as placed:
        assert pool.names() == ("a", "b")
        assert pool.acquire("a") == 0
        pool.pin("b")
        pool.release(0)
        pool.evict("b")
        assert not placed.done()
    assert placed.result(20) == 2
    assert pool.names() == ("a", "c")


def test_who_asks_for_the_name_that_is_written_waits_for_it() -> None:
    pool = make_small(2)
    with placing(pool, make_adapter("a", seed=3)):
        acquired = waits(pool.acquire, "a")
        generation = waits(pool.generation, "a")
        with pytest.raises(AdapterNotFoundError):
            pool.acquire("b")
    assert acquired.result(20) == 0
    assert generation.result(20) == pool.generation_in(0)
    assert_holds(pool, 0, make_adapter("a", seed=3))


def test_an_idle_adapter_that_is_replaced_in_its_slot_is_waited_for() -> None:
    pool = make_small(1)
    pool.place(make_adapter("a", seed=1))
    old = pool.generation("a")
    with placing(pool, make_adapter("a", seed=2)):
        slot = waits(pool.slot, "a")
        with pytest.raises(RouteError):
            pool.generation_in(0)
    assert slot.result(20) == 0
    assert pool.generation("a") > old
    assert_holds(pool, 0, make_adapter("a", seed=2))


def test_a_name_in_use_means_its_old_weights_until_the_new_ones_are_there() -> None:
    pool = make_small(2)
    old, new = make_adapter("a", seed=1), make_adapter("a", seed=2)
    assert pool.place(old, acquire=True) == 0
    with placing(pool, new, acquire=True) as placed:
        assert pool.acquire("a") == 0
        assert_holds(pool, 0, old)
        pool.release(0)
        pool.release(0)  # its last user goes while the new one comes
        assert_holds(pool, 0, old)
    assert placed.result(20) == 1
    assert_empty(pool, 0)
    assert_holds(pool, 1, new)
    assert pool.place(make_adapter("b"), acquire=True) == 0
    with pytest.raises(PoolFullError):  # `acquire=True` has counted a user of the new one
        pool.place(make_adapter("c"))


def test_a_write_that_fails_wakes_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_small(1)
    pool.place(make_adapter("kept"))

    def fail() -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(pool._transfer, "finish", fail)
    with placing(pool, make_adapter("a")) as placed:
        acquired = waits(pool.acquire, "a")
    assert isinstance(placed.exception(20), RuntimeError)
    assert isinstance(acquired.exception(20), AdapterNotFoundError)
    monkeypatch.undo()
    assert pool.names() == ()
    assert_empty(pool, 0)
    assert pool.place(make_adapter("a")) == 0


def test_placed_and_acquired_at_once_cannot_be_lost_in_between() -> None:
    """Four threads, two slots: without `acquire=True` somebody finds its adapter gone."""
    adapters = {name: make_adapter(name, seed=ord(name)) for name in "abcd"}

    def run(at_once: bool) -> int:
        pool = make_small(2)

        def place(name: str) -> int:
            """0 where the adapter was there to be used, or had no place; 1 where it was lost."""
            try:
                slot = pool.place(adapters[name], acquire=at_once)
                if not at_once:
                    threading.Event().wait(1e-4)
                    slot = pool.acquire(name)
            except (PoolFullError, AdapterNotFoundError) as error:
                return int(isinstance(error, AdapterNotFoundError))
            assert_holds(pool, slot, adapters[name])
            pool.release(slot)
            return 0

        with ThreadPoolExecutor(4) as threads:
            return sum(threads.map(place, "abcd" * 60))

    assert run(at_once=True) == 0
    assert run(at_once=False) > 0


# Threads that do everything at once


class Churn:
    """Two slots, four names, and threads that load, evict, pin and serve them."""

    def __init__(self, folders: dict[tuple[str, int], Path]) -> None:
        self.folders = folders
        self.truth = {key: read(key[0], path) for key, path in folders.items() if key[1]}
        self.pool = make_pool(max_loras=2)
        self.store = AdapterStore(self.pool, budget_bytes=2 * self.pool.image_bytes, pinned=True)
        for name in NAMES:
            self.store.register(name, folders[name, 1])
        # What each generation holds. Who acquires one may be ahead of who notes it.
        self.held: dict[int, tuple[str, int]] = {}
        self.turn, self.stop = threading.Lock(), threading.Event()

    def load(self, seed: int) -> int:
        """Give names new weights and place them; the number of placements."""
        rng, num_placed = random.Random(seed), 0
        while not self.stop.is_set():
            key = rng.choice(NAMES), rng.randint(1, NUM_VERSIONS - 1)
            with self.turn, suppress(PoolFullError):
                self.store.register(key[0], self.folders[key])
                self.pool.place(self.store.get(key[0]))
                self.held[self.pool.generation(key[0])] = key
                num_placed += 1
        return num_placed

    def change(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self.stop.wait(0.001):
            with self.turn, suppress(AdapterNotFoundError):
                getattr(self.pool, rng.choice(["evict", "pin", "unpin"]))(rng.choice(NAMES))

    def serve(self, seed: int) -> list[int]:
        """Hold adapters, and look at them meanwhile; the generations that were seen."""
        rng, seen = random.Random(seed), list[int]()
        while not self.stop.is_set():
            with suppress(AdapterNotFoundError):
                seen.append(self.hold(rng.choice(NAMES), rng.randint(1, 3)))
        return seen

    def hold(self, name: str, num_looks: int) -> int:
        slot = self.pool.acquire(name)
        generation = self.pool.generation_in(slot)
        while generation not in self.held:
            self.stop.wait(0.0005)
        assert self.held[generation][0] == name
        for _ in range(num_looks):
            assert_holds(self.pool, slot, self.truth[self.held[generation]])
            assert self.pool.generation_in(slot) == generation
        self.pool.release(slot)
        return generation


def test_churn_from_many_threads_never_changes_what_is_held(tmp_path: Path) -> None:
    churn = Churn(write_versions(tmp_path))
    with ThreadPoolExecutor(6) as threads:
        loads = [threads.submit(churn.load, seed) for seed in range(2)]
        serves = [threads.submit(churn.serve, seed) for seed in range(3)]
        changes = threads.submit(churn.change, 10)
        churn.stop.wait(4)
        churn.stop.set()
        num_placed = sum(each.result(20) for each in loads)
        seen = [generation for each in serves for generation in each.result(20)]
        changes.result(20)
    assert num_placed > 50
    assert len(seen) > 50
    assert len(set(seen)) > 10
    assert not any(slot.num_uses for slot in churn.pool._ledger._slots if slot is not None)
    for name in churn.pool.names():
        churn.pool.evict(name)
    assert not churn.pool._memory.any()
