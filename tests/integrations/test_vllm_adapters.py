"""What is checked of an adapter inside vLLM, and how it gets into the tables, without vLLM.

The manager and its layers are stand-ins with the attributes that the plugin reads; test_vllm.py and
test_vllm_moe.py do the same with vLLM's own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorafold.errors import AdapterError, AdapterFormatError, AdapterMismatchError
from lorafold.integrations.vllm import adapters, ranks
from lorafold.integrations.vllm.shapes import Factors, expected_factors
from tests.integrations.vllm_layers import linear, punica

HIDDEN, VOCABULARY, MAX_RANK = 32, 48, 8
QKV, DOWN = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"
PARTS = [QKV.replace("qkv", letter) for letter in "qkv"]


class PPMissingLayer(nn.Identity):
    """Named as vLLM's, by which a rank knows a layer that another has."""


class Manager:
    """A manager of one packed layer, one plain layer, and a head."""

    def __init__(self) -> None:
        self.step = punica(2)
        qkv = SimpleNamespace(
            input_size=HIDDEN, total_num_heads=4, total_num_kv_heads=1, head_size=8
        )
        down = SimpleNamespace(input_size=2 * HIDDEN, output_size=HIDDEN)
        self.head = SimpleNamespace(
            weight=torch.randn(VOCABULARY // 2, HIDDEN).bfloat16(),  # this rank's half
            shard_indices=SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=24),
            org_vocab_size=VOCABULARY,
        )
        layers = {
            QKV: self._layer(HIDDEN, (32, 8, 8), qkv),
            DOWN: self._layer(2 * HIDDEN, (HIDDEN,), down),
        }
        a, b = (torch.zeros(2, 1, *s).bfloat16() for s in ((8, HIDDEN), (VOCABULARY, 8)))
        layers["lm_head"] = SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b)
        for layer in layers.values():
            layer.punica_wrapper = self.step.target(layer)
        self.modules = layers
        self.packed_modules = {QKV: PARTS}
        self.punica_wrapper_mapping = {"language_model": self.step, "alias": self.step}
        self.lora_config = SimpleNamespace(max_lora_rank=MAX_RANK)
        named = {"lm_head": self.head, "model.layers.1": PPMissingLayer()}
        self.model = SimpleNamespace(named_modules=named.items)

    def _layer(self, k_in: int, outs: tuple[int, ...], base: Any) -> SimpleNamespace:
        layer = linear(k_in, outs, 2, MAX_RANK)
        layer.base_layer = base
        return layer

    def _get_lora_layer_weights(self, model: Any, name: str) -> Any:
        return model.get_lora(name) if model.check_lora_name(name) else None


class Model:
    """An adapter as vLLM has read it."""

    def __init__(self, shapes: dict[str, tuple[tuple[int, int], tuple[int, int]]]) -> None:
        self.loras = {
            name: SimpleNamespace(rank=4, scaling=2.5, lora_a=torch.zeros(a), lora_b=torch.zeros(b))
            for name, (a, b) in shapes.items()
        }
        self.modules_to_save: dict[str, Any] = {}

    def check_lora_name(self, name: str) -> bool:
        return name in self.loras

    def get_lora(self, name: str) -> Any:
        return self.loras.get(name)


GOOD = {
    PARTS[0]: ((4, HIDDEN), (32, 4)),
    PARTS[2]: ((4, HIDDEN), (8, 4)),
    DOWN: ((4, 2 * HIDDEN), (HIDDEN, 4)),
    "lm_head": ((4, HIDDEN), (VOCABULARY, 4)),
}


def test_an_adapter_that_fits():
    adapters.check_adapter(Manager(), Model(GOOD), "good")


def test_layers_of_other_pipeline_ranks_are_not_missed():
    elsewhere = {"model.layers.1.mlp.down_proj": ((4, 1), (1, 4))}
    adapters.check_adapter(Manager(), Model(GOOD | elsewhere), "good")


WRONG = [
    pytest.param({"model.layers.10.mlp.down_proj": GOOD[DOWN]}, "unmatched-path", id="layer"),
    pytest.param({DOWN: ((4, 2 * HIDDEN), (HIDDEN - 8, 4))}, "shape-mismatch", id="short"),
    pytest.param({DOWN: ((4, HIDDEN), (HIDDEN, 4))}, "shape-mismatch", id="narrow"),
    pytest.param({PARTS[1]: GOOD[PARTS[0]]}, "shape-mismatch", id="k-of-the-size-of-q"),
    pytest.param({"lm_head": ((4, HIDDEN), (24, 4))}, "shape-mismatch", id="half-the-vocabulary"),
    pytest.param({DOWN: ((6, 2 * HIDDEN), (HIDDEN, 6))}, "shape-mismatch", id="not-the-rank"),
]


@pytest.mark.parametrize(("change", "code"), WRONG)
def test_tensors_that_do_not_fit(change, code):
    with pytest.raises(AdapterMismatchError, match=rf"`wrong`.*\[{code}\]"):
        adapters.check_adapter(Manager(), Model(GOOD | change), "wrong")


def test_a_rank_beyond_the_slots():
    model = Model(GOOD)
    model.loras[DOWN].rank = 9
    with pytest.raises(AdapterMismatchError, match="rank-above-max"):
        adapters.check_adapter(Manager(), model, "large")


def test_halves_and_other_tensors():
    model = Model(GOOD)
    model.loras[DOWN].lora_b = None
    with pytest.raises(AdapterFormatError, match="unpaired-tensor"):
        adapters.check_adapter(Manager(), model, "half")
    with pytest.raises(AdapterFormatError, match="empty-adapter"):
        adapters.check_adapter(Manager(), Model({}), "empty")
    model = Model(GOOD)
    model.modules_to_save = {"score": None}
    with pytest.raises(AdapterFormatError, match="modules-to-save"):
        adapters.check_adapter(Manager(), model, "classifier")


def test_copies_of_the_vocabulary_must_be_the_bases():
    """PEFT saves them beside the factors of a head; this rank can compare its own part."""
    manager, model = Manager(), Model(GOOD)
    copied = torch.cat([manager.head.weight, torch.zeros(24, HIDDEN).bfloat16()]).float()
    model.lorafold_copies = {"lm_head": copied, "model.layers.1": copied}
    adapters.check_adapter(manager, model, "same")
    assert not hasattr(model, "lorafold_copies")
    for name, changed in (("lm_head", copied + 1), ("lm_head", copied[:-1]), ("other", copied)):
        model.lorafold_copies = {name: changed}
        with pytest.raises(AdapterFormatError, match="base-weights"):
            adapters.check_adapter(manager, model, "changed")


def test_scales_reach_the_tables_in_float32():
    manager, model = Manager(), Model(GOOD)
    for i, name in enumerate(model.loras):
        model.loras[name].scaling = (i + 1) / 3
    adapters.set_scales_aside(model)
    assert {lora.scaling for lora in model.loras.values()} == {1}
    packed = SimpleNamespace(
        lora_a=[torch.zeros(3, HIDDEN), None, torch.zeros(4, HIDDEN)], lora_b=None
    )
    model.loras[QKV] = packed
    adapters.clear_slot(manager, 1)
    adapters.fill_slot(manager, model, 1)
    tables = manager.modules[QKV].punica_wrapper.tables
    third = torch.tensor(1 / 3, dtype=torch.float32).item()
    assert tables.scale_table.tolist() == [[0, third], [0, 0], [0, torch.tensor(2 / 3).item()]]
    assert tables.rank_table.tolist() == [[0, 3], [0, 0], [0, 4]]
    assert (tables.a_table != 0).tolist() == [[False, True], [False, False], [False, True]]
    assert manager.modules[DOWN].punica_wrapper.tables.scale_table.tolist() == [[0, 1]]
    adapters.clear_slot(manager, 1)
    assert not tables.a_table.any()


def test_one_tensor_for_several_slices():
    """An adapter of a fused layer: one A, and vLLM cuts B; or one A for a group of slices."""
    manager, model = Manager(), Model({})
    model.loras = {QKV: SimpleNamespace(lora_a=torch.zeros(2, HIDDEN), lora_b=None)}
    model.lorafold_scales = {PARTS[0]: 0.5, PARTS[1]: 0.25}
    tables = manager.modules[QKV].punica_wrapper.tables
    adapters.fill_slot(manager, model, 0)
    assert tables.scale_table[:, 0].tolist() == [0.5] * 3
    qk, v = torch.zeros(2, HIDDEN), torch.zeros(5, HIDDEN)
    model.loras = {QKV: SimpleNamespace(lora_a=[qk, v], lora_b=None)}
    manager.modules[QKV].expand_packed_lora = lambda a, b: ([a[0], a[0], a[1]], b)
    adapters.fill_slot(manager, model, 0)
    assert tables.scale_table[:, 0].tolist() == [0.5, 0.5, 0.25]
    assert tables.rank_table[:, 0].tolist() == [2, 2, 5]


def test_expected_sizes_span_all_ranks():
    expected = expected_factors(Manager(), None)
    assert expected[PARTS[0]] == Factors(HIDDEN, 32)
    assert expected[PARTS[1]] == expected[PARTS[2]] == Factors(HIDDEN, 8)
    assert expected[DOWN] == Factors(2 * HIDDEN, HIDDEN)
    assert expected["lm_head"] == Factors(HIDDEN, VOCABULARY)


def test_shared_expert_factors_may_have_one_expert():
    factors = Factors(32, 16, num_experts=4, is_stacked=True)
    assert factors.a_shapes(8) == [(4, 8, 32), (1, 8, 32)]
    assert factors.b_shapes(8) == [(4, 16, 8), (1, 16, 8)]


class Worker:
    """vLLM's worker manager of one rank, which may refuse."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.loaded = error, {7}

    def list_adapters(self) -> set[int]:
        return set(self.loaded)

    def remove_adapter(self, id_: int) -> None:
        self.loaded.discard(id_)

    def add(self) -> bool:
        if self.error is not None:
            raise self.error
        self.loaded.add(1)
        return True


def add(worker: Worker, monkeypatch, reports: list[str | None], rank: int) -> bool:
    """One rank of two, told what both report."""
    group = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=None)

    def all_gather_object(parts: list[Any], own: list[Any], group: Any) -> None:
        assert own == [reports[rank]]
        parts[:] = [[report] for report in reports]

    monkeypatch.setattr(ranks.distributed, "all_gather_object", all_gather_object)
    request = SimpleNamespace(lora_int_id=1, lora_name="sql", load_inplace=False)
    return ranks.add_on_all_ranks(worker.add, worker, request, [group])


def test_ranks_load_together(monkeypatch):
    for rank in range(2):
        assert add(Worker(None), monkeypatch, [None, None], rank) is True


def test_the_last_rank_raises_for_all(monkeypatch):
    for rank in range(2):
        worker = Worker(ValueError("no") if rank == 0 else None)
        if rank == 0:
            assert add(worker, monkeypatch, ["no", None], rank) is False
        else:
            with pytest.raises(AdapterError, match="on another rank: no"):
                add(worker, monkeypatch, ["no", None], rank)
        assert worker.loaded == {7}


def test_its_own_error_is_raised_as_it_is(monkeypatch):
    worker = Worker(FileNotFoundError("adapter"))
    with pytest.raises(FileNotFoundError):
        add(worker, monkeypatch, ["adapter", "adapter"], 1)


def test_tensors_stay_as_they_are():
    """Setting scales aside must not touch B: vLLM multiplies only where a scale is not 1."""
    model = Model(GOOD)
    before = {name: lora.lora_b for name, lora in model.loras.items()}
    adapters.set_scales_aside(model)
    for name, lora in model.loras.items():
        assert isinstance(lora.lora_b, Tensor)
        assert lora.lora_b is before[name]
