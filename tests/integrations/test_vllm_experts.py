"""vLLM's expert LoRA interface as the plugin implements it, without vLLM, bit for bit.

The truth of a (token, choice) row is the CPU reference on that row alone; the down projection's
delta is weighted, which takes one rounding more.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from lorafold.errors import BackendError, RouteError
from lorafold.integrations.vllm import moe
from lorafold.ops import reference
from tests.integrations.vllm_layers import (
    Pair,
    experts,
    folded,
    outputs,
    pair,
    punica,
    rows,
    start_step,
)
from tests.ops.cases import assert_same_bits, bits

HIDDEN, INNER, NUM_EXPERTS, TOP_K, MAX_LORAS, MAX_RANK = 40, 24, 4, 2, 2, 8
SLOTS = [1, -1, 0, 1, 0, -1, 1]
RANKS = (3, 8)


class Site:
    """One layer of experts with two adapters that adapt all of them."""

    def __init__(self, *, fused: bool = False, shared: bool = False) -> None:
        self.step = punica(MAX_LORAS)
        self.layer = experts(
            HIDDEN, INNER, NUM_EXPERTS, MAX_LORAS, MAX_RANK, fused=fused, shared=shared
        )
        self.target = self.step.target(self.layer)
        self.outs = [2 * INNER] if fused else [INNER, INNER]
        self.shared = shared
        # w13[slot, expert] is one pair per slice; scales differ by expert
        self.w13 = {
            (s, e): [self._pair(HIDDEN, n, s, e, i) for i, n in enumerate(self.outs)]
            for s, e in itertools.product(range(MAX_LORAS), range(NUM_EXPERTS))
        }
        self.w2 = {key: self._pair(INNER, HIDDEN, *key, 9) for key in self.w13}
        if shared:
            for s, e in self.w13:
                for i, first in enumerate(self.w13[s, 0]):
                    own = self.w13[s, e][i]
                    self.w13[s, e][i] = Pair(first.a, own.b, own.scale)
                own = self.w2[s, e]
                self.w2[s, e] = Pair(own.a, self.w2[s, 0].b, own.scale)
        self._load()

    def _pair(self, k_in: int, n_out: int, slot: int, expert: int, part: int) -> Pair:
        seed = 100 * slot + 10 * expert + part
        return pair(k_in, n_out, RANKS[slot], seed=seed, scale=(expert + 2) / 3)

    def _load(self) -> None:
        layer, target = self.layer, self.target
        for (s, e), own in self.w13.items():
            r = RANKS[s]
            for i, part in enumerate(own):
                layer.w13_lora_a_stacked[i][s, 0 if self.shared else e, :r] = part.a
                layer.w13_lora_b_stacked[i][s, e, :, :r] = part.b
            layer.w2_lora_a_stacked[0][s, e, :r] = self.w2[s, e].a
            layer.w2_lora_b_stacked[0][s, 0 if self.shared else e, :, :r] = self.w2[s, e].b
        for s in range(MAX_LORAS):
            scales = [self.w2[s, e].scale for e in range(NUM_EXPERTS)]
            for i in range(len(self.outs)):
                target.w13.place(s, i, RANKS[s], scales)
            target.w2.place(s, 0, RANKS[s], scales)

    def w13_call(self, y: Tensor, x: Tensor, topk_ids: Tensor, **kwargs):
        layer = self.layer
        a, b = layer.w13_lora_a_stacked, layer.w13_lora_b_stacked
        if self.shared:
            a = tuple(t.expand(-1, NUM_EXPERTS, -1, -1) for t in a)
        num_tokens = topk_ids.shape[0]
        settings = (num_tokens, TOP_K, MAX_LORAS, None, NUM_EXPERTS, TOP_K, len(a), False, False)
        expert_map = kwargs.pop("expert_map", None)
        return self.target.add_lora_w13(
            y, x, a, b, topk_ids, None, expert_map, None, None, *settings, **kwargs
        )

    def w2_call(self, y: Tensor, x: Tensor, weights: Tensor, handed) -> None:
        layer = self.layer
        settings = (y.shape[0], None, None, TOP_K, MAX_LORAS, None, TOP_K, False, 0, False)
        self.target.add_lora_w2(
            y, x, layer.w2_lora_a_stacked, layer.w2_lora_b_stacked, weights, *handed, *settings
        )

    def w13_truth(self, y: Tensor, x: Tensor, topk_ids: Tensor, slots: list[int]) -> Tensor:
        expected = y.clone()
        for t, k in itertools.product(range(len(slots)), range(TOP_K)):
            own = self.w13.get((slots[t], int(topk_ids[t, k])))
            if own is not None:
                parts = zip(y[t, k].split(self.outs), own, strict=True)
                expected[t, k] = torch.cat([folded(part, x[t], p, "gemv") for part, p in parts])
        return expected

    def w2_truth(
        self, y: Tensor, x: Tensor, weights: Tensor, topk_ids: Tensor, slots: list[int]
    ) -> Tensor:
        expected = y.clone()
        for t, k in itertools.product(range(len(slots)), range(TOP_K)):
            own = self.w2.get((slots[t], int(topk_ids[t, k])))
            if own is None:
                continue
            delta = reference.delta_rows(x[t * TOP_K + k].unsqueeze(0), own.a, own.b, "gemv")
            scaled = reference.fold(torch.zeros_like(delta), delta, own.scale)[0]
            expected[t, k] = (y[t, k].float() + weights[t, k] * scaled.float()).bfloat16()
        return expected


def operands(num_tokens: int, columns: int):
    topk_ids = torch.stack(
        [torch.randperm(NUM_EXPERTS, generator=_seeded(t))[:TOP_K] for t in range(num_tokens)]
    ).int()
    weights = torch.rand(num_tokens, TOP_K, generator=_seeded(99))
    y13 = outputs(num_tokens * TOP_K, columns).view(num_tokens, TOP_K, -1)
    y2 = outputs(num_tokens * TOP_K, HIDDEN, seed=2).view(num_tokens, TOP_K, -1)
    return topk_ids, weights, rows(num_tokens, HIDDEN), rows(num_tokens * TOP_K, INNER), y13, y2


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FORMS = [
    pytest.param({}, id="gate-and-up"),
    pytest.param({"fused": True}, id="fused"),
    pytest.param({"shared": True}, id="shared-factors"),
]


@pytest.mark.parametrize("form", FORMS)
def test_both_projections_equal_the_reference(form):
    site = Site(**form)
    topk_ids, weights, x13, x2, y13, y2 = operands(len(SLOTS), 2 * INNER)
    expected13 = site.w13_truth(y13, x13, topk_ids, SLOTS)
    expected2 = site.w2_truth(y2, x2, weights, topk_ids, SLOTS)
    before = y2.clone()
    start_step(site.step, SLOTS)
    handed = site.w13_call(y13, x13, topk_ids)
    site.w2_call(y2, x2, weights, handed)
    assert_same_bits(y13, expected13, "gate and up")
    assert_same_bits(y2, expected2, "down")
    base = [t for t, slot in enumerate(SLOTS) if slot < 0]
    assert_same_bits(y2[base], before[base], "base tokens")
    assert not bits(y2[0]).equal(bits(before[0]))


def test_padded_tokens_have_no_adapter():
    site = Site()
    num_tokens = len(SLOTS) + 9
    topk_ids, weights, x13, x2, y13, y2 = operands(num_tokens, 2 * INNER)
    slots = SLOTS + [-1] * 9
    expected13 = site.w13_truth(y13, x13, topk_ids, slots)
    expected2 = site.w2_truth(y2, x2, weights, topk_ids, slots)
    start_step(site.step, [1] * 30)
    start_step(site.step, SLOTS)
    site.w2_call(y2, x2, weights, site.w13_call(y13, x13, topk_ids))
    assert_same_bits(y13, expected13)
    assert_same_bits(y2, expected2)


def test_a_token_alone_has_the_bits_of_the_batch():
    site = Site()
    topk_ids, weights, x13, x2, y13, y2 = operands(len(SLOTS), 2 * INNER)
    alone13, alone2 = y13.clone(), y2.clone()
    start_step(site.step, SLOTS)
    site.w2_call(y2, x2, weights, site.w13_call(y13, x13, topk_ids))
    for t, slot in enumerate(SLOTS):
        start_step(site.step, [slot])
        at = slice(t, t + 1)
        handed = site.w13_call(alone13[at], x13[at], topk_ids[at])
        site.w2_call(alone2[at], x2[t * TOP_K : (t + 1) * TOP_K], weights[at], handed)
    assert_same_bits(alone13, y13)
    assert_same_bits(alone2, y2)


def test_experts_of_other_ranks_are_left_alone():
    """Expert parallelism: ids of all experts, a map to this rank's, slots of dispatched tokens."""
    site = Site()
    topk_ids, weights, x13, x2, y13, y2 = operands(5, 2 * INNER)
    everyones = torch.tensor([-1, 2, -1, 0, 3, -1, 1, -1])  # this rank has four of eight
    topk_ids = torch.tensor([[1, 0], [3, 4], [6, 7], [5, 2], [4, 1]])
    local = everyones[topk_ids]
    slots = torch.tensor([1, 0, 1, 0, -1], dtype=torch.int32)
    expected13 = site.w13_truth(y13, x13, local, slots.tolist())
    expected2 = site.w2_truth(y2, x2, weights, local, slots.tolist())
    start_step(site.step, [-1])  # this rank's own tokens are all base
    handed = site.w13_call(y13, x13, topk_ids, expert_map=everyones, token_lora_mapping=slots)
    site.w2_call(y2, x2, weights, handed)
    assert_same_bits(y13, expected13)
    assert_same_bits(y2, expected2)


def test_up_before_gate():
    """Some back ends of vLLM hand the slices over in the other order."""
    site = Site()
    topk_ids, _, x13, _, y13, _ = operands(len(SLOTS), 2 * INNER)
    turned = torch.cat([y13[..., INNER:], y13[..., :INNER]], dim=-1)
    expected = site.w13_truth(y13, x13, topk_ids, SLOTS)
    start_step(site.step, SLOTS)
    layer = site.layer
    a, b = layer.w13_lora_a_stacked[::-1], layer.w13_lora_b_stacked[::-1]
    site.target.add_lora_w13(turned, x13, a, b, topk_ids, None, None)
    assert_same_bits(turned, torch.cat([expected[..., INNER:], expected[..., :INNER]], dim=-1))


def test_base_tokens_launch_nothing(monkeypatch):
    site = Site()
    monkeypatch.setattr(moe, "routed_delta", None)
    topk_ids, weights, x13, x2, y13, y2 = operands(3, 2 * INNER)
    before = y13.clone(), y2.clone()
    start_step(site.step, [-1, -1, -1])
    handed = site.w13_call(y13, x13, topk_ids)
    site.w2_call(y2, x2, weights, handed)
    assert handed == (None, None, None, None)
    assert_same_bits(y13, before[0])
    assert_same_bits(y2, before[1])


def test_dual_stream_is_refused():
    site = Site()
    topk_ids, _, x13, _, y13, _ = operands(1, 2 * INNER)
    start_step(site.step, [0])
    with pytest.raises(BackendError, match="DUAL_STREAM"):
        site.w13_call(y13, x13, topk_ids, add_inputs=False)


def test_operands_that_do_not_fit():
    site = Site()
    topk_ids, weights, x13, x2, y13, y2 = operands(3, 2 * INNER)
    start_step(site.step, [0, 1, 0])
    with pytest.raises(RouteError, match="x must be"):
        site.w13_call(y13, x13[:, 8:], topk_ids)
    with pytest.raises(RouteError, match="rows of x"):
        site.w13_call(y13, x13[:2], topk_ids)
    with pytest.raises(RouteError, match="float32"):
        site.w13_call(y13.float(), x13, topk_ids)
    handed = site.w13_call(y13, x13, topk_ids)
    with pytest.raises(RouteError, match="x must be"):
        site.w2_call(y2, x2[:, 8:], weights, handed)
