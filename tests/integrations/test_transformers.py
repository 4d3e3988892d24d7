"""Loading models and tokenizers from folders, ready to attach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import lorafold.integrations.transformers as integration
from lorafold.errors import BackendError, ModelError
from lorafold.integrations.transformers import load_model, load_tokenizer
from lorafold.runtime import attach
from tests.tiny_models import bits, make_model, random_ids, write_adapter


def test_a_saved_model_comes_back_ready_to_attach(tmp_path: Path) -> None:
    saved = make_model("qwen3")
    saved.save_pretrained(tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert (model.dtype, model.training) == (torch.bfloat16, False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.set_attn_implementation("eager")
    ids = random_ids(2, 5)
    assert torch.equal(bits(model(ids).logits), bits(saved(ids).logits))
    lora = attach(model)
    lora.load("one", write_adapter(saved, tmp_path / "one", ["q_proj"]))
    assert lora.generate(ids, adapters=["one", None], max_new_tokens=2).shape[0] == 2


def test_a_model_in_fp32_is_loaded_but_not_attached(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32)
    assert model.dtype == torch.float32
    with pytest.raises(ModelError, match=r"model.to\(torch.bfloat16\)"):
        attach(model)


def test_a_tokenizer_pads_on_the_left(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    plain = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    assert (plain.padding_side, plain.pad_token) == ("right", None)
    plain.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(["a", "b"], return_tensors="pt").input_ids.tolist() == [[2], [3]]
    assert tokenizer.pad({"input_ids": [[2], [2, 3]]}).input_ids == [[1, 2], [2, 3]]


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_folders_that_hold_something_else(load: object, tmp_path: Path) -> None:
    assert callable(load)
    with pytest.raises(ModelError, match="no-such-folder"):
        load(tmp_path / "no-such-folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty"):
        load(tmp_path / "empty")
    folder = write_adapter(make_model(), tmp_path / "adapter", ["q_proj"])
    with pytest.raises(ModelError, match="holds an adapter"):
        load(folder)


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integration.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"pip install 'lorafold\[transformers\]'"):
        load_model("anything")
