"""The plugin on vLLM's own expert layers, adapter loading and activation, without a MoE kernel.

vLLM has no CPU kernel for experts that takes LoRA, so no engine can run here. Its LoRA layer, its
manager and the calls from its experts are real; only the base layer under them is a stand-in.
`make test-vllm` runs this; the rest of the proof is test_vllm_experts.py, which needs no vLLM.
"""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: run `make test-vllm`", allow_module_level=True)

from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import AdapterLRUCache, LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from lorafold.errors import AdapterFormatError, AdapterMismatchError
from lorafold.integrations.vllm import adapters
from lorafold.integrations.vllm.hooks import LorafoldPunica
from lorafold.ops import reference
from tests.integrations.vllm_layers import Pair, folded, outputs, pair, rows, start_step
from tests.ops.cases import assert_same_bits

HIDDEN, INNER, NUM_EXPERTS, TOP_K, MAX_LORAS, MAX_RANK = 40, 32, 4, 2, 2, 8
LAYER = "model.layers.0.mlp.experts"
PROJECTIONS = ("gate_proj", "down_proj", "up_proj")
RANKS = {1: 3, 2: 8}
SLOTS = [1, -1, 0, 1, 0, -1, 1]

Pairs = dict[tuple[int, int], list[Pair]]  # (adapter, expert) -> gate, down, up


@pytest.fixture(autouse=True)
def hooked():
    """Build one, as vLLM does, so that its classes are changed before a layer is made."""
    config = LoRAConfig(max_lora_rank=MAX_RANK, max_loras=MAX_LORAS, lora_dtype=torch.bfloat16)
    return LorafoldPunica(32, max_batches=8, device=torch.device("cpu"), lora_config=config)


class Model:
    """vLLM's LoRA manager over one layer of experts, on one rank of `tp_size`."""

    def __init__(
        self, step: LorafoldPunica, *, fused: bool = False, tp_size: int = 1, tp_rank: int = 0
    ) -> None:
        self.step = step
        self.layer = self._layer(fused, tp_size, tp_rank)
        self.manager = self._manager(fused)
        self.layer.set_mapping(step)
        self.target = self.layer.punica_wrapper

    def _layer(self, fused: bool, tp_size: int, tp_rank: int) -> FusedMoEWithLoRA:
        kind = FusedMoE3DWithLoRA if fused else FusedMoEWithLoRA
        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        layer.base_layer = nn.Module()
        layer.moe_config = SimpleNamespace(
            hidden_dim=HIDDEN,
            num_local_experts=NUM_EXPERTS,
            num_experts=NUM_EXPERTS,
            intermediate_size_per_partition=INNER // tp_size,
            intermediate_size_per_partition_unpadded=None,
            experts_per_token=TOP_K,
            moe_parallel_config=SimpleNamespace(ep_rank=0, use_ep=False),
        )
        layer.tp_size, layer.tp_rank, layer.device = tp_size, tp_rank, torch.device("cpu")
        layer._enable_aux_cuda_stream, layer._lora_stream, layer._events = False, None, None
        layer._w13_slices = 1 if fused else 2
        layer.enable_moe_shared_loras = False
        self.experts = LoRAExpertsMixin()
        self.experts.moe_config = SimpleNamespace(activation=None)
        layer._moe_kernel = SimpleNamespace(fused_experts=self.experts, prepare_finalize=None)
        self.config = LoRAConfig(
            max_lora_rank=MAX_RANK, max_loras=MAX_LORAS, lora_dtype=torch.bfloat16
        )
        layer.create_lora_weights(
            MAX_LORAS, self.config, SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
        )
        return layer

    def _manager(self, fused: bool) -> LoRAModelManager:
        manager = LoRAModelManager.__new__(LoRAModelManager)
        manager.model = nn.Module()
        manager.lora_config = self.config
        manager.modules = {LAYER: self.layer}
        parts = [f"{LAYER}.{e}.{p}" for e in range(NUM_EXPERTS) for p in PROJECTIONS]
        manager.packed_modules = {} if fused else {LAYER: parts}
        manager.punica_wrapper_mapping = {"language_model": self.step}
        manager._is_3d_moe_model = fused
        for name in (
            "is_pooling_model",
            "supports_mm",
            "_is_non_gated_moe",
            "_enable_mixed_moe_lora_format",
            "_enable_moe_shared_loras",
        ):
            setattr(manager, name, False)
        manager.lora_index_to_id = [None] * MAX_LORAS
        manager._registered_adapters = AdapterLRUCache(4, manager.deactivate_adapter)
        manager._active_adapters = AdapterLRUCache(MAX_LORAS, manager._deactivate_adapter)
        return manager

    def load(self, id_: int, tensors: dict[str, Tensor], **config: Any) -> None:
        settings = {"r": RANKS[id_], "lora_alpha": 4, "target_modules": [*PROJECTIONS]} | config
        model = LoRAModel.from_lora_tensors(
            id_, tensors, PEFTHelper.from_dict(settings), "cpu", torch.bfloat16
        )
        adapters.check_adapter(self.manager, model, f"adapter {id_}")
        self.manager.add_adapter(model)
        self.manager.activate_adapter(id_)

    def forward(self, x13: Tensor, x2: Tensor, y13: Tensor, y2: Tensor, topk: Tensor, w: Tensor):
        context, num_tokens = self.experts._lora_context, x13.shape[0]
        shared = {"w1": None, "w2": None, "num_tokens": num_tokens, "top_k_num": TOP_K}
        handed = self.experts.apply_w13_lora(
            context, y=y13, x=x13, topk_ids=topk, topk_weights=w, expert_map=None, **shared
        )
        names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora")
        routing = dict(zip((*names, "token_lora_mapping"), handed, strict=True))
        self.experts.apply_w2_lora(context, y=y2, x=x2, topk_weights=w, **routing, **shared)


def make_pairs(*, one_a: bool = False, scales: tuple[float, ...] = (4.0,)) -> Pairs:
    """Factors of two adapters; one_a: gate and up share A, as fused experts do."""
    pairs: Pairs = {}
    for (id_, rank), e in itertools.product(RANKS.items(), range(NUM_EXPERTS)):
        sizes = ((HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN, INNER))
        scale = scales[e % len(scales)] / rank
        made = [
            pair(*s, rank, seed=100 * id_ + 10 * e + i, scale=scale) for i, s in enumerate(sizes)
        ]
        if one_a:
            made[2] = Pair(made[0].a, made[2].b, made[2].scale)
        pairs[id_, e] = made
    return pairs


def one_tensor_per_expert(pairs: Pairs, id_: int) -> dict[str, Tensor]:
    tensors = {}
    for e, (i, projection) in itertools.product(range(NUM_EXPERTS), enumerate(PROJECTIONS)):
        name = f"base_model.model.{LAYER}.{e}.{projection}"
        tensors[f"{name}.lora_A.weight"] = pairs[id_, e][i].a
        tensors[f"{name}.lora_B.weight"] = pairs[id_, e][i].b
    return tensors


def fused_tensors(pairs: Pairs, id_: int) -> dict[str, Tensor]:
    """PEFT's layout of `target_parameters`: A [experts rank, in], B [out, rank experts]."""
    own = [pairs[id_, e] for e in range(NUM_EXPERTS)]

    def flat_b(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, dim=-1).flatten(1)

    name = f"base_model.model.{LAYER}"
    return {
        f"{name}.base_layer.lora_A.weight": torch.cat([gate.a for gate, _, _ in own]),
        f"{name}.base_layer.lora_B.weight": flat_b([torch.cat([g.b, u.b]) for g, _, u in own]),
        f"{name}.lora_A.weight": torch.cat([down.a for _, down, _ in own]),
        f"{name}.lora_B.weight": flat_b([down.b for _, down, _ in own]),
    }


def operands():
    num_tokens = len(SLOTS)
    generator = torch.Generator().manual_seed(0)
    chosen = [torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K] for _ in SLOTS]
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    y13 = outputs(num_tokens * TOP_K, 2 * INNER).view(num_tokens, TOP_K, -1)
    y2 = outputs(num_tokens * TOP_K, HIDDEN, seed=2).view(num_tokens, TOP_K, -1)
    x13, x2 = rows(num_tokens, HIDDEN), rows(num_tokens * TOP_K, INNER)
    return x13, x2, y13, y2, torch.stack(chosen).int(), weights


def truth(pairs: Pairs, x13, x2, y13, y2, topk, weights) -> tuple[Tensor, Tensor]:
    y13, y2 = y13.clone(), y2.clone()
    for (t, slot), k in itertools.product(enumerate(SLOTS), range(TOP_K)):
        if slot < 0:
            continue
        gate, down, up = pairs[slot + 1, int(topk[t, k])]
        halves = zip(y13[t, k].split(INNER), (gate, up), strict=True)
        y13[t, k] = torch.cat([folded(part, x13[t], own, "gemv") for part, own in halves])
        delta = reference.delta_rows(x2[t * TOP_K + k].unsqueeze(0), down.a, down.b, "gemv")
        scaled = reference.fold(torch.zeros_like(delta), delta, down.scale)[0].float()
        y2[t, k] = (y2[t, k].float() + weights[t, k] * scaled).bfloat16()
    return y13, y2


def check(model: Model, pairs: Pairs) -> None:
    values = operands()
    expected = truth(pairs, *values)
    start_step(model.step, SLOTS)
    model.forward(*values)
    assert_same_bits(values[2], expected[0], "gate and up")
    assert_same_bits(values[3], expected[1], "down")


def test_one_tensor_per_expert(hooked):
    model, pairs = Model(hooked), make_pairs()
    for id_ in RANKS:
        model.load(id_, one_tensor_per_expert(pairs, id_))
    check(model, pairs)


def test_scales_differ_by_expert(hooked):
    model, pairs = Model(hooked), make_pairs(scales=(4.0, 7.0))
    for id_ in RANKS:
        odd = {rf"experts\.{e}\.\w+": 7.0 for e in (1, 3)}
        model.load(id_, one_tensor_per_expert(pairs, id_), alpha_pattern=odd)
    check(model, pairs)


def test_fused_tensors(hooked):
    """Gate and up have one alpha, down another; vLLM keeps one scale per tensor."""
    model, pairs = Model(hooked, fused=True), make_pairs(one_a=True)
    for (id_, e), (gate, down, up) in pairs.items():
        pairs[id_, e] = [gate, Pair(down.a, down.b, 5 / down.rank), up]
    for id_ in RANKS:
        model.load(id_, fused_tensors(pairs, id_), alpha_pattern={"down_proj": 5})
    check(model, pairs)


def test_a_slot_is_taken_over(hooked):
    model, pairs = Model(hooked), make_pairs()
    for id_ in (2, 1):  # the larger rank moves out of slot 0
        model.load(id_, one_tensor_per_expert(pairs, id_))
    assert model.manager.lora_index_to_id == [2, 1]
    model.manager.remove_adapter(2)
    model.manager.remove_adapter(1)
    for id_ in (1, 2):
        model.load(id_, one_tensor_per_expert(pairs, id_))
    assert model.manager.lora_index_to_id == [1, 2]
    check(model, pairs)


@pytest.mark.parametrize("fused", [False, True])
def test_shards_of_gate_and_up_have_the_bits_of_one_rank(hooked, fused):
    pairs = make_pairs(one_a=fused)
    values = operands()
    expected = truth(pairs, *values)[0].unflatten(-1, (2, INNER))
    half = INNER // 2
    for rank in range(2):
        model = Model(hooked, fused=fused, tp_size=2, tp_rank=rank)
        for id_ in RANKS:
            tensors = fused_tensors(pairs, id_) if fused else one_tensor_per_expert(pairs, id_)
            model.load(id_, tensors)
        start_step(model.step, SLOTS)
        x13, x2, y13, y2, topk, weights = operands()
        own = slice(rank * half, (rank + 1) * half)
        part = y13.unflatten(-1, (2, INNER))[..., own].flatten(-2).contiguous()
        model.forward(x13, x2[:, own].contiguous(), part, y2, topk, weights)
        assert_same_bits(part, expected[..., own].flatten(-2), f"rank {rank}")


def test_warm_up_adapters_change_nothing(hooked):
    """vLLM warms up with adapters of zeros, which it makes itself."""
    model = Model(hooked)
    zeros = {
        id_: {n: torch.zeros_like(t) for n, t in one_tensor_per_expert(make_pairs(), id_).items()}
        for id_ in RANKS
    }
    for id_, tensors in zeros.items():
        helper = PEFTHelper.from_dict({"r": RANKS[id_], "lora_alpha": 4, "target_modules": []})
        lora = LoRAModel.from_lora_tensors(id_, tensors, helper, "cpu", torch.bfloat16)
        del lora.lorafold_scales
        model.manager.add_adapter(lora)
        model.manager.activate_adapter(id_)
    values = operands()
    before = values[2].clone(), values[3].clone()
    start_step(model.step, SLOTS)
    model.forward(*values)
    assert torch.equal(values[2], before[0])
    assert torch.equal(values[3], before[1])


REFUSED = [
    pytest.param(lambda n, t: t[:, :-8] if n.endswith("2.gate_proj.lora_A.weight") else t, id="in"),
    pytest.param(lambda n, t: t[:-8] if n.endswith("2.down_proj.lora_B.weight") else t, id="out"),
]


@pytest.mark.parametrize("change", REFUSED)
def test_factors_that_do_not_fit(hooked, change):
    model, pairs = Model(hooked), make_pairs()
    tensors = {n: change(n, t) for n, t in one_tensor_per_expert(pairs, 1).items()}
    with pytest.raises(AdapterMismatchError, match=r"shape-mismatch"):
        model.load(1, tensors)
    assert model.manager.lora_index_to_id == [None, None]


def test_experts_that_the_layer_does_not_have(hooked):
    model, pairs = Model(hooked), make_pairs()
    tensors = one_tensor_per_expert(pairs, 1)
    extra = {n.replace("experts.0", "experts.9"): t for n, t in tensors.items() if "experts.0" in n}
    with pytest.raises(AdapterMismatchError, match=r"experts\.9.*unmatched-path"):
        model.load(1, tensors | extra)


@pytest.mark.parametrize("fused", [False, True])
def test_some_experts_only(hooked, fused):
    model, pairs = Model(hooked, fused=fused), make_pairs(one_a=fused)
    tensors = fused_tensors(pairs, 1) if fused else one_tensor_per_expert(pairs, 1)
    part = "base_layer" if fused else "2.up_proj"
    with pytest.raises(AdapterFormatError, match=r"incomplete-experts"):
        model.load(1, {n: t for n, t in tensors.items() if part not in n})
