"""Slots under any sequence of calls: the pool does what a plain model of it does."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from lorafold.adapter import Adapter
from lorafold.errors import AdapterNotFoundError, PoolFullError, RouteError
from lorafold.pool import Pool
from lorafold.slots import SlotLedger
from tests.pool_contents import SHAPES, make_adapter
from tests.pool_model import ANY_NAME, PoolModel


class PoolMachine(PoolModel):
    """The pool against its model, with adapters of any targets and ranks."""

    @initialize(max_loras=st.integers(1, 4), max_rank=st.sampled_from([3, 4, 12]))
    def start(self, max_loras: int, max_rank: int) -> None:
        self.follow(Pool(SHAPES, max_loras=max_loras, max_rank=max_rank))

    def adapter_of(self, held: Adapter) -> Adapter:
        return held

    @rule(
        name=ANY_NAME,
        ranks=st.dictionaries(st.sampled_from(sorted(SHAPES)), st.integers(1, 3), min_size=1),
        seed=st.integers(0, 50),
        acquire=st.booleans(),
    )
    def place(self, name: str, ranks: dict[str, int], seed: int, acquire: bool) -> None:
        adapter = make_adapter(name, ranks, seed=seed)
        self.place_as_expected(adapter, adapter, acquire=acquire)


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
    assert ledger.vacate("c") == 1
    assert ledger.vacate("c") is None
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


def test_an_interrupt_in_the_middle_of_beginning_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = SlotLedger(1)
    ledger.occupy(ledger.begin("a"))

    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lorafold.slots._Slot", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.begin("b")
    monkeypatch.undo()
    assert ledger.names() == ("a",)
    assert ledger.begin("b") == 0


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
