"""RoutedExperts: what the experts compute, plus each row's own deltas, and not a bit more.

The same checks run at a tiny size on the CPU and, on a GPU, at the size of Qwen3-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lorafold.adapter import Adapter, ExpertLora, ExpertShape, ExpertWeights
from lorafold.errors import RouteError
from lorafold.expert_pool import ExpertPool, expert_slices
from lorafold.layers import experts as layer_module
from lorafold.layers.experts import ExpertPlans, RoutedExperts, run_experts
from lorafold.layers.routing import Routing
from lorafold.ops import LoraPair, apply_lora_delta
from tests.moe_models import MOE_FAMILIES, experts_of, make_moe
from tests.tiny_models import bits


@dataclass(frozen=True)
class Size:
    num_experts: int
    top_k: int
    hidden: int
    inner: int


TINY = Size(num_experts=5, top_k=3, hidden=48, inner=32)
QWEN3 = Size(num_experts=128, top_k=8, hidden=2048, inner=768)
MAX_RANK = 8


def random(*shape: int, seed: int, device: str = "cpu", scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()


def make_experts(family: str, size: Size, device: str) -> nn.Module:
    """The experts module of a family, at any size."""
    if family == "gpt_oss":
        config = transformers.GptOssConfig(
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_local_experts=size.num_experts,
        )
        name = "gpt_oss.modeling_gpt_oss.GptOssExperts"
    else:
        config = transformers.Qwen3MoeConfig(
            hidden_size=size.hidden,
            moe_intermediate_size=size.inner,
            num_experts=size.num_experts,
        )
        name = "qwen3_moe.modeling_qwen3_moe.Qwen3MoeExperts"
    config._experts_implementation = "grouped_mm"
    module_name, _, class_name = name.rpartition(".")
    model_file: Any = transformers.models
    for part in module_name.split("."):
        model_file = getattr(model_file, part)
    with torch.device(device):
        module = getattr(model_file, class_name)(config).bfloat16().requires_grad_(False)
        for number, parameter in enumerate(module.parameters()):
            scale = parameter.shape[-1] ** -0.5
            parameter.copy_(random(*parameter.shape, seed=number, device=device, scale=scale))
    return module.eval()


def shape_of(module: Any, size: Size) -> ExpertShape:
    return ExpertShape(
        size.num_experts, size.hidden, size.inner, module.is_transposed,
        not module.is_concatenated,
    )  # fmt: skip


def weights(size: Size, kind: str, rank: int, seed: int, gate_rank: int | None) -> ExpertWeights:
    k_in, n_out = (size.hidden, 2 * size.inner) if kind == "gate_up" else (size.inner, size.hidden)
    a = random(size.num_experts, rank, k_in, seed=seed, scale=2 * k_in**-0.5)
    b = random(size.num_experts, n_out, rank, seed=seed + 1, scale=0.3)
    return ExpertWeights(a, b, 4 / 3, gate_rank)


class Layer:
    """Experts with four slots: gate and up sharing A, apart, down only, and nothing."""

    def __init__(self, family: str, size: Size, device: str = "cpu") -> None:
        self.size, self.device = size, device
        self.base = make_experts(family, size, device)
        self.shape = shape_of(self.base, size)
        self.loras = [
            ExpertLora(weights(size, "gate_up", 5, 10, None), weights(size, "down", 3, 20, None)),
            ExpertLora(weights(size, "gate_up", 8, 30, 5), None),
            ExpertLora(None, weights(size, "down", 7, 40, None)),
        ]
        pool = ExpertPool({"experts": self.shape}, max_loras=4, max_rank=MAX_RANK, device=device)
        for slot, lora in enumerate(self.loras):
            pool.check(Adapter(f"a{slot}", {}, {"experts": lora}))
            pool.write(slot, {"experts": lora})
        self.routing = Routing(pool.device, 4)
        self.experts = RoutedExperts(
            self.base, pool.routes("experts"), self.routing, ExpertPlans(), name="experts"
        )

    def inputs(self, num_tokens: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(seed)
        logits = torch.rand(
            num_tokens, self.size.num_experts, generator=generator, device=self.device
        )
        logits[:, 1] += 0.3
        weights, index = logits.softmax(dim=-1).topk(self.size.top_k, dim=-1)
        hidden = random(num_tokens, self.size.hidden, seed=seed + 1, device=self.device)
        return hidden, index, weights.bfloat16()

    def run(self, slots: list[int], inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        self.routing.begin(slots)
        try:
            return self.experts(*inputs)
        finally:
            self.routing.end()


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def layer(request: pytest.FixtureRequest) -> Layer:
    return Layer(request.param, TINY)


# The base


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_base_is_what_the_experts_of_every_family_compute(family: str) -> None:
    for module in experts_of(make_moe(family)).values():
        size = Size(module.num_experts, 2, 48, 32)
        hidden = random(7, 48, seed=1)
        index = torch.rand(7, size.num_experts).topk(2, dim=-1).indices
        for weights in (random(7, 2, seed=2).abs(), random(7, 2, seed=2).abs().float()):
            want = module(hidden, index, weights)
            got = run_experts(module, hidden, index, weights)
            assert got.dtype == want.dtype == torch.bfloat16
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
            assert float(want.float().std()) > 0.05


def test_a_norm_after_each_expert_is_followed(layer: Layer) -> None:
    inputs = layer.inputs(4)
    base: Any = layer.base
    if not hasattr(base, "has_post_expert_norm"):
        pytest.skip("no model of this version of transformers has such a norm")
    plain = run_experts(base, *inputs)
    base.has_post_expert_norm, base.post_expert_norm = True, nn.RMSNorm(TINY.hidden).bfloat16()
    try:
        got, want = run_experts(base, *inputs), base(*inputs)
    finally:
        base.has_post_expert_norm = False
        del base.post_expert_norm
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
    assert not torch.allclose(got, plain, atol=0.1)


def test_on_the_cpu_a_token_of_the_base_is_the_same_in_any_batch(layer: Layer) -> None:
    inputs = layer.inputs(13)
    together = run_experts(layer.base, *inputs)
    for token in range(13):
        alone = run_experts(layer.base, *(t[token : token + 1] for t in inputs))
        assert torch.equal(bits(alone[0]), bits(together[token]))


# The deltas


def folds(layer: Layer, slots: list[int], inputs: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every call of the operator in one forward: what it was given, and what it made of it."""
    calls = []

    def record(
        route: Any, x: Tensor, out: Tensor, *where: Tensor, x_gather: int, **more: Any
    ) -> None:
        before = out.clone()
        fold(route, x, out, *where, x_gather=x_gather, **more)
        x_rows = x[where[1].long()] if x_gather else x
        calls.append((route, x_rows, before, out.clone(), where))

    fold = layer_module.moe_lora_grouped_down
    with monkeypatch.context() as patch:
        patch.setattr(layer_module, "moe_lora_grouped_down", record)
        layer.run(slots, inputs)
    return calls


def check_folds(
    layer: Layer,
    slots: list[int],
    inputs: Any,
    monkeypatch: pytest.MonkeyPatch,
    sample: Callable[[int], list[int]] = lambda num_rows: list(range(num_rows)),
) -> None:
    """Each row's delta has the bits of the row alone, with A and B as the adapter has them."""
    calls = folds(layer, slots, inputs, monkeypatch)
    routes = layer.experts.routes
    assert [call[0] for call in calls] == [routes.gate, routes.up, routes.down]
    for name, (_, x_rows, before, after, (offsets, tokens, _)) in zip(
        ("gate", "up", "down"), calls, strict=True
    ):
        experts = torch.repeat_interleave(offsets.diff().long()).tolist()
        num_changed = 0
        for row in sample(len(tokens)):
            slot = slots[int(tokens[row])]
            lora = layer.loras[slot] if 0 <= slot < 3 else ExpertLora()
            want = before[row : row + 1].cpu().clone()
            if factors := expert_slices(lora, layer.shape).get(name):  # type: ignore[call-overload]
                a, b, scale = factors
                pair = LoraPair(a[experts[row]].clone(), b[experts[row]].clone(), scale)
                numerics = "mma" if layer.device == "cuda" else "gemv"
                apply_lora_delta(pair, x_rows[row : row + 1].cpu(), want, numerics=numerics)
                num_changed += not torch.equal(bits(want), bits(before[row : row + 1].cpu()))
            assert torch.equal(bits(after[row : row + 1].cpu()), bits(want))
        assert num_changed > 0


def test_every_delta_has_the_bits_of_its_row_alone(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slots in ([0, -1, 1, 2, 3, 0, 1, -1, 2], [0, 1, 2], [1] * 6 + [0, 2]):
        check_folds(layer, slots, layer.inputs(len(slots), seed=len(slots)), monkeypatch)


def test_deltas_go_where_a_merged_expert_has_them(layer: Layer) -> None:
    """In fp64: the deltas are in front of the activation, and before the routing weights."""
    inputs = layer.inputs(6)
    for slot, lora in enumerate(layer.loras):
        got = layer.run([slot] * 6, inputs)
        merged = make_experts(
            "gpt_oss" if layer.shape.interleaved else "qwen3_moe", TINY, "cpu"
        ).double()
        merged.config._experts_implementation = "eager"
        add(merged.gate_up_proj, lora.gate_up, layer.shape)
        add(merged.down_proj, lora.down, layer.shape)
        want = merged(inputs[0].double(), inputs[1], inputs[2].double())
        error = (got - want).norm() / want.norm()
        base = run_experts(layer.base, *inputs)
        assert float(error) < 0.01
        assert float((base - want).norm() / want.norm()) > 20 * float(error)


def add(parameter: Tensor, part: ExpertWeights | None, shape: ExpertShape) -> None:
    if part is None:
        return
    a, b = part.a.double(), part.b.double()
    if part.gate_rank is not None:  # gate's rows of B know nothing of up's A, and the reverse
        b = b.clone()
        gate = slice(0, None, 2) if shape.interleaved else slice(0, shape.inner)
        up = slice(1, None, 2) if shape.interleaved else slice(shape.inner, None)
        b[:, gate, part.gate_rank :] = 0
        b[:, up, : part.gate_rank] = 0
    delta = part.scale * b @ a
    parameter += delta.mT if shape.transposed else delta


def test_a_token_does_not_see_the_adapters_of_the_others(layer: Layer) -> None:
    inputs = layer.inputs(8)
    base = run_experts(layer.base, *inputs)
    alone = [layer.run([slot] * 8, inputs) for slot in range(4)]
    for slots in ([0, 1, 2, 3, -1, 0, 1, 2], [2, -1, -1, 0, 0, 0, 1, 3]):
        mixed = layer.run(slots, inputs)
        for token, slot in enumerate(slots):
            want = base[token] if slot < 0 else alone[slot][token]
            assert torch.equal(bits(mixed[token]), bits(want))
    assert torch.equal(bits(alone[3]), bits(base))  # the slot without factors
    assert not torch.equal(alone[0], base)


def test_without_routing_it_is_the_base_alone(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = layer.inputs(4)
    want = run_experts(layer.base, *inputs)
    assert folds(layer, [-1] * 4, inputs, monkeypatch) == []
    assert torch.equal(bits(layer.run([-1] * 4, inputs)), bits(want))
    assert torch.equal(bits(layer.experts(*inputs)), bits(want))


def test_one_plan_for_all_projections_and_steps(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    fold = layer_module.moe_lora_grouped_down

    def record(*operands: Any, plan: Any, **more: Any) -> None:
        plans.append(plan)
        fold(*operands, plan=plan, **more)

    monkeypatch.setattr(layer_module, "moe_lora_grouped_down", record)
    layer.routing.begin([0, 1])
    layer.routing.step(2, 3, 3)
    for seed in (1, 2):
        layer.experts(*layer.inputs(6, seed))
    assert len(plans) == 6
    assert len(set(map(id, plans))) == 1
    layer.routing.step(2, 1, 1)
    layer.experts(*layer.inputs(2))
    layer.routing.end()
    assert plans[-1] is not plans[0]
    assert plans[-1].num_rows == 2 * TINY.top_k


def test_another_number_of_tokens_is_an_error(layer: Layer) -> None:
    with pytest.raises(RouteError, match="`experts` got 3 tokens, but this forward has 2"):
        layer.run([0, 1], layer.inputs(3))


def test_it_looks_like_the_experts(layer: Layer) -> None:
    assert layer.experts.num_experts == TINY.num_experts
    assert layer.experts.gate_up_proj is layer.base.gate_up_proj
    assert "RoutedExperts(\n  max_loras=4, max_rank=8" in repr(layer.experts)


# At the size of a real model


@pytest.fixture(scope="module")
def real() -> Layer:
    return Layer("qwen3_moe", QWEN3, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 8, 300, 4096])
def test_deltas_of_a_real_layer(
    real: Layer, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = [(7 * token) % 5 - 1 for token in range(num_tokens)]
    slots[0] = 0

    def sample(num_rows: int) -> list[int]:
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(3))
        return rows[:64].tolist()

    check_folds(real, slots, real.inputs(num_tokens), monkeypatch, sample)


@pytest.mark.gpu
def test_base_tokens_of_a_real_layer_do_not_see_adapters_or_others(real: Layer) -> None:
    hidden, index, weights = real.inputs(256)
    base = run_experts(real.base, hidden, index, weights)
    mixed = real.run([-1] * 128 + [0, 1] * 64, (hidden, index, weights))
    assert torch.equal(bits(mixed[:128]), bits(base[:128]))
    assert not torch.equal(mixed[128:], base[128:])
    index[128:] = index[128:].roll(1, 0)  # as if adapters had sent the others elsewhere
    again = run_experts(real.base, hidden, index, weights)
    assert torch.equal(bits(again[:128]), bits(base[:128]))


@pytest.mark.gpu
def test_a_captured_layer_follows_experts_and_adapters(real: Layer) -> None:
    hidden, index, weights = (t.clone() for t in real.inputs(16))
    first, second = [0, 1, 2, 3, -1] * 3 + [0], [2, -1, 0, 0, 1] * 3 + [1]
    real.run(first, (hidden, index, weights))
    real.routing.begin(first)
    real.experts(hidden, index, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = real.experts(hidden, index, weights)
    real.routing.end()
    for slots, seed in ((first, 1), (second, 5), (first, 6)):
        for held, new in zip((hidden, index, weights), real.inputs(16, seed), strict=True):
            held.copy_(new)
        want = real.run(slots, (hidden, index, weights))
        real.routing.begin(slots)
        graph.replay()
        real.routing.end()
        assert torch.equal(bits(captured), bits(want))
