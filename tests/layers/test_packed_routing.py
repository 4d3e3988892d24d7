"""Routing of packed forwards: one slot per token, and the kept tokens for the output head."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lorafold.errors import RouteError
from lorafold.layers.routing import Routing, Rows
from lorafold.ops import make_plan
from lorafold.runtime import MultiLora, attach
from tests.tiny_models import bits, make_model, random_ids, write_adapter

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return make_model("llama")


@pytest.fixture
def lora(plain: nn.Module, tmp_path: Path) -> MultiLora:
    lora = attach(copy.deepcopy(plain), max_loras=2, max_rank=4, targets=["lm_head", "down_proj"])
    lora.load("one", write_adapter(plain, tmp_path / "one", ["lm_head", "down_proj"]))
    return lora


def forward(lora: MultiLora, ids: Tensor, slots: list[int], kept: list[int]) -> Tensor:
    with lora.turn(), lora.packed_rows(slots, kept):
        logits: Tensor = lora.model(ids, logits_to_keep=torch.tensor(kept)).logits
    return logits


def test_each_token_has_its_slot_and_the_head_those_that_are_kept() -> None:
    routing = Routing(CPU, max_loras=2, has_head=True)
    routing.begin_packed([1, 1, -1, 0, 0], kept=[1, 2, 4])
    routing.step(1, 5, 3)
    assert routing.rows is not None
    assert routing.head_rows is not None
    assert routing.rows.seq_slot.tolist() == [1, 1, -1, 0, 0]
    assert routing.head_rows.seq_slot.tolist() == [1, -1, 0]
    with pytest.raises(RouteError, match=r"packed forward of \(1, 5, 3\), the forward has"):
        routing.step(1, 5, 2)
    with pytest.raises(RouteError, match="a routing is active already"):
        routing.begin_packed([0], kept=[0])
    routing.end()
    assert routing.rows is None
    routing.begin([0, -1], may_repeat=True)
    routing.step(4, 3, 1)
    assert routing.seq_slot is not None
    assert routing.seq_slot.tolist() == [0] * 6 + [-1] * 6


def test_base_rows_alone_need_no_routing() -> None:
    routing = Routing(CPU, max_loras=2)
    routing.begin_packed([-1, -1], kept=[0])
    assert routing.rows is None
    routing.step(1, 2, 1)


@pytest.mark.parametrize(
    ("slots", "kept"),
    [([], [0]), ([0, 2], [0]), ([0, -2], [0]), ([0], []), ([0], [1]), ([0], [-1])],
)
def test_slots_and_kept_tokens_must_exist(slots: list[int], kept: list[int]) -> None:
    routing = Routing(CPU, max_loras=2)
    with pytest.raises(RouteError, match="given:"):
        routing.begin_packed(slots, kept)
    assert not routing.is_active


def test_rows_of_the_callers_are_routed_as_they_are() -> None:
    routing = Routing(CPU, max_loras=2, has_head=True)
    slots = torch.tensor([1, -1, 0], dtype=torch.int32)
    rows = Rows(slots, make_plan(slots, 2))
    with pytest.raises(RouteError, match=r"all 3 tokens must be kept; given: \[0, 1\]"):
        routing.begin_packed(rows, [0, 1])
    assert not routing.is_active
    routing.begin_packed(rows, range(3))
    routing.step(1, 3, 3)
    assert routing.rows is routing.head_rows is rows
    with pytest.raises(RouteError, match="a routing is active already"):
        routing.begin_packed(rows, range(3))
    with pytest.raises(RouteError, match=r"packed forward of \(1, 3, 3\), the forward has"):
        routing.step(1, 2, 2)
    routing.end()
    assert routing.rows is None
    assert slots.tolist() == [1, -1, 0]


def test_a_packed_token_gets_what_a_row_of_its_own_gets(lora: MultiLora) -> None:
    """Packing changes the attention alone, and this adapter does not touch that."""
    ids = random_ids(1, 6)
    kept = [0, 2, 5]
    adapted = forward(lora, ids, [0] * 6, kept)
    base = forward(lora, ids, [-1] * 6, kept)
    mixed = forward(lora, ids, [0, 0, 0, 0, 0, -1], kept)
    assert torch.equal(bits(mixed[0, :2]), bits(adapted[0, :2]))
    assert not torch.equal(bits(mixed[0, 2]), bits(adapted[0, 2]))
    assert not torch.equal(bits(base), bits(adapted))
    with lora.rows(["one"]):
        whole = lora.model(ids).logits[:, kept]
    assert float((whole - adapted).norm() / whole.norm()) < 0.02


def test_packed_rows_need_a_turn_and_a_turn_keeps_others_out(lora: MultiLora) -> None:
    with pytest.raises(RouteError, match="call it inside `turn`"), lora.packed_rows([0], [0]):
        pass
    done = threading.Event()

    def elsewhere() -> None:
        with lora.rows(["one"]):
            done.set()

    thread = threading.Thread(target=elsewhere)
    with lora.turn():
        thread.start()
        with pytest.raises(RouteError, match="inside `rows` or `turn`"), lora.rows(["one"]):
            pass
        assert not done.wait(0.1)
    thread.join(10)
    assert done.is_set()


def test_an_error_in_a_packed_forward_leaves_nothing_behind(lora: MultiLora) -> None:
    ids = random_ids(1, 4)
    with pytest.raises(RouteError, match="packed forward"):
        forward(lora, ids, [0, 0, 0], [0])
    assert forward(lora, ids, [0] * 4, [3]).shape[1] == 1


def test_reading_an_adapter_places_it_nowhere(
    lora: MultiLora, plain: nn.Module, tmp_path: Path
) -> None:
    adapter = lora.read("two", write_adapter(plain, tmp_path / "two", ["down_proj"]))
    assert adapter.name == "two"
    assert lora.names() == ("one",)
