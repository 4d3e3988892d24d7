"""vLLM's LoRA interface as the plugin implements it, without vLLM: dense layers, bit for bit.

The truth of a row is the CPU reference on that row alone, at the adapter's true rank and scale.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorafold.errors import BackendError, RouteError
from lorafold.integrations import vllm as plugin
from lorafold.integrations.vllm import fold
from lorafold.ops import reference
from tests.integrations.vllm_layers import (
    Pair,
    folded,
    linear,
    outputs,
    pair,
    punica,
    put,
    rows,
    start_step,
)
from tests.ops.cases import assert_same_bits, bits

K_IN, OUTS, MAX_RANK, MAX_LORAS = 48, (40, 16, 16), 16, 3
SLOTS = [0, -1, 2, 1, 0, -1, 2]


class Site:
    """A packed q/k/v layer with three adapters; the last adapts q and v only."""

    def __init__(self, numerics: str = "gemv") -> None:
        self.step = punica(MAX_LORAS)
        self.step.numerics = numerics
        self.layer = linear(K_IN, OUTS, MAX_LORAS, MAX_RANK)
        self.target = self.step.target(self.layer)
        self.pairs = [
            {i: pair(K_IN, n, rank, seed=10 * slot + i) for i, n in enumerate(OUTS)}
            for slot, rank in enumerate((4, 16, 7))
        ]
        del self.pairs[2][1]
        for slot, own in enumerate(self.pairs):
            put(self.layer, self.target, slot, own)

    def call(self, y: Tensor, x: Tensor) -> None:
        layer = self.layer
        self.target.add_lora_linear(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0, OUTS)

    def truth(self, y: Tensor, x: Tensor, slots: list[int]) -> Tensor:
        expected = y.clone()
        for i, slot in enumerate(slots):
            if slot >= 0:
                parts = y[i].split(OUTS)
                expected[i] = torch.cat(
                    [
                        folded(part, x[i], self.pairs[slot].get(s), self.step.numerics)
                        for s, part in enumerate(parts)
                    ]
                )
        return expected


@pytest.mark.parametrize("numerics", ["gemv", "mma"])
def test_packed_slices_equal_the_reference(numerics):
    site = Site(numerics)
    x, y = rows(len(SLOTS), K_IN), outputs(len(SLOTS), sum(OUTS))
    expected = site.truth(y, x, SLOTS)
    before = y.clone()
    start_step(site.step, SLOTS)
    site.call(y, x)
    assert_same_bits(y, expected)
    base = [i for i, slot in enumerate(SLOTS) if slot < 0]
    assert_same_bits(y[base], before[base], "base rows")
    assert not bits(y[0]).equal(bits(before[0]))


@settings(deadline=None, max_examples=25)
@given(slots=st.lists(st.integers(-1, MAX_LORAS - 1), min_size=1, max_size=9), data=st.data())
def test_a_row_alone_has_the_bits_of_the_batch(slots, data):
    site = Site()
    x, y = rows(len(slots), K_IN), outputs(len(slots), sum(OUTS))
    alone = y.clone()
    start_step(site.step, slots)
    site.call(y, x)
    order = data.draw(st.permutations(range(len(slots))))
    for i in order:
        start_step(site.step, [slots[i]])
        row = alone[i : i + 1]
        site.call(row, x[i : i + 1])
    assert_same_bits(alone, y)


def test_padded_rows_have_no_adapter():
    """A replayed graph has more rows than the step, and the step before may have been longer."""
    site = Site()
    start_step(site.step, [1] * 20)
    start_step(site.step, SLOTS)
    x, y = rows(24, K_IN), outputs(24, sum(OUTS))
    expected = site.truth(y, x, SLOTS + [-1] * 17)
    site.call(y, x)
    assert_same_bits(y, expected)


def test_base_rows_launch_nothing(monkeypatch):
    site = Site()
    start_step(site.step, SLOTS)
    calls = []
    monkeypatch.setattr(fold, "routed_delta", lambda *args, **kwargs: calls.append(args))
    x, y = rows(4, K_IN), outputs(4, sum(OUTS))
    before = y.clone()
    start_step(site.step, [-1] * 4)
    site.call(y, x)
    assert not calls
    assert_same_bits(y, before)
    start_step(site.step, [-1, 0, -1, -1])
    site.call(y, x)
    assert len(calls) == 1  # three slices, one call


def test_metadata_stays_where_it_is():
    site = Site()
    tables, tokens = site.target.tables, site.step.tokens
    held = [tables.a_table, tables.scale_table, tokens.slots, tokens.any_adapter]
    held.append(site.step.embedding_indices)
    addresses = [t.data_ptr() for t in held]
    for slots in ([0, 1], [-1] * 5, [2] * 30, []):
        start_step(site.step, slots, slots)
        put(site.layer, site.target, 1, site.pairs[0])
    assert [t.data_ptr() for t in held] == addresses


def test_a_slot_is_taken_over():
    """More adapters than slots: another adapter, of a smaller rank and fewer slices, moves in."""
    site = Site()
    new = {0: pair(K_IN, OUTS[0], 2, seed=77, scale=0.1)}
    for stacked in (*site.layer.lora_a_stacked, *site.layer.lora_b_stacked):
        stacked[1] = 0
    site.target.tables.clear(1)
    put(site.layer, site.target, 1, new)
    site.pairs[1] = new
    slots = [1, 0, 1]
    x, y = rows(3, K_IN), outputs(3, sum(OUTS))
    expected = site.truth(y, x, slots)
    start_step(site.step, slots)
    site.call(y, x)
    assert_same_bits(y, expected)


def test_scale_is_float32_and_rank_is_true():
    """What vLLM's own arithmetic would give differs: the scale rounded into B."""
    site = Site()
    own = site.pairs[0]
    x, y = rows(1, K_IN), outputs(1, sum(OUTS))
    expected = site.truth(y, x, [0])
    merged = {i: Pair(p.a, (p.b.float() * p.scale).bfloat16(), 1.0) for i, p in own.items()}
    merged_y = torch.cat(
        [folded(part, x[0], merged[s], "gemv") for s, part in enumerate(y[0].split(OUTS))]
    )
    assert not bits(merged_y).equal(bits(expected[0]))
    # What lies beyond the true rank takes no part, not even as NaN.
    for stacked in site.layer.lora_a_stacked:
        stacked[0, 0, own[0].rank :] = torch.nan
    start_step(site.step, [0])
    site.call(y, x)
    assert_same_bits(y, expected)


def test_traced_as_one_opaque_call():
    """torch.compile makes one graph, and the host flag and the slots are read when it runs."""
    site = Site()
    x = rows(6, K_IN)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph

    def forward(x: Tensor, y: Tensor) -> Tensor:
        y = y * 1
        site.call(y, x)
        return y

    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    for slots in ([-1] * 6, [0, 1, -1, 2, 2, 0], [1] * 6):
        y = outputs(6, sum(OUTS))
        start_step(site.step, slots)
        assert_same_bits(compiled(x, y), site.truth(y * 1, x, slots))
    assert len(graphs) == 1
    assert torch.ops.lorafold.fold_rows in graphs[0]


def test_functionalized():
    """AOTAutograd, which torch.compile puts before every real back end, keeps the mutation."""
    site = Site()
    x, y = rows(4, K_IN), outputs(4, sum(OUTS))
    start_step(site.step, [0, -1, 1, 2])

    def forward(x: Tensor, y: Tensor) -> Tensor:
        y = y * 1
        site.call(y, x)
        return y

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert_same_bits(compiled(x, y), site.truth(y * 1, x, [0, -1, 1, 2]))


def test_embedding():
    """x holds rows of A already; the delta is their product with B."""
    vocabulary, hidden, max_rank = 24, 32, 8
    step = punica(2)
    layer = SimpleNamespace(
        lora_a_stacked=torch.zeros(2, vocabulary, max_rank, dtype=torch.bfloat16),
        lora_b_stacked=torch.zeros(2, 1, hidden, max_rank, dtype=torch.bfloat16),
    )
    target = step.target(layer)
    adapters = [pair(vocabulary, hidden, rank, seed=rank) for rank in (3, 8)]
    for slot, own in enumerate(adapters):
        layer.lora_a_stacked[slot, :, : own.rank] = own.a.T
        layer.lora_b_stacked[slot, 0, :, : own.rank] = own.b
        target.tables.place(slot, 0, own.rank, own.scale)
    slots, tokens = [1, -1, 0, 1], torch.tensor([5, 7, 23, 0])
    start_step(step, slots, vocabulary=vocabulary)
    flat = layer.lora_a_stacked.view(-1, max_rank)
    gathered = flat[tokens + target._embeddings_indices[:4]]
    y = outputs(4, hidden)
    expected = y.clone()
    for i, slot in enumerate(slots):
        if slot >= 0:
            own = adapters[slot]
            xa = own.a.T[tokens[i]].unsqueeze(0)
            delta = reference.round_bf16(reference.dot(xa, own.b, "gemv"))
            expected[i] = reference.fold(y[i : i + 1], delta, own.scale)[0]
    target.add_lora_embedding(y, gathered, layer.lora_b_stacked, add_input=True)
    assert_same_bits(y, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_head(dtype):
    """Sampled rows have their own slots; logits may be wider than the vocabulary, and float32."""
    hidden, vocabulary, padded = 48, 40, 48
    step = punica(2)
    layer = SimpleNamespace(
        lora_a_stacked=torch.zeros(2, 1, 8, hidden, dtype=torch.bfloat16),
        lora_b_stacked=torch.zeros(2, 1, vocabulary, 8, dtype=torch.bfloat16),
    )
    target = step.target(layer)
    own = pair(hidden, vocabulary, 5)
    layer.lora_a_stacked[1, 0, :5], layer.lora_b_stacked[1, 0, :, :5] = own.a, own.b
    target.tables.place(1, 0, 5, own.scale)
    start_step(step, [1] * 9, samples=[-1, 1, 0])
    x = rows(3, hidden)
    y = outputs(3, padded).to(dtype)
    expected = y.clone()
    delta = reference.delta_rows(x[1:2], own.a, own.b, "gemv")
    if dtype == torch.float32:
        scaled = reference.fold(torch.zeros_like(delta), delta, own.scale)
        expected[1, :vocabulary] = y[1, :vocabulary] + scaled[0].float()
    else:
        expected[1, :vocabulary] = reference.fold(y[1:2, :vocabulary], delta, own.scale)[0]
    target.add_lora_logits(y, x, layer.lora_a_stacked, layer.lora_b_stacked, 1.0)
    assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))


def shard(site: Site, rank: int) -> tuple[Site, Tensor]:
    """Half of the output columns of every slice, as tensor parallelism cuts a column layer."""
    half = Site()
    outs = [n // 2 for n in OUTS]
    half.layer = linear(K_IN, outs, MAX_LORAS, MAX_RANK)
    half.target = half.step.target(half.layer)
    for slot, pairs in enumerate(site.pairs):
        cut = {
            i: Pair(p.a, p.b[rank * outs[i] : (rank + 1) * outs[i]].contiguous(), p.scale)
            for i, p in pairs.items()
        }
        put(half.layer, half.target, slot, cut)
    starts = [0, *torch.tensor(OUTS).cumsum(0).tolist()]
    columns = [torch.arange(n) + starts[i] + rank * n for i, n in enumerate(outs)]
    return half, torch.cat(columns)


def test_column_shards_have_the_bits_of_one_gpu():
    site = Site()
    x, y = rows(len(SLOTS), K_IN), outputs(len(SLOTS), sum(OUTS))
    expected = site.truth(y, x, SLOTS)
    for rank in range(2):
        half, columns = shard(site, rank)
        part = y[:, columns].clone()
        start_step(half.step, SLOTS)
        outs = tuple(n // 2 for n in OUTS)
        half.target.add_lora_linear(part, x, (), (), 1.0, outs)
        assert_same_bits(part, expected[:, columns], f"rank {rank}")


def test_row_shards_are_close_and_not_equal():
    """Each rank rounds its own part of xa and of the delta, and the parts are added: other bits."""
    own = pair(64, 32, 8)
    x, y = rows(5, 64), outputs(5, 32)
    total = y.float()
    for rank in range(2):
        cut = slice(32 * rank, 32 * (rank + 1))
        part = Pair(own.a[:, cut].contiguous(), own.b, own.scale)
        zeros = torch.zeros(5, 32, dtype=torch.bfloat16)
        halves = [folded(zeros[i], x[i, cut], part, "gemv") for i in range(5)]
        total += torch.stack(halves).float()
    whole = torch.stack([folded(y[i], x[i], own, "gemv") for i in range(5)])
    assert not bits(total.bfloat16()).equal(bits(whole))
    torch.testing.assert_close(total, whole.float(), rtol=2**-6, atol=2**-4)


REFUSED = [
    pytest.param({"fully_sharded_loras": True}, "fully sharded", id="fully-sharded"),
    pytest.param({"device": "meta"}, "CUDA devices and CPUs", id="device"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_settings_that_cannot_be_served(change, message):
    with pytest.raises(BackendError, match=message):
        punica(2, **change)


def test_dual_stream_is_refused():
    site = Site()
    start_step(site.step, [0])
    with pytest.raises(BackendError, match="DUAL_STREAM"):
        site.target.add_lora_linear(
            outputs(1, sum(OUTS)), rows(1, K_IN), (), (), 1.0, OUTS, add_inputs=False
        )


def test_classification_heads_are_refused():
    layer = linear(K_IN, OUTS, 2, 8)
    layer.full_weight_stacked = torch.zeros(2, 1, 3, K_IN)
    with pytest.raises(BackendError, match="classification head"):
        punica(2).target(layer)


def test_half_precision_slots_are_refused():
    layer = linear(K_IN, OUTS, 2, 8)
    layer.lora_a_stacked = tuple(t.half() for t in layer.lora_a_stacked)
    with pytest.raises(RouteError, match="bfloat16"):
        punica(2).target(layer)


MISFITS = [
    pytest.param(rows(3, K_IN), outputs(2, sum(OUTS)), "row count", id="rows"),
    pytest.param(rows(2, K_IN - 8), outputs(2, sum(OUTS)), "x must be", id="input"),
    pytest.param(rows(2, K_IN), outputs(2, sum(OUTS) - 8), "y \\[n", id="output"),
    pytest.param(rows(2, K_IN).half(), outputs(2, sum(OUTS)), "float16", id="dtype"),
    pytest.param(rows(40, K_IN), outputs(40, sum(OUTS)), "at most 32", id="too-many"),
]


@pytest.mark.parametrize(("x", "y", "message"), MISFITS)
def test_operands_that_do_not_fit(x, y, message):
    site = Site()
    start_step(site.step, [0, 1])
    before = y.clone()
    with pytest.raises(RouteError, match=message):
        site.call(y, x)
    assert_same_bits(y, before)


def test_steps_that_do_not_fit():
    step = punica(2)
    start_step(step, [0, 1])
    with pytest.raises(RouteError, match="in none"):
        start_step(step, [5])
    with pytest.raises(RouteError, match="at most 32 rows"):
        start_step(step, [0] * 33)
    assert step.tokens.slots[:3].tolist() == [0, 1, -1]


def test_switched_off(monkeypatch):
    """With LORAFOLD_VLLM=0 vLLM is not even looked for."""
    monkeypatch.setenv("LORAFOLD_VLLM", "0")
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, None)
    plugin.register()
    monkeypatch.delenv("LORAFOLD_VLLM")
    with pytest.raises(ImportError):
        plugin.register()
