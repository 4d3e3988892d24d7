"""RoutedEmbedding: each token gets its own adapter's delta, with the bits of a one-hot row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lorafold.adapter import Adapter, LoraWeights, TargetShape
from lorafold.errors import RouteError
from lorafold.layers import embedding as module
from lorafold.layers.embedding import RoutedEmbedding
from lorafold.layers.routing import Routing
from lorafold.numerics import default_numerics
from lorafold.ops import apply_lora_bgmv, apply_lora_delta
from lorafold.pool import Pool
from lorafold.route import LoraPair, LoraRoute
from tests.tiny_models import bits

VOCABULARY, HIDDEN, MAX_LORAS = 50, 24, 3
SHAPES = {
    "embed": TargetShape(VOCABULARY, HIDDEN, is_embedding=True),
    "other": TargetShape(16, 8),
}


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.bfloat16)


def weights(rank: int, scale: float, seed: int) -> LoraWeights:
    a = random(rank, VOCABULARY, seed=seed)
    # What a gather could carry into the sums and a dot product would not, or the reverse.
    a[:, 0] = -0.0
    a[0, 1], a[1, 1] = 2.0**-133, -(2.0**-130)
    a[0, 2], a[1, 2] = 3e38, -3e38
    return LoraWeights(a, random(HIDDEN, rank, seed=seed + 1), scale)


WEIGHTS = {0: weights(5, 4 / 3, 10), 2: weights(8, 0.7, 20)}


def make_pool(max_rank: int = 8, device: str = "cpu") -> Pool:
    """Slots 0 and 2 adapt the embedding, slot 1 does not."""
    pool = Pool(SHAPES, max_loras=MAX_LORAS, max_rank=max_rank, device=device)
    b = torch.ones(8, 1, dtype=torch.bfloat16)
    other = LoraWeights(torch.ones(1, 16, dtype=torch.bfloat16), b, 1.0)
    for slot in range(MAX_LORAS):
        target = {"embed": WEIGHTS[slot]} if slot in WEIGHTS else {"other": other}
        assert pool.place(Adapter(f"{slot}", target)) == slot
    return pool


def make_layer(pool: Pool, base: nn.Module | None = None) -> tuple[RoutedEmbedding, Routing]:
    if base is None:
        torch.manual_seed(0)
        base = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16).requires_grad_(False)
    base = base.to(pool.device)
    routing = Routing(pool.device, MAX_LORAS)
    return RoutedEmbedding(base, pool.route("embed"), routing, name="embed"), routing


def expected(
    base: nn.Module,
    ids: Tensor,
    slots: list[int],
    *,
    factor: float = 1.0,
    **numerics: Any,
) -> Tensor:
    """Each token on its own, through the dense operator, with a one-hot row for x."""
    rows = base(ids.reshape(-1)).clone()
    for row, (token, slot) in enumerate(zip(ids.reshape(-1).tolist(), slots, strict=True)):
        if slot in WEIGHTS:
            own = WEIGHTS[slot]
            pair = LoraPair(own.a, own.b.contiguous(), own.scale * factor)
            x = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
            x[0, token] = 1
            apply_lora_delta(pair, x, rows[row : row + 1], **numerics)
    return rows


@pytest.fixture(params=["gemv", "mma"])
def numerics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "apply_lora_bgmv", partial(apply_lora_bgmv, numerics=request.param))
    return str(request.param)


def test_every_token_has_the_bits_of_a_one_hot_row(numerics: str) -> None:
    layer, routing = make_layer(make_pool())
    ids = torch.arange(VOCABULARY).repeat(4)
    slots = [slot for slot in (-1, 0, 1, 2) for _ in range(VOCABULARY)]
    routing.begin(slots)
    out, base = layer(ids), layer.base(ids)
    want = expected(layer.base, ids, slots, numerics=numerics)
    assert torch.equal(bits(out), bits(want))
    changed = (bits(out) != bits(base)).any(dim=1).view(4, VOCABULARY)
    assert not changed[0].any()  # base
    assert not changed[2].any()  # an adapter that leaves the embedding alone
    assert changed[1, 2:].all()
    assert changed[3, 2:].all()
    assert not changed[:, 0].any()  # a column of zeros
    assert (bits(out[VOCABULARY : 2 * VOCABULARY]) != bits(out[3 * VOCABULARY :]))[2:].any()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-1, 2), st.integers(0, VOCABULARY - 1)), min_size=1, max_size=9
    ),
    max_rank=st.sampled_from([8, 11, 64]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_a_row_alone_is_the_row_in_a_batch(
    rows: list[tuple[int, int]], max_rank: int, dtype: torch.dtype
) -> None:
    layer, routing = make_layer(make_pool(max_rank))
    alone, own = make_layer(make_pool(8))
    ids = torch.tensor([token for _, token in rows], dtype=dtype)
    routing.begin([slot for slot, _ in rows])
    out = layer(ids)
    for row, (slot, _) in enumerate(rows):
        own.begin([slot])
        assert torch.equal(bits(alone(ids[row : row + 1])), bits(out[row : row + 1]))
        own.end()


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 6), (2, 1, 3)])
def test_tokens_may_be_flattened_in_any_way(shape: tuple[int, ...]) -> None:
    layer, routing = make_layer(make_pool())
    ids = torch.arange(6).reshape(shape) + 7
    routing.begin([0, 2])
    routing.step(2, 3, 3)
    out = layer(ids)
    assert out.shape == (*shape, HIDDEN)
    want = expected(layer.base, ids, [0, 0, 0, 2, 2, 2])
    assert torch.equal(bits(out.view(-1, HIDDEN)), bits(want))
    with pytest.raises(RouteError, match=r"`embed` got \(5,\) tokens, but this forward has 6"):
        layer(torch.arange(5))


def test_without_routing_it_is_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a batch of base rows must not call the operator")

    monkeypatch.setattr(module, "apply_lora_bgmv", forbidden)
    layer, routing = make_layer(make_pool())
    ids = torch.tensor([3, 4])
    assert torch.equal(layer(ids), layer.base(ids))
    routing.begin([-1, -1])
    assert torch.equal(layer(ids), layer.base(ids))
    assert layer.weight is layer.base.weight
    assert (layer.num_embeddings, layer.embedding_dim) == (VOCABULARY, HIDDEN)
    assert layer.padding_idx is None
    assert "max_loras=3, max_rank=8" in repr(layer)


class Scaled(nn.Embedding):
    """As Gemma has it: what is looked up is multiplied, in bfloat16, by a number of float32."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        self.requires_grad_(False)
        self.embed_scale = nn.Buffer(torch.tensor(HIDDEN**0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


def test_an_embedding_that_scales_scales_the_delta() -> None:
    layer, routing = make_layer(make_pool(), Scaled())
    ids, slots = torch.arange(3, 9), [0, 2, -1, 1, 0, 2]
    routing.begin(slots)
    out = layer(ids)
    factor = float(torch.tensor(HIDDEN**0.5).bfloat16())
    assert factor != HIDDEN**0.5
    rounded = {slot: LoraWeights(w.a, w.b, _f32(w.scale) * factor) for slot, w in WEIGHTS.items()}
    want = layer.base(ids)
    for row, slot in enumerate(slots):
        if slot in rounded:
            own = rounded[slot]
            x = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16)
            x[0, ids[row]] = 1
            pair = LoraPair(own.a, own.b, own.scale)
            apply_lora_delta(pair, x, want[row : row + 1])
    assert torch.equal(bits(out), bits(want))
    assert not torch.equal(bits(out), bits(expected(layer.base, ids, slots)))


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def test_what_is_placed_later_is_read_from_the_same_addresses() -> None:
    pool = make_pool()
    layer, routing = make_layer(pool)
    ids = torch.arange(3, 6)
    routing.begin([0, 1, 2])
    before = layer(ids)
    pool.place(Adapter("1", {"embed": WEIGHTS[0]}))
    after = layer(ids)
    want = expected(layer.base, ids, [0, 0, 2])
    assert torch.equal(bits(after), bits(want))
    assert (bits(before) != bits(after)).any(dim=1).tolist() == [False, True, False]


def test_the_route_must_point_into_one_tensor() -> None:
    pairs = [LoraPair(random(8, 4, seed=1), random(4, 8, seed=2), 1.0)] * 2
    routing = Routing(torch.device("cpu"), 2)
    with pytest.raises(RouteError, match="`x` must point into one tensor; given: 4"):
        RoutedEmbedding(nn.Embedding(4, 4), LoraRoute.from_pairs(pairs), routing, name="x")


def test_it_compiles_without_a_break() -> None:
    layer, routing = make_layer(make_pool())
    ids = torch.arange(3, 9)
    routing.begin([0, 2, -1, 1, 0, 2])
    want = layer(ids)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(bits(compiled(ids)), bits(want))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_captured_graph_reads_new_tokens_slots_and_adapters() -> None:
    pool = make_pool(device="cuda")
    layer, routing = make_layer(pool)
    ids = torch.arange(3, 9, device="cuda")
    run: Callable[[], Tensor] = partial(layer, ids)
    routing.begin([0, 2, -1, 1, 0, 2])
    routing.step(6, 1, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        routing.step(6, 1, 1)
        out = run()
    base = nn.Embedding.from_pretrained(layer.base.weight.cpu())
    numerics = default_numerics(pool.device)
    for slots, tokens in (
        ([0, 2, -1, 1, 0, 2], list(range(3, 9))),
        ([2, 2, 0, -1, 1, 0], [1, 0, 2, 49, 30, 8]),
    ):
        routing.end()
        routing.begin(slots)
        ids.copy_(torch.tensor(tokens))
        graph.replay()
        want = expected(base, torch.tensor(tokens), slots, numerics=numerics)
        assert torch.equal(bits(out.cpu()), bits(want))
    pool.place(Adapter("1", {"embed": WEIGHTS[0]}))
    routing.end()
    routing.begin([1] * 6)
    graph.replay()
    want = expected(base, torch.tensor(tokens), [0] * 6, numerics=numerics)
    assert torch.equal(bits(out.cpu()), bits(want))
