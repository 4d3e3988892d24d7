"""Packed forwards: a sequence among others equals the sequence alone, in bits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM

from lorafold.engine.attention import PackedAttention
from lorafold.engine.kv import KvCache
from lorafold.engine.packed import PackedForward, why_not_packed
from lorafold.engine.step import Piece, Step
from lorafold.errors import RouteError
from lorafold.runtime import MultiLora, attach
from tests.tiny_models import COMMON, bits, make_model, random_ids, write_adapter

WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3 with a window": ("qwen3", WINDOWED),
    "gpt2": ("gpt2", {}),
}


def run(
    lora: MultiLora, sequences: Sequence[tuple[Sequence[int], int]], chunks: Sequence[int]
) -> list[Tensor]:
    """The logits after each (tokens, slot), packed and read in chunks of the given sizes."""
    cache = KvCache(16 * 8 * len(sequences), torch.device("cpu"))
    forward = PackedForward(lora, cache)
    stretches = [cache.reserve(len(ids)) for ids, _ in sequences]
    done, found = [0] * len(sequences), dict[int, Tensor]()
    with forward.session():
        while len(found) < len(sequences):
            pieces = []
            for at, (ids, slot) in enumerate(sequences):
                tokens = ids[done[at] : done[at] + chunks[at % len(chunks)]]
                if tokens:
                    end = done[at] + len(tokens)
                    stretch = stretches[at]
                    assert stretch is not None
                    piece = Piece(tokens, done[at], stretch, slot, wants_logits=end == len(ids))
                    pieces.append((at, piece))
                    done[at] = end
            logits = iter(forward([piece for _, piece in pieces]))
            found |= {at: next(logits) for at, piece in pieces if piece.wants_logits}
    return [found[at] for at in range(len(sequences))]


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random_ids(length, seed=seed).tolist()


@pytest.mark.usefixtures("exact_base")
@pytest.mark.parametrize(("k", "n"), [(48, 64), (48, 32), (64, 48), (48, 80), (80, 48), (48, 96)])
def test_the_base_computes_each_row_by_itself(k: int, n: int) -> None:
    """Why equality in bits can be asked for below: products do not look at other rows."""
    x, weight = torch.randn(70, k).bfloat16(), torch.randn(n, k).bfloat16()
    rows = bits(F.linear(x, weight))
    for count in range(1, 70):
        assert torch.equal(bits(F.linear(x[:count], weight)), rows[:count])
        assert torch.equal(bits(F.linear(x[-count:], weight)), rows[-count:])


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def lora(request: pytest.FixtureRequest, plain: nn.Module, folders: list[Path]) -> MultiLora:
    model = copy.deepcopy(plain)
    model.set_attn_implementation(request.param)  # type: ignore[operator]
    lora = attach(model, max_loras=3, max_rank=8)
    for slot in range(3):
        lora.load(str(slot), folders[slot])
    return lora


@pytest.mark.usefixtures("exact_base")
@settings(
    deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    slots=st.lists(st.integers(-1, 2), min_size=5, max_size=5),
    chunk=st.sampled_from([1, 3, 20]),
)
def test_a_sequence_among_others_equals_it_alone(
    lora: MultiLora, lengths: list[int], slots: list[int], chunk: int
) -> None:
    sequences = [(ids_of(n, seed=n), slot) for n, slot in zip(lengths, slots, strict=False)]
    together = run(lora, sequences, [chunk])
    for sequence, logits in zip(sequences, together, strict=True):
        (alone,) = run(lora, [sequence], [chunk])
        assert torch.equal(bits(alone), bits(logits))


@pytest.mark.usefixtures("exact_base")
def test_slots_and_chunks_matter_and_neighbours_do_not(lora: MultiLora) -> None:
    prompt, other = ids_of(17), ids_of(23, seed=5)
    on_each = run(lora, [(prompt, slot) for slot in (-1, 0, 1, 2)], [6])
    for at, slot in enumerate((-1, 0, 1, 2)):
        (alone,) = run(lora, [(prompt, slot)], [6])
        crowded = run(lora, [(other, 2), (prompt, slot), (other[:4], -1)], [9, 6, 1])[1]
        assert torch.equal(bits(alone), bits(on_each[at]))
        assert torch.equal(bits(alone), bits(crowded))
    assert len({tuple(bits(logits).tolist()) for logits in on_each}) == 4


def test_a_prompt_that_was_read_under_another_adapter_gives_another_answer(lora: MultiLora) -> None:
    """Why keys and values are never shared: they are as much the adapter's as the logits are."""
    prompt = ids_of(20)
    cache = KvCache(64, torch.device("cpu"))
    forward, last = PackedForward(lora, cache), []
    with forward.session():
        for first_slot in (0, 1, -1):
            stretch = cache.reserve(20)
            assert stretch is not None
            forward([Piece(prompt[:19], 0, stretch, first_slot, wants_logits=False)])
            last.append(forward([Piece(prompt[19:], 19, stretch, 1, wants_logits=True)]))
            cache.release(stretch)
    assert not torch.equal(last[0], last[1])
    assert not torch.equal(last[2], last[1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("chunks", [[64], [5, 3], [1]], ids=str)
def test_packed_logits_are_the_models_own(name: str, attention: str, chunks: list[int]) -> None:
    family, extra = MODELS[name]
    model: Any = make_model(family, **extra)
    model.set_attn_implementation(attention)
    prompts = [ids_of(n, seed=n) for n in (13, 2, 9)]
    expected = [model(torch.tensor([ids])).logits[0, -1] for ids in prompts]
    lora = attach(model, max_rank=4)
    for logits, own in zip(run(lora, [(p, -1) for p in prompts], chunks), expected, strict=True):
        assert float((logits - own).norm() / own.norm()) < 0.03
    if extra:
        # Without the window the same model says something else.
        full = make_model(family)
        apart = full(torch.tensor([prompts[0]])).logits[0, -1] - expected[0]
        assert float(apart.norm() / expected[0].norm()) > 0.1


@pytest.mark.usefixtures("exact_base")
def test_an_adapted_output_head_sees_the_kept_rows(plain: nn.Module, tmp_path: Path) -> None:
    lora = attach(copy.deepcopy(plain), max_loras=2, max_rank=4, targets=["lm_head", "q_proj"])
    lora.load("0", write_adapter(plain, tmp_path / "head", ["lm_head", "q_proj"]))
    prompts = [(ids_of(5), 0), (ids_of(9), -1), (ids_of(3), 0)]
    together = run(lora, prompts, [4])
    for prompt, logits in zip(prompts, together, strict=True):
        assert torch.equal(bits(run(lora, [prompt], [4])[0]), bits(logits))
    assert not torch.equal(run(lora, [(prompts[0][0], -1)], [4])[0], together[0])


def test_models_that_can_be_packed_say_so(lora: MultiLora) -> None:
    assert why_not_packed(lora) is None
    assert lora.model.config._attn_implementation in ("eager", "sdpa")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "extra", "reason"),
    [
        ("qwen3_next", {}, "Qwen3NextForCausalLM has layers of linear_attention"),
        ("qwen3_5", {}, "Qwen3_5ForCausalLM has layers of linear_attention"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary frequencies (dynamic) that depend on the whole batch",
        ),
    ],
)
def test_models_that_cannot_be_packed_say_why(
    family: str, extra: dict[str, Any], reason: str
) -> None:
    lora = attach(make_model(family, **extra), max_rank=4)
    assert reason in str(why_not_packed(lora))


def test_models_without_a_named_attention_function_cannot_be_packed() -> None:
    config = BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2)
    lora = attach(BloomForCausalLM(config).bfloat16().eval(), max_rank=4)
    assert "does not let its attention function be named" in str(why_not_packed(lora))


def test_a_model_that_packs_wrongly_is_found_out(
    plain: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = attach(copy.deepcopy(plain), max_rank=4)
    with monkeypatch.context() as patch:
        nothing_hidden = lambda self, at, window, dtype: torch.zeros(1, 1, 1, 1, dtype=dtype)  # noqa: E731
        patch.setattr(Step, "mask", nothing_hidden)
        assert "gives other logits for packed sequences" in str(why_not_packed(lora))
    with monkeypatch.context() as patch:
        patch.setattr(PackedAttention, "attend", lambda *args, **kwargs: 1 / 0)
        assert "cannot run packed: division by zero" in str(why_not_packed(lora))
    assert why_not_packed(lora) is None


def test_a_session_leaves_the_model_as_it_was_and_keeps_others_out(lora: MultiLora) -> None:
    usual = lora.model.config._attn_implementation  # type: ignore[union-attr]
    forward = PackedForward(lora, KvCache(64, torch.device("cpu")))
    ids = torch.tensor([ids_of(5)])
    before = bits(lora.model(ids).logits)
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            lora.model(ids)
        except RouteError as error:
            errors.append(error)

    def fail_inside() -> None:
        with forward.session():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            with pytest.raises(RouteError, match="no packed forward of 5 rows is under way"):
                lora.model(ids)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert "another thread must wait" in str(errors[0])
    assert lora.model.config._attn_implementation == usual  # type: ignore[union-attr]
    assert torch.equal(bits(lora.model(ids).logits), before)


def test_nothing_asked_for_gives_no_logits(lora: MultiLora) -> None:
    cache = KvCache(64, torch.device("cpu"))
    forward, stretch = PackedForward(lora, cache), cache.reserve(8)
    assert stretch is not None
    with forward.session():
        logits = forward([Piece([1, 2], 0, stretch, 0, wants_logits=False)])
    assert logits.shape == (0, COMMON["vocab_size"])
