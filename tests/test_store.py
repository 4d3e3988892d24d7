"""The store: reads once, keeps what fits its budget, and is left as it was by what fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lorafold.adapter import Adapter
from lorafold.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    BackendError,
    RouteError,
)
from lorafold.peft import parse
from lorafold.slot_layout import PackedAdapter
from lorafold.store import AdapterStore
from tests.adapter_folders import TARGETS, make_pool, read, write_adapter
from tests.pool_contents import assert_holds

ONE = 2 * (2 * 16 + 16 * 2 + 2 * 24 + 16 * 2)
"""Bytes of the factors of an adapter of rank 2."""


def same(one: Adapter, other: Adapter) -> bool:
    return one.weights.keys() == other.weights.keys() and all(
        torch.equal(w.a, other.weights[t].a)
        and torch.equal(w.b, other.weights[t].b)
        and w.scale == other.weights[t].scale
        for t, w in one.weights.items()
    )


def filled(tmp_path: Path, names: str, **settings: Any) -> AdapterStore:
    store = AdapterStore(make_pool(), **settings)
    for seed, name in enumerate(names):
        store.register(name, write_adapter(tmp_path / name, seed=seed))
    return store


def test_an_adapter_is_read_when_it_is_first_needed_and_once(tmp_path: Path) -> None:
    store = filled(tmp_path, "ab")
    assert (store.names(), store.in_memory(), store.nbytes) == (("a", "b"), (), 0)
    first = store.get("a")
    assert same(first, read("a", tmp_path / "a"))
    assert store.get("a") is first
    assert (store.num_reads, store.in_memory(), store.nbytes) == (1, ("a",), first.nbytes)
    assert first.nbytes == ONE
    assert not same(store.get("b"), first)


def test_what_was_parsed_is_not_read_again_and_not_kept(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    expected, spec = read("a", folder), parse(folder)
    store = AdapterStore(make_pool(), budget_bytes=ONE)
    store.register("a", spec)
    moved = folder.rename(tmp_path / "moved")
    assert same(store.get("a"), expected)
    store.register("b", write_adapter(tmp_path / "b", seed=1))
    store.get("b")  # forgets a
    with pytest.raises(AdapterFormatError, match="no such folder"):
        store.get("a")
    moved.rename(folder)
    assert same(store.get("a"), expected)


def test_what_was_not_asked_for_longest_makes_room(tmp_path: Path) -> None:
    store = filled(tmp_path, "abc", budget_bytes=2 * ONE)
    kept = store.get("a")
    store.get("b")
    store.get("a")
    store.get("c")
    assert (store.in_memory(), store.nbytes) == (("a", "c"), 2 * ONE)
    again = store.get("b")
    assert store.in_memory() == ("c", "b")
    assert store.num_reads == 4
    # What somebody holds lives on, and what is read again is the same.
    assert same(kept, read("a", tmp_path / "a"))
    assert same(again, read("b", tmp_path / "b"))


def test_a_large_adapter_takes_the_room_of_several(tmp_path: Path) -> None:
    store = filled(tmp_path, "abcd", budget_bytes=3 * ONE)
    store.register("large", write_adapter(tmp_path / "large", rank=4))
    for name in "abc":
        store.get(name)
    assert store.get("large").nbytes == 2 * ONE
    assert (store.in_memory(), store.nbytes) == (("c", "large"), 3 * ONE)


@pytest.mark.parametrize("change", ["register", "unregister"])
def test_a_name_gets_another_meaning(tmp_path: Path, change: str) -> None:
    store = filled(tmp_path, "a")
    old = store.get("a")
    if change == "register":
        store.register("a", write_adapter(tmp_path / "new", seed=7))
        assert (store.in_memory(), store.nbytes) == ((), 0)
        assert same(store.get("a"), read("a", tmp_path / "new"))
        assert not same(store.get("a"), old)
    else:
        store.unregister("a")
        assert (store.names(), store.in_memory(), store.nbytes) == ((), (), 0)
        for call in (store.get, store.unregister):
            with pytest.raises(AdapterNotFoundError, match=r"`a` is registered; .* none"):
                call("a")


def broken(folder: Path) -> Path:
    write_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    return folder


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (broken, AdapterFormatError),
        (lambda folder: folder / "nowhere", AdapterFormatError),
        (lambda folder: write_adapter(folder, rank=5), AdapterMismatchError),
        (lambda folder: write_adapter(folder, rank=4), BackendError),
    ],
)
def test_a_failed_load_changes_nothing_and_may_be_tried_again(
    tmp_path: Path, make: Callable[[Path], Path], error: type[Exception]
) -> None:
    store = filled(tmp_path, "a", budget_bytes=ONE + 1)
    store.get("a")
    store.register("bad", make(tmp_path / "bad"))
    for _ in range(2):
        with pytest.raises(error):
            store.get("bad")
        assert (store.in_memory(), store.nbytes) == (("a",), ONE)
    write_adapter(tmp_path / "bad")
    store.register("bad", tmp_path / "bad")
    assert same(store.get("bad"), read("bad", tmp_path / "bad"))


def test_memory_that_fails_while_packing_is_counted_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, "a", pinned=True)

    def fail(*args: Any, **settings: Any) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr("lorafold.slot_layout.torch.zeros", fail)
        with pytest.raises(BackendError, match=r"could not allocate \d+ bytes for `a` \(no more"):
            store.get("a")
    assert (store.nbytes, store.in_memory()) == (0, ())
    assert store.get("a").rank == 2


def test_packed_adapters_take_a_slot_and_are_placed_as_they_are(tmp_path: Path) -> None:
    pool = make_pool()
    store = AdapterStore(pool, budget_bytes=2 * pool.image_bytes, pinned=True)
    for seed, name in enumerate("abc"):
        store.register(name, write_adapter(tmp_path / name, rank=seed + 1, seed=seed))
    adapters = [store.get(name) for name in "abc"]
    assert store.in_memory() == ("b", "c")
    assert store.nbytes == 2 * pool.image_bytes == sum(a.nbytes for a in adapters[1:])
    for adapter, name in zip(adapters, "abc", strict=True):
        assert isinstance(adapter, PackedAdapter)
        assert pool.pack(adapter) is adapter
        assert same(adapter, read(name, tmp_path / name))
        slot = pool.place(adapter)
        assert_holds(pool, slot, read(name, tmp_path / name))


@pytest.mark.parametrize("max_rank", [3, 4, 9])
def test_what_was_packed_for_another_pool_is_packed_again(tmp_path: Path, max_rank: int) -> None:
    packed = make_pool(max_rank=8).pack(read("a", write_adapter(tmp_path / "a", rank=3)))
    pool = make_pool(max_rank=max_rank)
    slot = pool.place(packed)
    assert_holds(pool, slot, read("a", tmp_path / "a"))
    assert pool.pack(packed) is not packed


def test_budgets_that_make_no_sense_are_refused() -> None:
    pool = make_pool()
    with pytest.raises(RouteError, match=f"at least {pool.image_bytes} bytes, for one"):
        AdapterStore(pool, budget_bytes=pool.image_bytes - 1, pinned=True)
    with pytest.raises(RouteError, match="at least 1"):
        AdapterStore(pool, budget_bytes=0)
    with pytest.raises(BackendError, match=f"bytes free; the budget of host memory is {1 << 60}"):
        AdapterStore(pool, budget_bytes=1 << 60)


# Threads


class Gate:
    """Reads that wait until the test lets them, and counts of them."""

    def __init__(self) -> None:
        self.started, self.go = threading.Semaphore(0), threading.Event()
        self.num_reads = 0

    def read(self, name: str, path: str) -> Adapter:
        self.num_reads += 1
        self.started.release()
        assert self.go.wait(20)
        return read(name, path)


def test_threads_that_ask_for_one_name_share_one_read(tmp_path: Path) -> None:
    gate = Gate()
    store = filled(tmp_path, "ab", read=gate.read)
    with ThreadPoolExecutor(9) as threads:
        waiting = [threads.submit(store.get, "a") for _ in range(8)]
        assert gate.started.acquire(timeout=20)
        other = threads.submit(store.get, "b")
        assert gate.started.acquire(timeout=20)  # other names do not wait
        gate.go.set()
        found = {id(each.result(20)) for each in waiting}
        other.result(20)
    assert (gate.num_reads, len(found)) == (2, 1)


def test_threads_share_an_error_too_and_the_next_one_reads_again(tmp_path: Path) -> None:
    gate = Gate()
    store = AdapterStore(make_pool(), read=gate.read)
    store.register("bad", broken(tmp_path / "bad"))
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(store.get, "bad") for _ in range(4)]
        assert gate.started.acquire(timeout=20)
        gate.go.set()
        errors = [each.exception(20) for each in waiting]
    assert all(isinstance(error, AdapterFormatError) for error in errors)
    write_adapter(tmp_path / "bad")
    assert store.get("bad").rank == 2


@pytest.mark.parametrize("change", ["register", "unregister"])
def test_a_read_that_is_overtaken_is_returned_and_not_kept(tmp_path: Path, change: str) -> None:
    gate = Gate()
    store = filled(tmp_path, "a", read=gate.read)
    new = write_adapter(tmp_path / "new", seed=7)
    with ThreadPoolExecutor(1) as threads:
        old = threads.submit(store.get, "a")
        assert gate.started.acquire(timeout=20)
        if change == "register":
            store.register("a", new)
        else:
            store.unregister("a")
        gate.go.set()
        assert same(old.result(20), read("a", tmp_path / "a"))
    assert (store.in_memory(), store.nbytes) == ((), 0)
    if change == "register":
        assert same(store.get("a"), read("a", new))


def test_loads_at_the_same_time_stay_within_the_budget(tmp_path: Path) -> None:
    """Packing is slow here, so that several adapters come at once; the budget has room for two."""
    pool = make_pool()
    store = AdapterStore(pool, budget_bytes=2 * pool.image_bytes, pinned=True)
    most, together, lock = [0], [0], threading.Lock()
    pack = pool.pack

    def slow(adapter: Adapter) -> PackedAdapter:
        with lock:
            together[0] += 1
            most[0] = max(most[0], together[0])
        threading.Event().wait(0.002)
        with lock:
            together[0] -= 1
        assert store.nbytes <= 2 * pool.image_bytes
        return pack(adapter)

    pool.pack = slow  # type: ignore[method-assign]
    names = "abcdef"
    for seed, name in enumerate(names):
        store.register(name, write_adapter(tmp_path / name, seed=seed))
    with ThreadPoolExecutor(6) as threads:
        for _ in range(5):
            got = list(threads.map(store.get, names))
            assert [adapter.name for adapter in got] == list(names)
    assert most[0] == 2
    assert len(store.in_memory()) == 2
    assert store.nbytes == 2 * pool.image_bytes
    assert set(TARGETS) == set(got[0].weights)
