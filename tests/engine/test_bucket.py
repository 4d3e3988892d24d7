"""Padded decode steps: the same bits as packed ones, and padding touches nothing of anybody's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lorafold.engine.attention import PackedAttention
from lorafold.engine.bucket import Bucket, bucket_sizes
from lorafold.engine.flash import Flash
from lorafold.engine.graphs import DecodeGraphs
from lorafold.engine.kv import KvCache
from lorafold.engine.packed import PackedForward
from lorafold.engine.step import Piece
from lorafold.runtime import MultiLora, attach
from tests.engine.test_attention import literal_flash
from tests.tiny_models import bits, make_model, random_ids, write_adapter

CPU = torch.device("cpu")
LARGEST = 9
WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
# (tokens there, slot) of each sequence.
SEQUENCES = [(3, 0), (17, -1), (1, 2), (0, 1), (30, 1), (8, -1), (2, 0)]


@given(largest=st.integers(1, 600))
def test_buckets_go_up_to_the_largest_in_small_steps(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    for smaller, size in pairwise(sizes):
        padding = size - smaller - 1
        assert padding <= max(7, size / 4)
    assert len(sizes) <= 30


MODELS: dict[str, tuple[str, dict[str, Any], list[str] | None]] = {
    "llama": ("llama", {}, None),
    "qwen3 with a window": ("qwen3", WINDOWED, None),
    "adapted head": ("llama", {}, ["lm_head", "q_proj"]),
}


@pytest.fixture(scope="module", params=MODELS)
def lora(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MultiLora:
    family, extra, targets = MODELS[request.param]
    model, root = make_model(family, **extra), tmp_path_factory.mktemp("adapters")
    names = targets or ["q_proj", "down_proj"]
    folders = [write_adapter(model, root / str(seed), names, seed=seed) for seed in range(3)]
    lora = attach(model, max_loras=3, max_rank=8, targets=targets)
    for slot, folder in enumerate(folders):
        lora.load(str(slot), folder)
    return lora


class Ground:
    """A cache with sequences in it, read by one forward; all of a kind are equal in every bit."""

    def __init__(self, lora: MultiLora, sequences: Sequence[tuple[int, int]] = SEQUENCES) -> None:
        self.cache = KvCache(512, CPU, num_spare=LARGEST)
        self.forward = PackedForward(lora, self.cache)
        self.graphs = DecodeGraphs(lora, self.forward.attention, LARGEST)
        self.pieces, prompts = list[Piece](), list[Piece]()
        self.cache.reserve(16)  # so that nobody begins at 0
        for seed, (there, slot) in enumerate(sequences):
            stretch = self.cache.reserve(there + 4)
            assert stretch is not None
            ids = random_ids(there + 1, seed=seed).tolist()
            if there:
                prompts.append(Piece(ids[:-1], 0, stretch, slot, wants_logits=False))
            self.pieces.append(Piece(ids[-1:], there, stretch, slot, wants_logits=True))
        with self.forward.session():
            self.forward(prompts)

    def keys_and_values(self) -> list[Tensor]:
        return [t.clone() for layer in self.cache._layers.values() for t in layer]


@pytest.mark.usefixtures("exact_base")
@pytest.mark.parametrize("number", range(1, len(SEQUENCES) + 1))
def test_a_padded_step_gives_the_bits_of_a_packed_one(lora: MultiLora, number: int) -> None:
    padded, packed = Ground(lora), Ground(lora)
    before = padded.keys_and_values()
    assert padded.graphs.takes(padded.pieces[:number])
    with padded.forward.session():
        logits = padded.graphs(padded.pieces[:number])
    with packed.forward.session():
        expected = packed.forward(packed.pieces[:number])
    assert torch.equal(bits(logits), bits(expected))
    places = slice(0, padded.cache.num_tokens)
    changed = {piece.stretch.start + piece.start for piece in padded.pieces[:number]}
    for was, now, other in zip(
        before, padded.keys_and_values(), packed.keys_and_values(), strict=True
    ):
        assert torch.equal(bits(now[places]), bits(other[places]))
        differs = (bits(now[places]) != bits(was[places])).flatten(1).any(dim=1)
        assert set(differs.nonzero().flatten().tolist()) == changed


@pytest.mark.usefixtures("exact_base")
def test_buffers_are_told_all_of_each_step(lora: MultiLora) -> None:
    """One bucket, filled with other sequences each time: nothing of the step before is left."""
    ground, packed = Ground(lora), Ground(lora)
    for at in ([6, 1, 2], [3], [0, 4], [1, 5], [1, 2, 3]):
        chosen = sorted((ground.pieces[i] for i in at), key=lambda piece: piece.stretch.start)
        bucket = ground.graphs._buckets[2]
        with ground.forward.session():
            padded = bucket.fill(chosen)
            with_adapters = any(piece.slot >= 0 for piece in chosen)
            logits = bucket.run(padded, with_adapters=with_adapters)[: len(at)]
        with packed.forward.session():
            expected = packed.forward(chosen)
        assert torch.equal(bits(logits), bits(expected))


def test_the_buffers_alone_say_all_that_flash_attention_needs(lora: MultiLora) -> None:
    """What a graph holds: the forward without the pieces, which the host alone knows."""
    flash, usual = Ground(lora), Ground(lora)
    attention = flash.forward.attention
    attention._flash = Flash(literal_flash, can_split=True, max_keys=flash.cache.num_places)
    bucket = flash.graphs._buckets[2]
    with flash.forward.session():
        bucket.fill([])
        bucket.run((), with_adapters=True)
    for chosen in (usual.pieces[:3], usual.pieces[3:7], usual.pieces[1:2]):
        with flash.forward.session():
            bucket.fill(chosen)
            logits = bucket.run((), with_adapters=True)[: len(chosen)]
        with usual.forward.session():
            expected = usual.graphs(chosen)
        assert float((logits - expected).norm() / expected.norm()) < 0.02


def test_slots_matter(lora: MultiLora) -> None:
    base = Ground(lora)
    with base.forward.session():
        bucket = base.graphs._buckets[3]
        padded = bucket.fill(base.pieces)
        adapted = bucket.run(padded, with_adapters=True)
        plain = bucket.run(padded, with_adapters=False)
    differs = (bits(adapted) != bits(plain)).any(dim=1).tolist()
    assert differs == [slot >= 0 for _, slot in SEQUENCES] + [False]


def test_what_the_device_is_told_has_fixed_addresses_and_ascends(lora: MultiLora) -> None:
    cache = KvCache(512, CPU, num_spare=LARGEST)
    bucket = Bucket(lora, PackedAttention(lora.model, cache), 4)
    told = (bucket._inputs, bucket._narrow, bucket._rows.seq_slot, bucket._spans.used)
    addresses = [t.data_ptr() for t in told]
    first, second = cache.reserve(16), cache.reserve(32)
    assert first is not None
    assert second is not None
    pieces = [
        Piece((7,), 5, first, 2, wants_logits=True),
        Piece((9,), 20, second, -1, wants_logits=True),
    ]
    padded = bucket.fill(pieces)
    assert padded[:2] == pieces
    assert [piece.stretch.start for piece in padded[2:]] == [512 + 2, 512 + 3]
    bucket._narrow.copy_(bucket._inputs[12:])
    assert bucket._inputs[:12].view(3, 4).tolist() == [
        [7, 9, 0, 0],
        [5, 20, 0, 0],
        [5, 36, 514, 515],
    ]
    assert bucket._rows.seq_slot.tolist() == [2, -1, -1, -1]
    spans = bucket._spans
    assert spans.rows.tolist() == [0, 1, 2, 3, 4]
    assert spans.starts.tolist() == [0, 16, 514, 515, 516]
    assert (spans.used.tolist(), spans.max_rows) == ([6, 21, 1, 1], 1)
    assert spans.starts[-1] <= cache.num_places
    assert [t.data_ptr() for t in told] == addresses


def test_only_steps_of_single_tokens_are_taken(lora: MultiLora) -> None:
    ground = Ground(lora)
    (one, *_), stretch = ground.pieces, ground.pieces[0].stretch
    assert ground.graphs.takes([one] * LARGEST)
    assert not ground.graphs.takes([one] * (LARGEST + 1))
    assert not ground.graphs.takes([])
    assert not ground.graphs.takes([one, Piece([1, 2], 0, stretch, -1, wants_logits=True)])
    assert not ground.graphs.takes([one, Piece([1], 0, stretch, -1, wants_logits=False)])
