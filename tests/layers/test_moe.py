"""Which experts and routers can be targets, and that wrapping them is undone without a trace."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.errors import BackendError, ModelError, RouteError
from lorafold.expert_pool import expert_pool_bytes
from lorafold.integrations.transformers import register_experts
from lorafold.layers.experts import RoutedExperts
from lorafold.layers.moe import find_moe
from lorafold.layers.router import RoutedRouter
from lorafold.runtime import attach
from tests.moe_models import (
    HIDDEN,
    INNER,
    MOE_FAMILIES,
    NUM_EXPERTS,
    experts_of,
    make_moe,
    router_name,
)
from tests.tiny_models import bits, make_model, random_ids, write_adapter

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_experts_and_routers_of_every_family(family: str) -> None:
    model = make_moe(family)
    found = find_moe(model, CPU)
    layers = [1] if family == "deepseek_v3" else [0, 1]  # its first layer is dense
    is_gpt_oss = family == "gpt_oss"
    shape = ExpertShape(NUM_EXPERTS, HIDDEN, INNER, is_gpt_oss, is_gpt_oss)
    assert found.experts == {f"model.layers.{i}.mlp.experts": shape for i in layers}
    assert found.routers == {
        f"model.layers.{i}.mlp.{router_name(family)}": TargetShape(HIDDEN, NUM_EXPERTS)
        for i in layers
    }
    without = find_moe(model, CPU, with_experts=False)
    assert (without.experts, without.routers) == ({}, found.routers)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_attaching_shows_changes_no_bits_and_is_undone_exactly(family: str) -> None:
    model = make_moe(family)
    ids = random_ids(2, 5)
    shown, modules = repr(model), dict(model.named_modules())
    state = {key: value.data_ptr() for key, value in model.state_dict().items()}
    plain = model(ids).logits
    register_experts()
    model.set_experts_implementation("lorafold")
    same_sums = model(ids).logits
    model.set_experts_implementation("grouped_mm")
    lora = attach(model, max_loras=2, max_rank=4, max_expert_rank=2)
    assert sum(isinstance(m, RoutedExperts) for m in model.modules()) == len(experts_of(model))
    assert sum(isinstance(m, RoutedRouter) for m in model.modules()) == len(experts_of(model))
    assert {path for path in lora.targets if ".mlp." in path} >= {*experts_of(model)}
    attached = model(ids).logits
    # Without adapters, and in a batch of base rows: the plain model with the same sums of experts.
    assert torch.equal(bits(attached), bits(same_sums))
    with lora.rows([None, None]):
        assert torch.equal(bits(model(ids).logits), bits(attached))
    torch.testing.assert_close(attached, plain, rtol=5e-2, atol=5e-2)
    lora.detach()
    assert repr(model) == shown
    assert all(model.get_submodule(path) is module for path, module in modules.items())
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == state
    assert torch.equal(bits(model(ids).logits), bits(plain))


def test_experts_are_targets_only_if_asked_for() -> None:
    model = make_moe("qwen3_moe")
    lora = attach(model)
    assert not any(isinstance(m, RoutedExperts | RoutedRouter) for m in model.modules())
    assert lora.pool.experts is None
    lora.detach()
    lora = attach(model, max_expert_rank=0)
    assert sum(isinstance(m, RoutedRouter) for m in model.modules()) == 2
    assert not any(isinstance(m, RoutedExperts) for m in model.modules())
    assert [path for path in lora.targets if path.endswith("mlp.gate")] == [
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    ]


def test_memory_that_is_not_there_or_not_allowed_is_refused_before_anything_changes() -> None:
    model = make_moe("qwen3_moe")
    shown = repr(model)
    shapes = find_moe(model, CPU).experts
    needed = expert_pool_bytes(shapes, 4, 16)
    with pytest.raises(BackendError, match=f"{needed - 1} bytes are allowed.* {needed} bytes"):
        attach(model, max_loras=4, max_expert_rank=16, max_expert_bytes=needed - 1)
    with pytest.raises(BackendError, match=r"bytes free, and a pool needs \d+ bytes"):
        attach(model, max_loras=100_000, max_rank=1, max_expert_rank=10_000)
    with pytest.raises(RouteError, match="max_rank -1"):
        attach(model, max_expert_rank=-1)
    assert repr(model) == shown
    lora = attach(model, max_loras=4, max_expert_rank=16, max_expert_bytes=needed)
    assert lora.pool.experts is not None
    assert lora.pool.experts.nbytes == needed


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no routed experts; .*max_expert"):
        attach(make_model("llama"), max_expert_rank=4)


def bypassed(self: Any, hidden_states: Tensor) -> Any:
    """A block as a hub kernel replaces it: it reads the weights around the experts' forward."""
    experts, x = self.experts, hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, _ = self.router(x)
    gate_up = x @ experts.gate_up_proj[0] + experts.gate_up_proj_bias[0]
    out = experts._apply_gate(gate_up) @ experts.down_proj[0] + experts.down_proj_bias[0]
    return out.view_as(hidden_states), weights


def first(model: nn.Module) -> Any:
    return model.model.layers[0].mlp  # type: ignore[union-attr, index]


def kernelized(model: nn.Module) -> None:
    model._use_kernels = True  # type: ignore[assignment]


def replaced_block(model: nn.Module) -> None:
    first(model).forward = MethodType(bypassed, first(model))


def other_sums(model: nn.Module) -> None:
    experts = first(model).experts
    inner = type(experts).forward
    experts.forward = lambda *args: inner(experts, *args) * 2


def quantised(model: nn.Module) -> None:
    mlp = first(model)
    packed = Mxfp4GptOssExperts(model.config)
    packed.forward = mlp.experts.forward  # its kernels are for GPUs
    mlp.experts = packed


def in_fp32(model: nn.Module) -> None:
    experts = first(model).experts
    experts.down_proj.data = experts.down_proj.data.float()
    experts.forward = lambda x, *args: x


def ungated(model: nn.Module) -> None:
    first(model).experts.has_gate = False
    first(model).experts.forward = lambda x, *args: x


def spread(model: nn.Module) -> None:
    first(model).experts._is_expert_parallel = True


def called_by_name(model: nn.Module) -> None:
    experts = first(model).experts
    inner = type(experts).forward

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Any:
            flat = x.reshape(-1, x.shape[-1])
            _, weights, index = self.router(flat)
            return self.experts(
                hidden_states=flat, router_indices=index, routing_weights=weights
            ).view_as(x), weights

    block = Block()
    block.router, block.experts = first(model).router, experts
    experts.forward = lambda hidden_states, router_indices, routing_weights: inner(
        experts, hidden_states, router_indices, routing_weights
    )
    model.model.layers[0].mlp = block  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (kernelized, "uses hub kernels"),
        (replaced_block, "layers.0.mlp.experts`: one forward calls it 0 times; a kernel may"),
        (other_sums, "layers.0.mlp.experts`: GptOssExperts computes something else"),
        (quantised, "Mxfp4GptOssExperts does not say how it stores its weights; is it quant"),
        (in_fp32, "its inputs and weights are .*not bfloat16"),
        (ungated, "GptOssExperts has no gate"),
        (spread, "spread over several devices"),
        (called_by_name, "something else than hidden states, experts and weights"),
    ],
)
def test_experts_that_cannot_be_followed_are_refused(change: Any, message: str) -> None:
    model = make_moe("gpt_oss")
    change(model)
    shown = repr(model)
    with pytest.raises(ModelError, match=message):
        attach(model, max_expert_rank=4)
    assert repr(model) == shown
    assert not any(m._forward_hooks for m in model.modules())


def test_experts_on_another_device_are_refused() -> None:
    with pytest.raises(ModelError, match="it is not on cuda:1, where the other targets are"):
        find_moe(make_moe("mixtral"), torch.device("cuda:1"))


class Odd(nn.Module):
    """Routers that are not followed, for one reason each."""

    def __init__(self, base: Any, kind: str) -> None:
        super().__init__()
        self.base, self.kind = base, kind
        self.weight = base.weight

    def forward(self, x: Tensor) -> Any:
        weight = self.weight
        x = x.reshape(-1, x.shape[-1])
        if self.kind == "exact in fp32 only":
            logits = F.linear(x.float() / 3, weight.float())
        elif self.kind == "some rows":
            logits = torch.cat([F.linear(x[:1], weight), x[1:] @ weight.T])
        elif self.kind == "twice":
            logits = F.linear(x, weight) + F.linear(x, weight)
        else:
            logits = x @ weight.T
        values, index = logits.float().softmax(-1).topk(self.base.top_k, dim=-1)
        return logits, values, index


@pytest.mark.parametrize("kind", ["exact in fp32 only", "some rows", "twice", "matmul"])
def test_routers_that_are_not_followed_are_no_targets(kind: str) -> None:
    model = make_moe("mixtral")
    first(model).gate = Odd(first(model).gate, kind)
    assert list(find_moe(model, CPU).routers) == ["model.layers.1.mlp.gate"]


def test_a_router_whose_forward_is_replaced_later_is_an_error(tmp_path: Any) -> None:
    model = make_moe("mixtral")
    folder = write_adapter(model, tmp_path / "a", [], rank=2, target_parameters=["mlp.gate.weight"])
    lora = attach(copy.deepcopy(model), max_expert_rank=0)
    lora.load("a", folder)
    router = first(lora.model).gate.base
    router.forward = Odd(router, "matmul").forward
    with lora.rows(["a"]), pytest.raises(RouteError, match="multiplied by its weight 0 times"):
        lora.model(random_ids(1, 3))
