"""Adapters of embeddings and output heads, tied and separate, as real PEFT writes and runs them."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lorafold.adapter import TargetShape
from lorafold.engine import Engine
from lorafold.errors import AdapterError, AdapterMismatchError, ModelError
from lorafold.layers.embedding import RoutedEmbedding
from lorafold.peft import load_adapter, parse, targets_of
from lorafold.runtime import MultiLora, attach
from tests.engine.asking import TOKENIZER, request
from tests.peft.folders import rename, tensors_of, write
from tests.tiny_models import (
    COMMON,
    adapted_by_peft,
    bits,
    make_model,
    random_ids,
    write_adapter,
)

# PEFT speaks of what merging would do; nothing is merged here.
pytestmark = pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")

VARIANTS: dict[str, tuple[bool, list[str], dict[str, Any]]] = {
    # whether tied, targets, settings
    "embedding": (False, ["embed_tokens", "q_proj"], {}),
    "embedding, tied": (True, ["embed_tokens", "q_proj"], {}),
    "embedding alone, rslora": (True, ["embed_tokens"], {"use_rslora": True}),
    "head": (False, ["lm_head", "v_proj"], {}),
    "head, tied": (True, ["lm_head", "v_proj"], {}),
    "both": (False, ["embed_tokens", "lm_head"], {"rank_pattern": {"embed_tokens": 3}}),
    "both, tied": (True, ["embed_tokens", "lm_head", "down_proj"], {}),
    "one for both": (True, ["embed_tokens"], {"ensure_weight_tying": True}),
}


def attached(model: nn.Module, folder: Path) -> MultiLora:
    targets = targets_of([parse(folder)])
    lora = attach(copy.deepcopy(model), max_rank=8, targets=targets)
    lora.load("sql", folder)
    return lora


def logits(lora: MultiLora, ids: Tensor, adapters: list[str | None]) -> Tensor:
    with lora.rows(adapters):
        return lora.model(ids).logits


def with_one_pair(folder: Path, to: Path) -> Path:
    """As PEFT trains it: the head's factors are those of the embedding, transposed."""
    tensors = tensors_of(folder)
    embedding = "base_model.model.model.embed_tokens.lora_embedding_"
    tensors["base_model.model.lm_head.lora_A.weight"] = tensors[f"{embedding}B"].T
    tensors["base_model.model.lm_head.lora_B.weight"] = tensors[f"{embedding}A"].T
    return write(to, tensors, json.loads((folder / "adapter_config.json").read_text()))


def rms(t: Tensor) -> float:
    return float(t.detach().double().square().mean().sqrt())


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_what_peft_computes(tmp_path: Path, variant: str) -> None:
    is_tied, targets, settings = VARIANTS[variant]
    model = make_model(tie_word_embeddings=is_tied)
    folder = write_adapter(model, tmp_path / "a", targets, rank=5, alpha=7, **settings)
    if "ensure_weight_tying" in settings:
        folder = with_one_pair(folder, tmp_path / "b")
    lora = attached(model, folder)
    for word in targets:
        assert any(path.endswith(word) for path in lora.targets)
    ids = random_ids(3, 7)
    got = logits(lora, ids, ["sql", None, "sql"])
    exact = adapted_by_peft(model, folder, torch.float64)(ids).logits
    theirs = adapted_by_peft(model, folder, torch.bfloat16)(ids).logits
    for row in (0, 2):
        error = rms(got[row] - exact[row])
        assert error <= 2 * rms(theirs[row] - exact[row])
        # The yardstick is short enough to see a missing adapter.
        assert rms(model(ids).logits[row] - exact[row]) > 4 * error
    # The same bits as in a batch of its own adapter alone, and as the plain model.
    assert torch.equal(bits(got[::2]), bits(logits(lora, ids, ["sql"] * 3)[::2]))
    assert torch.equal(bits(got[1]), bits(model(ids).logits[1]))


def test_a_tied_head_is_not_adapted_with_the_embedding(tmp_path: Path) -> None:
    """Merged into one matrix the delta would act at both ends; PEFT unmerged, and lorafold, do not
    do that."""
    model = make_model(tie_word_embeddings=True)
    folder = write_adapter(model, tmp_path, ["embed_tokens"], rank=5, alpha=7)
    lora = attached(model, folder)
    assert lora.model.get_submodule("lm_head") is lora.model.get_output_embeddings()
    assert type(lora.model.lm_head) is nn.Linear
    assert lora.model.lm_head.weight is lora.model.get_input_embeddings().weight
    ids = random_ids(1, 7)
    got = logits(lora, ids, ["sql"])
    merged = adapted_by_peft(model, folder, torch.float64).merge_and_unload()(ids).logits
    exact = adapted_by_peft(model, folder, torch.float64)(ids).logits
    assert rms(got - merged) > 10 * rms(got - exact)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma3"])
def test_other_families(tmp_path: Path, family: str) -> None:
    if family == "gemma3":  # multiplies what it looks up
        config = transformers.Gemma3TextConfig(**COMMON, attn_implementation="eager")
        torch.manual_seed(0)
        model: Any = transformers.Gemma3ForCausalLM(config).bfloat16().eval().requires_grad_(False)
    else:
        model = make_model(family)
    word = "wte" if family == "gpt2" else "embed_tokens"
    folder = write_adapter(model, tmp_path, [word], rank=5, alpha=7)
    lora = attached(model, folder)
    ids = random_ids(2, 7)
    got = logits(lora, ids, ["sql", None])[0]
    exact = adapted_by_peft(model, folder, torch.float64)(ids).logits[0]
    theirs = adapted_by_peft(model, folder, torch.bfloat16)(ids).logits[0]
    assert rms(got - exact) <= 2 * rms(theirs - exact)
    assert rms(model(ids).logits[0] - exact) > 4 * rms(got - exact)


def test_generating_and_batches_of_any_company(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    one = write_adapter(model, tmp_path / "one", ["embed_tokens", "lm_head"], rank=5)
    two = write_adapter(model, tmp_path / "two", ["embed_tokens", "q_proj"], rank=8, seed=3)
    plain = write_adapter(model, tmp_path / "plain", ["q_proj", "up_proj"], rank=2, seed=4)
    lora = attach(copy.deepcopy(model), max_rank=8, targets=targets_of([parse(one), parse(two)]))
    for name, folder in (("one", one), ("two", two), ("plain", plain)):
        lora.load(name, folder)
    ids = random_ids(4, 5)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    names = ["one", None, "two", "plain"]
    got = lora.generate(ids, adapters=names, **settings)
    base = model.generate(ids, **settings)
    for row, name in enumerate(names):
        alone = lora.generate(ids, adapters=[name] * 4, **settings)
        assert torch.equal(got[row], alone[row])
        assert torch.equal(got[row], base[row]) == (name is None)
    # What comes as embeddings has been looked up already.
    embeds = model.get_input_embeddings()(ids)
    with lora.rows(["two"] * 4):
        passed = lora.model(inputs_embeds=embeds).logits
        looked_up = lora.model(ids).logits
    assert not torch.equal(passed, looked_up)
    lora.detach()
    assert torch.equal(bits(lora.model(ids).logits), bits(model(ids).logits))
    assert not any(isinstance(m, RoutedEmbedding) for m in lora.model.modules())


def test_the_engine_serves_them_packed(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    specs = {
        "one": parse(write_adapter(model, tmp_path / "one", ["embed_tokens", "lm_head"], rank=5)),
        "two": parse(write_adapter(model, tmp_path / "two", ["embed_tokens"], rank=8, seed=3)),
    }
    lora = attach(copy.deepcopy(model), max_rank=8, targets=targets_of(specs.values()))
    torch._C._set_mkldnn_enabled(False)  # a base whose rows do not depend on the batch
    engine = Engine(lora, TOKENIZER, max_running=8, cache_tokens=1024, chunk=8)
    try:
        for name, spec in specs.items():
            engine.load(name, spec)
        assert engine.is_packed
        asked = [
            request(length, name, num_logprobs=2)
            for length, name in ((11, "one"), (5, "two"), (17, None), (5, "one"))
        ]
        together = engine.answer(asked)
        assert [engine.answer([each])[0] for each in asked] == together
        assert together[1].tokens != together[3].tokens
    finally:
        engine.close(timeout_s=0)
        torch._C._set_mkldnn_enabled(True)


def test_an_embedding_is_wrapped_only_when_asked_for(tmp_path: Path) -> None:
    model = make_model()
    folder = write_adapter(model, tmp_path / "a", ["embed_tokens", "q_proj"])
    lora = attach(copy.deepcopy(model), max_rank=8)
    assert "model.embed_tokens" not in lora.targets
    with pytest.raises(AdapterMismatchError) as caught:
        lora.load("sql", folder)
    assert "attach with the targets `all-linear`, `embed_tokens`" in str(caught.value)
    assert vars(caught.value)["code"] == "embedding"
    assert lora.names() == ()
    head = write_adapter(model, tmp_path / "head", ["lm_head"])
    with pytest.raises(AdapterMismatchError) as caught:
        lora.load("head", head)
    assert "attach with the targets `all-linear`, `lm_head`" in str(caught.value)
    assert targets_of([parse(folder), parse(head)]) == ["all-linear", "embed_tokens", "lm_head"]
    assert targets_of([parse(write_adapter(model, tmp_path / "b", ["q_proj"]))]) is None
    gpt2 = make_model("gpt2")
    with pytest.raises(ModelError, match=r"`transformer.wpe`: it takes \(1, 3\) where 6 tokens"):
        attach(gpt2, targets=["wpe"])
    assert attach(gpt2, targets=["wte"]).targets == ("transformer.wte",)


def test_an_embedding_that_does_more_than_look_up_is_no_target() -> None:
    class Doubled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 2

    model: Any = make_model()
    odd = Doubled(*model.model.embed_tokens.weight.shape, dtype=torch.bfloat16)
    odd.load_state_dict(model.model.embed_tokens.state_dict())
    model.model.embed_tokens = odd
    with pytest.raises(ModelError, match="gives something else than the rows of its weight"):
        attach(model, targets=["embed_tokens"])
    assert attach(model).names() == ()


@pytest.mark.parametrize(
    ("change", "shape", "code"),
    [
        ({}, TargetShape(98, 48, is_embedding=True), "resized-vocabulary"),
        ({}, TargetShape(96, 47, is_embedding=True), "shape-mismatch"),
        ({}, TargetShape(96, 48), "embedding"),
        ({"linear": True}, TargetShape(96, 48, is_embedding=True), "shape-mismatch"),
    ],
)
def test_factors_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, bool], shape: TargetShape, code: str
) -> None:
    folder = write_adapter(make_model(), tmp_path / "a", ["embed_tokens"])
    if change:
        folder = rename(
            folder,
            tmp_path / "b",
            lambda name: name.replace("lora_embedding_A", "lora_A.weight").replace(
                "lora_embedding_B", "lora_B.weight"
            ),
        )
    with pytest.raises(AdapterError) as caught:
        load_adapter(folder, {"model.embed_tokens": shape})
    assert vars(caught.value)["code"] == code


@pytest.mark.parametrize("saves", [False, True])
def test_peft_s_own_copy_of_the_embedding_is_dropped(tmp_path: Path, saves: bool) -> None:
    """PEFT writes whole matrices beside the factors, unless it is told not to."""
    model = make_model()
    plain = write_adapter(model, tmp_path / "plain", ["embed_tokens"])
    config = json.loads((plain / "adapter_config.json").read_text())
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.PeftModel.from_pretrained(copy.deepcopy(model), plain).save_pretrained(
            tmp_path / "again", save_embedding_layers=saves
        )
    names = tensors_of(tmp_path / "again").keys()
    assert any("base_layer" in name for name in names) == saves
    lora = attached(model, tmp_path / "again")
    assert config["target_modules"] == ["embed_tokens"]
    ids = random_ids(1, 5)
    want = logits(attached(model, plain), ids, ["sql"])
    assert torch.equal(bits(logits(lora, ids, ["sql"])), bits(want))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("mount", ["model.language_model.", "language_model.model.", ""])
def test_copies_are_found_under_every_mount(tmp_path: Path, is_tied: bool, mount: str) -> None:
    model = make_model(tie_word_embeddings=is_tied)
    plain = write_adapter(model, tmp_path / "plain", ["lm_head", "embed_tokens"])
    assert sum("base_layer" in name for name in tensors_of(plain)) == 2

    def moved(name: str) -> str:
        return name.replace("base_model.model.model.", f"base_model.model.{mount}")

    folder = rename(plain, tmp_path / "moved", moved)
    assert len(attached(model, folder).pool.names()) == 1
    changed = {n: t + ("base_layer" in n) for n, t in tensors_of(folder).items()}
    trained = write(
        tmp_path / "trained", changed, json.loads((plain / "adapter_config.json").read_text())
    )
    with pytest.raises(AdapterError, match="differs from the base's"):
        attached(model, trained)
