"""The pool: what its slots hold byte for byte, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lorafold.adapter import Adapter, ExpertLora, ExpertWeights
from lorafold.errors import (
    AdapterMismatchError,
    AdapterNotFoundError,
    BackendError,
    PoolFullError,
    RouteError,
)
from lorafold.pool import Pool, TargetShape, pool_bytes
from tests.pool_contents import SHAPES, assert_empty, assert_holds, make_adapter


@pytest.mark.parametrize("max_rank", [3, 8, 12])
def test_bytes_are_known_before_and_true_after(max_rank: int) -> None:
    pool = Pool(SHAPES, max_loras=3, max_rank=max_rank)
    tables = [pool._tables[name] for name in sorted(pool._tables)]
    real = sum(t.numel() * t.element_size() for t in [pool._memory, *tables])
    assert pool.nbytes == pool_bytes(SHAPES, 3, max_rank) == real
    assert all(t.shape == (3, 3) for t in tables)


def test_routes_are_views_of_the_tables_and_stay() -> None:
    pool = Pool(SHAPES, max_loras=2, max_rank=4)
    routes = {target: pool.route(target) for target in SHAPES}
    slot = pool.place(make_adapter("one"))
    assert routes["q"] is pool.route("q")
    assert routes["q"].rank_table.tolist() == [2, 0]
    assert routes["up"].rank_table.tolist() == [3, 0]
    assert routes["head"].a_table.tolist() == [0, 0]
    assert (routes["q"].k_in, routes["q"].n_out, routes["q"].max_rank) == (5, 7, 4)
    assert_holds(pool, slot, make_adapter("one"))
    with pytest.raises(RouteError, match="no target `k`"):
        pool.route("k")


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one() -> None:
    pool = Pool(SHAPES, max_loras=1, max_rank=4)
    large, small = make_adapter("x", dict.fromkeys(SHAPES, 4)), make_adapter("x", {"q": 1})
    pool.place(large)
    assert_holds(pool, 0, large)
    pool.place(small)
    assert_holds(pool, 0, small)
    pool.evict("x")
    assert_empty(pool, 0)


def test_slots_fill_in_order_and_the_longest_unused_leaves() -> None:
    pool = Pool(SHAPES, max_loras=3, max_rank=4)
    assert [pool.place(make_adapter(name)) for name in "abc"] == [0, 1, 2]
    pool.release(pool.acquire("a"))
    assert pool.place(make_adapter("d")) == 1
    assert pool.names() == ("a", "d", "c")
    pool.pin("c")
    assert pool.place(make_adapter("e")) == 0
    assert pool.names() == ("e", "d", "c")
    pool.unpin("c")
    assert pool.place(make_adapter("f")) == 2
    with pytest.raises(AdapterNotFoundError, match="placed are: `e`, `d`, `f`"):
        pool.slot("a")


def test_a_full_pool_refuses_and_stays_as_it_was() -> None:
    pool = Pool(SHAPES, max_loras=2, max_rank=4)
    pool.place(make_adapter("a"))
    pool.place(make_adapter("b", seed=5))
    pool.pin("a")
    pool.acquire("b")
    before = pool._memory.clone()
    with pytest.raises(PoolFullError, match="all 2 slots are pinned or in use") as caught:
        pool.place(make_adapter("c"))
    assert caught.value.max_loras == 2
    with pytest.raises(PoolFullError):
        pool.place(make_adapter("b", seed=9))
    assert torch.equal(before.view(torch.int16), pool._memory.view(torch.int16))
    assert pool.names() == ("a", "b")


def test_a_slot_in_use_is_neither_replaced_nor_emptied() -> None:
    pool = Pool(SHAPES, max_loras=2, max_rank=4)
    old, new = make_adapter("x", seed=1), make_adapter("x", seed=2)
    pool.place(old)
    generation = pool.generation("x")
    pool.pin("x")
    assert [pool.acquire("x"), pool.acquire("x")] == [0, 0]
    assert pool.place(new) == 1
    assert_holds(pool, 0, old)
    assert_holds(pool, 1, new)
    assert pool.generation("x") > generation
    assert pool.names() == ("x",)
    pool.release(0)
    assert_holds(pool, 0, old)
    pool.release(0)
    assert_empty(pool, 0)
    # The pin followed the name, the old slot is free again.
    assert [pool.place(make_adapter(name)) for name in "ab"] == [0, 0]
    pool.acquire("x")
    pool.evict("x")
    assert_holds(pool, 1, new)
    with pytest.raises(AdapterNotFoundError):
        pool.acquire("x")
    pool.release(1)
    assert_empty(pool, 1)
    with pytest.raises(RouteError, match="slot 1 is not in use"):
        pool.release(1)


@pytest.mark.parametrize("slot", [-1, 0, 2])
def test_only_what_was_acquired_is_released(slot: int) -> None:
    pool = Pool(SHAPES, max_loras=2, max_rank=4)
    pool.place(make_adapter("a"))
    with pytest.raises(RouteError, match="is not in use"):
        pool.release(slot)


def test_every_placement_has_its_own_generation() -> None:
    pool = Pool(SHAPES, max_loras=2, max_rank=4)
    seen = []
    for name in "aabab":
        pool.place(make_adapter(name))
        seen.append(pool.generation(name))
    pool.evict("a")
    pool.place(make_adapter("a"))
    seen.append(pool.generation("a"))
    assert seen == sorted(set(seen))


@pytest.mark.parametrize(
    ("adapter", "code"),
    [
        (make_adapter("x", {"q": 5}), "rank-above-max"),
        (Adapter("x", {"other": make_adapter("x").weights["q"]}), "unmatched-path"),
        (Adapter("x", {"up": make_adapter("x").weights["q"]}), "shape-mismatch"),
        (
            Adapter(
                "x",
                make_adapter("x").weights,
                {
                    "experts": ExpertLora(
                        down=ExpertWeights(*(torch.ones(2, 2, 2).bfloat16(),) * 2, 1.0)
                    )
                },
            ),
            "unmatched-path",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_changes_nothing(adapter: Adapter, code: str) -> None:
    pool = Pool(SHAPES, max_loras=1, max_rank=4)
    kept = make_adapter("kept")
    pool.place(kept)
    mixed = Adapter("x", {**kept.weights, **adapter.weights}, adapter.experts)
    for refused in (adapter, mixed):
        with pytest.raises(AdapterMismatchError) as caught:
            pool.place(refused)
        assert vars(caught.value)["code"] == code
        assert caught.value.adapter == "x"
    assert_holds(pool, 0, kept)
    assert pool.names() == ("kept",)


def test_a_device_that_fails_leaves_no_name_on_a_lost_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(SHAPES, max_loras=1, max_rank=4)
    pool.place(make_adapter("a"))

    def fail(*args: Any) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(pool, "_write", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        pool.place(make_adapter("b"))
    monkeypatch.undo()
    assert pool.names() == ()
    assert pool.place(make_adapter("b")) == 0
    assert_holds(pool, 0, make_adapter("b"))


@pytest.mark.parametrize("step", ["begin", "occupy"])
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", ["a", "b"], ids=["its-own", "a-victim"])
def test_an_interrupt_leaves_no_name_that_arrives_for_ever(
    monkeypatch: pytest.MonkeyPatch, step: str, is_done: bool, name: str
) -> None:
    pool = Pool(SHAPES, max_loras=1, max_rank=4)
    old, new = make_adapter("a", seed=1), make_adapter(name, seed=2)
    pool.place(old)
    real = getattr(pool._ledger, step)

    def interrupted(argument: Any) -> None:
        if is_done:
            real(argument)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._ledger, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.place(new)
    monkeypatch.undo()
    assert not any(pool._ledger.is_arriving(each) for each in "ab")
    # The slot holds the old adapter, nothing or the new one: never one without its name.
    if (step, is_done) == ("begin", False):
        assert pool.names() == ("a",)
        assert_holds(pool, 0, old)
    elif (step, is_done) == ("occupy", True):
        assert pool.names() == (name,)
        assert_holds(pool, 0, new)
    else:
        assert pool.names() == ()
        assert_empty(pool, 0)
    assert pool.place(new) == 0
    assert_holds(pool, 0, new)


@pytest.mark.parametrize(
    ("targets", "max_loras", "max_rank"),
    [({}, 1, 1), (SHAPES, 0, 1), (SHAPES, 1, 0), ({"q": TargetShape(0, 4)}, 1, 1)],
)
def test_sizes_below_one_are_refused(targets: Any, max_loras: int, max_rank: int) -> None:
    with pytest.raises(RouteError, match="at least 1"):
        Pool(targets, max_loras=max_loras, max_rank=max_rank)


@pytest.mark.parametrize("size", [1 << 24, 1 << 40, 1 << 60])
def test_what_the_device_cannot_hold_is_refused_with_the_figures(size: int) -> None:
    targets = {"q": TargetShape(size, size)}
    needed = pool_bytes(targets, 1000, 256)
    with pytest.raises(BackendError, match=f"{needed} bytes for 1000 slots of max_rank 256"):
        Pool(targets, max_loras=1000, max_rank=256)


def test_an_allocation_that_fails_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafold.pool.free_bytes", lambda device: None)
    with pytest.raises(BackendError, match="could not allocate"):
        Pool({"q": TargetShape(1 << 40, 1 << 40)}, max_loras=1000, max_rank=256)


def test_a_pool_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        pool = Pool(SHAPES, max_loras=1, max_rank=4)
        pool.place(make_adapter("a"))
    pool.place(make_adapter("b"))
    assert_holds(pool, 0, make_adapter("b"))


def test_a_default_device_does_not_move_the_pool() -> None:
    adapter = make_adapter("a")
    with torch.device("meta"):
        pool = Pool(SHAPES, max_loras=1, max_rank=4)
        pool.place(adapter)
    assert pool.device == torch.device("cpu")
    assert_holds(pool, 0, adapter)


def test_many_threads_leave_whole_adapters() -> None:
    pool = Pool(SHAPES, max_loras=3, max_rank=4)
    adapters = {name: make_adapter(name, seed=ord(name)) for name in "abcdef"}

    def work(name: str) -> int:
        num_checked = 0
        for _ in range(40):
            try:
                pool.place(adapters[name])
                slot = pool.acquire(name)
            except (PoolFullError, AdapterNotFoundError):
                continue
            assert_holds(pool, slot, adapters[name])
            pool.release(slot)
            num_checked += 1
        return num_checked

    with ThreadPoolExecutor(max_workers=6) as threads:
        assert sum(threads.map(work, adapters)) > 0
    for name in pool.names():
        assert_holds(pool, pool.slot(name), adapters[name])
