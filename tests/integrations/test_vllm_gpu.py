"""The plugin's layers under CUDA graph capture, as vLLM captures them: padded, replayed many times.

A graph is captured once for a padded row count; the steps that it then serves have fewer rows,
other slots, and no call of Python in between. Bits are those of the CPU reference.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafold.ops import reference
from tests.integrations.vllm_layers import (
    Pair,
    experts,
    folded,
    linear,
    outputs,
    pair,
    punica,
    put,
    rows,
    start_step,
)
from tests.ops.cases import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMERICS = ("gemv", "mma")
MAX_LORAS, MAX_RANK = 4, 32
RANKS = (32, 8, 5, 16)
STEPS = [[0, 1, -1, 2, 3, 0], [-1], [3] * 31, [2, -1, 2], [-1, 1] * 16]


def captured(call) -> torch.cuda.CUDAGraph:
    """The call in a graph, warmed up first as vLLM does."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(
    ("k_in", "n_outs"),
    [pytest.param(2048, (512, 128, 128), id="qkv"), pytest.param(1032, (264,), id="o")],
)
def test_dense_layer_replayed(numerics, k_in, n_outs):
    step = punica(MAX_LORAS, device="cuda", max_tokens=256)
    step.numerics = numerics
    layer = linear(k_in, n_outs, MAX_LORAS, MAX_RANK, "cuda")
    target = step.target(layer)
    pairs = [
        {i: pair(k_in, n, rank, seed=10 * s + i) for i, n in enumerate(n_outs)}
        for s, rank in enumerate(RANKS)
    ]
    for slot, own in enumerate(pairs):
        put(layer, target, slot, own)
    padded = 32
    x, start = rows(padded, k_in), outputs(padded, sum(n_outs))
    x_device, y = x.cuda(), start.cuda()

    def call() -> None:
        target.add_lora_linear(y, x_device, (), (), 1.0, n_outs)

    start_step(step, [i % MAX_LORAS for i in range(padded)])
    graph = captured(call)
    start_step(step, [0] * 200)  # a long step in between, as a prefill
    for slots in STEPS:
        start_step(step, slots)
        y.copy_(start)
        graph.replay()
        expected = start.clone()
        for i, slot in enumerate(slots):
            parts = enumerate(start[i].split(n_outs))
            if slot >= 0:
                expected[i] = torch.cat(
                    [folded(part, x[i], pairs[slot][s], numerics) for s, part in parts]
                )
        assert_same_bits(y, expected, f"{slots}")


def test_base_graph_is_empty():
    """The graphs without adapters are captured with base rows only, and hold no launch of ours."""
    step = punica(MAX_LORAS, device="cuda")
    layer = linear(256, (64,), MAX_LORAS, MAX_RANK, "cuda")
    target = step.target(layer)
    x, y = rows(16, 256).cuda(), outputs(16, 64).cuda()
    start_step(step, [-1] * 16)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    target.add_lora_linear(y, x, (), (), 1.0, (64,))
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    cuda = torch.profiler.ProfilerActivity.CUDA
    # acc_events: without it torch 2.11 warns that the events of an earlier cycle are lost.
    with torch.profiler.profile(activities=[cuda], acc_events=True) as profile:
        target.add_lora_linear(y, x, (), (), 1.0, (64,))
        torch.cuda.synchronize()
    assert not [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_adapter_swapped_under_a_graph():
    step = punica(2, device="cuda")
    layer = linear(512, (96,), 2, MAX_RANK, "cuda")
    target = step.target(layer)
    old, new = pair(512, 96, 32, seed=1), pair(512, 96, 3, seed=2, scale=0.3)
    put(layer, target, 1, {0: old})
    x, start = rows(16, 512), outputs(16, 96)
    x_device, y = x.cuda(), start.cuda()
    slots = [1, -1, 0, 1]
    start_step(step, slots)
    graph = captured(lambda: target.add_lora_linear(y, x_device, (), (), 1.0, (96,)))
    for own in (old, new):
        target.tables.clear(1)
        layer.lora_a_stacked[0][1], layer.lora_b_stacked[0][1] = 0, 0
        put(layer, target, 1, {0: own})
        step.refresh()
        y.copy_(start)
        graph.replay()
        expected = start.clone()
        for i in (0, 3):
            expected[i] = folded(start[i], x[i], own, "mma" if step.numerics == "mma" else "gemv")
        assert_same_bits(y, expected)


def expert_pairs(hidden: int, inner: int, num_experts: int) -> dict[tuple[int, int], list[Pair]]:
    return {
        (s, e): [
            pair(hidden, inner, rank, seed=100 * s + 10 * e),
            pair(hidden, inner, rank, seed=100 * s + 10 * e + 1),
            pair(inner, hidden, rank, seed=100 * s + 10 * e + 2),
        ]
        for s, rank in enumerate(RANKS)
        for e in range(num_experts)
    }


def expert_truth(
    start: tuple[Tensor, Tensor],
    x13: Tensor,
    x2: Tensor,
    weights: Tensor,
    topk_ids: Tensor,
    slots: list[int],
    pairs: dict[tuple[int, int], list[Pair]],
    numerics: str,
) -> tuple[Tensor, Tensor]:
    y13, y2 = (t.clone() for t in start)
    top_k, inner = topk_ids.shape[1], x2.shape[1]
    for t, slot in enumerate(slots):
        for k in range(top_k) if slot >= 0 else []:
            gate, up, down = pairs[slot, int(topk_ids[t, k])]
            halves = zip(start[0][t, k].split(inner), (gate, up), strict=True)
            y13[t, k] = torch.cat([folded(part, x13[t], own, numerics) for part, own in halves])
            row = x2[t * top_k + k].unsqueeze(0)
            delta = reference.delta_rows(row, down.a, down.b, numerics)
            scaled = reference.fold(torch.zeros_like(delta), delta, down.scale)[0].float()
            y2[t, k] = (start[1][t, k].float() + weights[t, k] * scaled).bfloat16()
    return y13, y2


@pytest.mark.parametrize("numerics", NUMERICS)
def test_experts_replayed(numerics):
    """Routing changes from replay to replay too."""
    hidden, inner, num_experts, top_k, padded = 1032, 256, 8, 4, 32
    step = punica(MAX_LORAS, device="cuda")
    step.numerics = numerics
    layer = experts(hidden, inner, num_experts, MAX_LORAS, MAX_RANK, device="cuda")
    target = step.target(layer)
    pairs = expert_pairs(hidden, inner, num_experts)
    for (s, e), (gate, up, down) in pairs.items():
        r = gate.rank
        for i, own in enumerate((gate, up)):
            layer.w13_lora_a_stacked[i][s, e, :r] = own.a
            layer.w13_lora_b_stacked[i][s, e, :, :r] = own.b
            target.w13.place(s, i, r, own.scale)
        layer.w2_lora_a_stacked[0][s, e, :r] = down.a
        layer.w2_lora_b_stacked[0][s, e, :, :r] = down.b
        target.w2.place(s, 0, r, down.scale)
    x13, x2 = rows(padded, hidden), rows(padded * top_k, inner, seed=3)
    start13 = outputs(padded * top_k, 2 * inner).view(padded, top_k, -1)
    start2 = outputs(padded * top_k, hidden, seed=5).view(padded, top_k, -1)
    held = [t.cuda() for t in (x13, x2, start13, start2)]
    topk_ids = torch.zeros(padded, top_k, dtype=torch.int32, device="cuda")
    weights = torch.zeros(padded, top_k, device="cuda")

    def call() -> None:
        x13_device, x2_device, y13, y2 = held
        a, b = layer.w13_lora_a_stacked, layer.w13_lora_b_stacked
        handed = target.add_lora_w13(y13, x13_device, a, b, topk_ids, weights, None)
        target.add_lora_w2(y2, x2_device, (), (), weights, *handed)

    start_step(step, [i % MAX_LORAS for i in range(padded)])
    graph = captured(call)
    generator = torch.Generator().manual_seed(0)
    for slots in STEPS:
        ids = torch.stack(
            [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(padded)]
        )
        own_weights = torch.rand(padded, top_k, generator=generator)
        topk_ids.copy_(ids)
        weights.copy_(own_weights)
        held[2].copy_(start13)
        held[3].copy_(start2)
        start_step(step, slots)
        graph.replay()
        expected = expert_truth(
            (start13, start2), x13, x2, own_weights, ids, slots, pairs, numerics
        )
        assert_same_bits(held[2], expected[0], f"gate and up, {slots}")
        assert_same_bits(held[3], expected[1], f"down, {slots}")
