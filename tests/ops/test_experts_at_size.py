"""The expert operators at the sizes of real models, on a GPU: every row against the other forms, a
sample of rows against the CPU, and graphs that are replayed with another routing.

The same checks run at a tiny size on the CPU, so that they are known to work.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.ops import (
    LoraPair,
    MoeExpertRoute,
    Plan,
    apply_lora_bgmv,
    apply_lora_delta,
    grouped_down_windows,
    moe_lora_gather_bgmv,
    moe_lora_grouped_down,
    plan_gather,
    plan_grouped,
    scratch_bytes,
)
from tests.ops.cases import assert_same_bits, bits
from tests.ops.expert_cases import dense_route

NUMERICS: tuple[Numerics, ...] = ("gemv", "mma")
RANKS = (16, 9, 4)  # per slot
MAX_RANK = 16


@dataclass(frozen=True)
class Size:
    """The routed experts of one layer."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int

    def features(self, projection: str) -> tuple[int, int]:
        if projection == "gate_up":
            return self.hidden, 2 * self.inner
        return self.inner, self.hidden


QWEN3 = Size(num_experts=128, top_k=8, hidden=2048, inner=768)  # Qwen3-30B-A3B
GPT_OSS = Size(num_experts=32, top_k=4, hidden=2880, inner=2880)
TINY = Size(num_experts=6, top_k=2, hidden=48, inner=24)


def random(*shape: int, device: str, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()


def routing(size: Size, num_tokens: int, device: str, seed: int) -> tuple[Tensor, Tensor]:
    """Experts [T * K] int32, K different ones per token, and slots [T] int32, some of them base."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.rand(num_tokens, size.num_experts, generator=generator, device=device)
    logits[:, 0] += 0.4  # one expert has many more rows than the others
    experts = logits.topk(size.top_k, dim=-1).indices.reshape(-1).int()
    low, high = -1, len(RANKS)
    slots = torch.randint(low, high, (num_tokens,), generator=generator, device=device)
    return experts, slots.int()


def grouped_form(size: Size, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(order, offsets, token ids) of expert-sorted rows, without leaving the device."""
    in_order, order = torch.sort(experts, stable=True)
    ids = torch.arange(size.num_experts + 1, device=experts.device, dtype=torch.int32)
    offsets = torch.searchsorted(in_order, ids, out_int32=True)
    return order, offsets, (order // size.top_k).int()


class Layer:
    """One projection with adapters in three slots; in slot 2 every third expert has none."""

    def __init__(self, size: Size, projection: str, device: str) -> None:
        self.size, self.device = size, device
        self.k_in, self.n_out = size.features(projection)
        shape = (len(RANKS), size.num_experts)
        self.a = random(*shape, MAX_RANK, self.k_in, device=device, seed=1, scale=0.05)
        self.b = random(*shape, self.n_out, MAX_RANK, device=device, seed=2, scale=0.05)
        for slot, rank in enumerate(RANKS):
            self.a[slot, :, rank:] = 0
            self.b[slot, :, :, rank:] = 0
        has = torch.ones(shape, dtype=torch.bool, device=device)
        has[2, ::3] = False
        self.has = has.flatten().tolist()
        keys = torch.arange(has.numel(), device=device)
        ranks = torch.tensor(RANKS, dtype=torch.int32, device=device)
        self.route = MoeExpertRoute(
            a_table=torch.where(has.flatten(), self.a.data_ptr() + keys * self.a[0, 0].nbytes, 0),
            b_table=torch.where(has.flatten(), self.b.data_ptr() + keys * self.b[0, 0].nbytes, 0),
            scale_table=torch.full((has.numel(),), 4 / 3, device=device),
            rank_table=ranks.repeat_interleave(size.num_experts),
            num_experts=size.num_experts,
            k_in=self.k_in,
            n_out=self.n_out,
            max_rank=MAX_RANK,
            storage=(self.a, self.b),
        )

    def pair(self, key: int, device: str) -> LoraPair | None:
        """The pair of a key as an adapter's file would have it: unpadded."""
        if key < 0 or not self.has[key]:
            return None
        slot, expert = divmod(key, self.size.num_experts)
        rank = RANKS[slot]
        a, b = self.a[slot, expert, :rank], self.b[slot, expert, :, :rank]
        return LoraPair(a.to(device).clone(), b.to(device).contiguous(), 4 / 3)

    def keys(self, experts: Tensor, slots: Tensor) -> Tensor:
        by_row = slots.repeat_interleave(self.size.top_k)
        return torch.where(by_row < 0, -1, by_row * self.size.num_experts + experts).int()


def check_all_forms(
    size: Size, projection: str, num_tokens: int, numerics: Numerics, device: str
) -> None:
    layer = Layer(size, projection, device)
    experts, slots = routing(size, num_tokens, device, seed=num_tokens)
    keys, top_k = layer.keys(experts, slots), size.top_k
    num_rows = num_tokens * top_k
    x_gather = int(projection == "gate_up")
    x = random(num_tokens if x_gather else num_rows, layer.k_in, device=device, seed=3)
    x_rows = x.repeat_interleave(top_k, dim=0) if x_gather else x
    before = random(num_rows, layer.n_out, device=device, seed=4, scale=0.2)

    gathered = before.clone()
    moe_lora_gather_bgmv(
        layer.route, x, gathered, experts, slots, top_k=top_k, x_gather=x_gather, numerics=numerics
    )
    changed = (gathered != before).any(dim=1).cpu()
    assert changed.tolist() == [key >= 0 and layer.has[key] for key in keys.tolist()]

    order, offsets, tokens = grouped_form(size, experts)
    for cap in (num_rows, max(1, num_rows // 3)):
        in_order = before[order]
        for begin, end in grouped_down_windows(num_rows, cap):
            moe_lora_grouped_down(
                layer.route, x if x_gather else x[order], in_order, offsets, tokens, slots,
                row_offset=begin, row_end=end, x_gather=x_gather, numerics=numerics,
            )  # fmt: skip
        assert torch.equal(in_order.view(torch.int16), gathered[order].view(torch.int16))

    dense = before.clone()
    apply_lora_bgmv(dense_route(layer.route), x_rows, dense, keys, numerics=numerics)
    assert torch.equal(dense.view(torch.int16), gathered.view(torch.int16))

    sample = {0, num_rows - 1, *torch.randperm(num_rows)[:24].tolist()}
    for row in sample:
        for where in {device, "cpu"}:
            alone = before[row : row + 1].to(where, copy=True)  # folded in place below
            pair = layer.pair(int(keys[row]), where)
            if pair is not None:
                apply_lora_delta(pair, x_rows[row : row + 1].to(where), alone, numerics=numerics)
            assert_same_bits(alone, gathered[row : row + 1], f"row {row} on {where}")


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("projection", ["gate_up", "down"])
@pytest.mark.parametrize("num_tokens", [1, 30])
def test_tiny(num_tokens: int, projection: str, numerics: Numerics) -> None:
    check_all_forms(TINY, projection, num_tokens, numerics, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("projection", ["gate_up", "down"])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 1000, 8192])
@pytest.mark.parametrize("size", [QWEN3, GPT_OSS], ids=["qwen3", "gpt_oss"])
def test_real_models(
    device: str, size: Size, num_tokens: int, projection: str, numerics: Numerics
) -> None:
    check_all_forms(size, projection, num_tokens, numerics, device)


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("form", ["gather", "grouped"])
@pytest.mark.parametrize("num_tokens", [4, 300])
@pytest.mark.parametrize("size", [QWEN3, GPT_OSS], ids=["qwen3", "gpt_oss"])
def test_a_graph_follows_the_routing(
    device: str, size: Size, num_tokens: int, form: str, numerics: Numerics
) -> None:
    """Captured once with plan and scratch, replayed with other experts, slots and activations."""
    layer = Layer(size, "gate_up", device)
    num_rows = num_tokens * size.top_k
    x = random(num_tokens, layer.k_in, device=device, seed=5)
    out = random(num_rows, layer.n_out, device=device, seed=6)
    experts, slots = routing(size, num_tokens, device, seed=7)
    _, offsets, tokens = grouped_form(size, experts)
    plan = Plan.empty(num_rows, layer.route.num_keys, device)
    needed = scratch_bytes(num_rows, 1, layer.k_in, MAX_RANK)
    scratch = torch.empty(needed, dtype=torch.uint8, device=device)

    def step(plan: Plan, scratch: Tensor | None) -> None:
        if form == "gather":
            plan_gather(layer.route, experts, slots, size.top_k, plan=plan)
            moe_lora_gather_bgmv(
                layer.route, x, out, experts, slots, top_k=size.top_k, x_gather=1, plan=plan,
                numerics=numerics, scratch=scratch,
            )  # fmt: skip
        else:
            plan_grouped(layer.route, offsets, tokens, slots, num_tokens, plan=plan)
            moe_lora_grouped_down(
                layer.route, x, out, offsets, tokens, slots, x_gather=1, plan=plan,
                numerics=numerics, scratch=scratch,
            )  # fmt: skip

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(plan, scratch)
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()  # what earlier tests left must not go away in between
    taken = []
    for call in (lambda: x.add_(0), lambda: step(plan, scratch)):
        # A capture itself takes a little memory, which the first one shows.
        held = torch.cuda.memory_allocated()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        taken.append(torch.cuda.memory_allocated() - held)
    assert taken[1] <= taken[0]
    results = []
    for seed in (8, 9, 10):
        new_experts, new_slots = routing(size, num_tokens, device, seed=seed)
        if seed == 10:
            new_experts.fill_(size.num_experts - 1)  # every row at one expert
        experts.copy_(new_experts)
        slots.copy_(new_slots)
        _, new_offsets, new_tokens = grouped_form(size, experts)
        offsets.copy_(new_offsets)
        tokens.copy_(new_tokens)
        x.copy_(random(*x.shape, device=device, seed=20 + seed))
        before = random(*out.shape, device=device, seed=30 + seed)
        out.copy_(before)
        graph.replay()
        replayed = out.clone()
        out.copy_(before)
        step(Plan.empty(num_rows, layer.route.num_keys, device), None)
        assert torch.equal(bits(replayed), bits(out))
        results.append(replayed)
    assert not torch.equal(results[0], results[1])
