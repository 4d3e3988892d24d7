"""Models that cannot be packed are served by `generate`, with everything else as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

from lorafold.engine import Engine, Request, Sampling
from lorafold.engine.answering import Answering
from lorafold.engine.static import StaticBatches
from lorafold.errors import ModelError
from lorafold.runtime import attach
from tests.engine.asking import TOKENIZER, Listener, request
from tests.tiny_models import make_model, random_ids, write_adapter


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    plain, root = make_model("qwen3_next"), tmp_path_factory.mktemp("static")
    engine = Engine(attach(copy.deepcopy(plain), max_loras=2, max_rank=4), TOKENIZER)
    for at, name in enumerate(("a0", "a1", "a2")):
        targets = [["o_proj"], ["in_proj_qkvz"], ["o_proj", "out_proj"]][at]
        engine.load(name, write_adapter(plain, root / name, targets, seed=at))
    yield engine
    engine.close(timeout_s=0)


def test_a_batch_of_equal_lengths_equals_each_alone(engine: Engine) -> None:
    """Rows of one length need no padding, which moves the chunks of linear attention."""
    assert not engine.is_packed
    requests = [
        request(6, name, prompt=at, max_tokens=3 + at)
        for at, name in enumerate(("a0", None, "a1", "a0"))
    ]
    answers = engine.answer(requests)
    for asked, answer in zip(requests, answers, strict=True):
        assert engine.answer([asked])[0].tokens == answer.tokens
        assert answer.finish_reason == "length"


def test_more_adapters_than_slots_and_mixed_settings(engine: Engine) -> None:
    drawn = Sampling(max_tokens=5, temperature=1.0, seed=3, num_logprobs=2, ignore_eos=True)
    requests = [Request(random_ids(4 + at).tolist(), f"a{at % 3}", drawn) for at in range(6)]
    for answer in engine.answer(requests):
        assert len(answer.tokens) == len(answer.logprobs) == 5
    assert engine.stats().prompt_tokens["a1"] >= 4 + 1 + 4 + 4


def test_stop_strings_end_a_row_early(engine: Engine) -> None:
    whole = engine.answer([request(6, "a0", max_tokens=10)])[0]
    stop = whole.text[3:5]
    cut, other = engine.answer(
        [request(6, "a0", max_tokens=10, stop=(stop,)), request(6, "a1", max_tokens=10)]
    )
    assert (cut.finish_reason, other.finish_reason) == ("stop", "length")
    assert cut.text == whole.text[: whole.text.index(stop)]


def test_tokens_are_streamed_and_a_row_can_be_cancelled(engine: Engine) -> None:
    listener = Listener()
    ticket = engine.submit(request(5, "a0", max_tokens=100), listener)
    assert listener.has_begun.wait(30)
    ticket.cancel()
    answer = listener.answer()
    assert answer.finish_reason == "cancelled"
    assert 1 <= len(answer.tokens) < 100


def test_a_prompt_longer_than_a_batch_runs_alone(engine: Engine) -> None:
    batches = StaticBatches(engine.lora, max_length=100, max_tokens=10)
    short, long, middle = (
        Answering(request(length), None, lambda delta: None, TOKENIZER, ()) for length in (2, 20, 5)
    )
    assert batches.reserve(long)
    assert not batches.reserve(short)
    batches.release(long)
    assert batches.reserve(short)
    assert batches.reserve(middle)  # two rows of five
    assert not batches.reserve(long)
    assert not batches.reserve(Answering(short.request, None, print, TOKENIZER, ()))
    batches.release(middle)
    assert not batches.reserve(long)


def test_packing_it_all_the_same_is_refused(engine: Engine) -> None:
    with pytest.raises(ModelError, match="requests cannot be packed: Qwen3NextForCausalLM"):
        Engine(engine.lora, TOKENIZER, batching="packed")


def test_defaults_that_are_saved_with_a_model_change_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(6, "a0", max_tokens=20)
    expected = engine.answer([asked])[0]
    defaults = engine.lora.model.generation_config
    others = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 2}
    for name, value in others.items():
        monkeypatch.setattr(defaults, name, value)
    assert len(set(expected.tokens)) < 20
    assert engine.answer([asked])[0] == expected
