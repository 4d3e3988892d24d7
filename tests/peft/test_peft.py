"""Adapters that PEFT itself wrote mean the same factors and scales to lorafold."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora.config import MontecloraConfig
from torch import Tensor, nn

from lorafold.adapter import Adapter, TargetShape
from lorafold.errors import AdapterFormatError, AdapterMismatchError
from lorafold.peft import bind, load_adapter, parse
from lorafold.peft.scale import round_scale
from tests.peft.folders import dense, linear_shapes, rename, targets, tensors_of, write
from tests.tiny_models import adapted_by_peft, bits, make_model, old_peft, write_adapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return make_model(request.param)


def base_tensor_of(model: Any) -> Any:
    return lambda path: model.get_submodule(path).weight


def assert_same_as_peft(adapter: Adapter, model: nn.Module, folder: Path) -> None:
    """Every layer that PEFT adapts is bound, with PEFT's own factors and scale, and no other is."""
    adapted = adapted_by_peft(model, folder, torch.float32)
    layers = {
        path.removeprefix("base_model.model."): module
        for path, module in adapted.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }
    assert layers
    assert adapter.weights.keys() == layers.keys()
    for path, layer in layers.items():
        weights = adapter.weights[path]
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert torch.equal(bits(weights.a), bits(a.detach().to(torch.bfloat16)))
        assert torch.equal(bits(weights.b), bits(b.detach().to(torch.bfloat16)))
        assert weights.scale == round_scale(layer.scaling["default"])
        # A and B are exact in bf16 (write_adapter), so the whole delta is PEFT's.
        ours = weights.scale * weights.b.double() @ weights.a.double()
        theirs = layer.get_delta_weight("default").double()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "attention": (ATTENTION, {}),
    "all-linear": ("all-linear", {}),
    "regular expression": (r".*\.(q_proj|down_proj)", {}),
    "rslora": (ATTENTION, {"use_rslora": True, "rank": 3}),
    "rank pattern": (ATTENTION, {"rank_pattern": {"q_proj": 2, r".*\.1\.self_attn\.o_proj": 7}}),
    "alpha pattern": (ATTENTION, {"alpha_pattern": {"model.layers.0.self_attn.k_proj": 11}}),
    "both patterns": (
        ATTENTION,
        {"rank_pattern": {"^model.layers.0.self_attn.v_proj": 3}, "alpha_pattern": {"v_proj": 5}},
    ),
    "some layers": (ATTENTION, {"layers_to_transform": [1]}),
    "named layers": (ATTENTION, {"layers_to_transform": 0, "layers_pattern": "layers"}),
    "excluded": (ATTENTION, {"exclude_modules": ["model.layers.0.self_attn.q_proj"]}),
    "gaussian": (ATTENTION, {"init_lora_weights": "gaussian"}),
    "orthogonal": (ATTENTION, {"init_lora_weights": "orthogonal"}),
    "fan in, fan out": (ATTENTION, {"fan_in_fan_out": False}),
    "odd alpha": (["q_proj"], {"rank": 12, "alpha": 16.5}),
    "velora": (["q_proj"], {"velora_config": {"num_groups": 4}}),
    "monteclora": (["q_proj"], {"monteclora_config": MontecloraConfig()}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_peft_writes_is_what_is_bound(model: nn.Module, tmp_path: Path, variant: str) -> None:
    modules, config = VARIANTS[variant]
    folder = write_adapter(model, tmp_path / "sql", modules, **config)
    adapter = load_adapter(folder, linear_shapes(model))
    assert_same_as_peft(adapter, model, folder)
    assert adapter.name == "sql"
    dropped = len(adapter.report.dropped)
    assert adapter.report.num_tensors + dropped == len(tensors_of(folder))
    assert (dropped > 0) == (variant in ("velora", "monteclora"))
    assert all(line.delta_norm > 0 for line in adapter.report.bound)
    assert not adapter.report.skipped


def test_the_output_head_is_a_target_and_its_copy_is_dropped(
    model: nn.Module, tmp_path: Path
) -> None:
    folder = write_adapter(model, tmp_path, ["lm_head", "q_proj"])
    assert "base_model.model.lm_head.base_layer.weight" in tensors_of(folder)
    with pytest.raises(AdapterFormatError, match="with the base's weights at hand") as caught:
        load_adapter(folder, linear_shapes(model))
    assert caught.value.code == "modules-to-save"
    adapter = load_adapter(folder, linear_shapes(model), base_tensor=base_tensor_of(model))
    assert_same_as_peft(adapter, model, folder)
    assert adapter.report.dropped == ("lm_head: a copy that equals the base",)


def test_a_saved_vocabulary_is_dropped_only_if_it_is_the_base(
    model: nn.Module, tmp_path: Path
) -> None:
    saved = ["embed_tokens", "lm_head"]
    folder = write_adapter(model, tmp_path / "same", ["q_proj"], modules_to_save=saved)
    kept = load_adapter(folder, linear_shapes(model), base_tensor=base_tensor_of(model))
    assert len(kept.report.dropped) == 2

    name = "base_model.model.lm_head.weight"
    changed = tensors_of(folder)
    changed[name] = changed[name].clone()
    changed[name][3, 5] += 1
    config = json.loads((folder / "adapter_config.json").read_text())
    trained = parse(write(tmp_path / "trained", changed, config))
    with pytest.raises(AdapterFormatError, match="differs from the base") as caught:
        bind(trained, linear_shapes(model), base_tensor=base_tensor_of(model))
    assert caught.value.code == "modules-to-save"

    changed[name] = torch.cat([changed[name], changed[name][:2]])
    resized = parse(write(tmp_path / "resized", changed, config))
    with pytest.raises(AdapterFormatError) as caught:
        bind(resized, linear_shapes(model), base_tensor=base_tensor_of(model))
    assert caught.value.code == "resized-vocabulary"


def test_an_embedding_is_a_target_of_its_own_kind(model: Any, tmp_path: Path) -> None:
    folder = write_adapter(model, tmp_path, ["embed_tokens", "q_proj"])
    spec = parse(folder)
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    shape = TargetShape(vocabulary, hidden, is_embedding=True)
    shapes = linear_shapes(model) | {"model.embed_tokens": shape}
    adapter = bind(spec, shapes, base_tensor=base_tensor_of(model))
    weights = adapter.weights["model.embed_tokens"]
    prefix = "base_model.model.model.embed_tokens.lora_embedding_"
    assert torch.equal(weights.a.float(), tensors_of(folder)[f"{prefix}A"].float())
    assert torch.equal(weights.b.float(), tensors_of(folder)[f"{prefix}B"].float())
    assert {line.kind for line in adapter.report.bound} == {"embedding", "linear"}
    with pytest.raises(AdapterMismatchError) as caught:
        bind(spec, linear_shapes(model), base_tensor=base_tensor_of(model))
    assert vars(caught.value)["code"] == "embedding"


def test_what_was_parsed_is_not_read_again(tmp_path: Path) -> None:
    model = make_model("llama")
    folder = write_adapter(model, tmp_path / "a", ATTENTION)
    spec, expected = parse(folder), load_adapter(folder, linear_shapes(model))
    assert os.fspath(spec) == str(folder)
    shutil.rmtree(folder)
    adapter = load_adapter(spec, linear_shapes(model))
    assert adapter.name == expected.name
    for path, weights in adapter.weights.items():
        assert torch.equal(bits(weights.a), bits(expected.weights[path].a))


INFIXES = {
    "adapter name": lambda name: name.replace(".weight", ".default.weight"),
    "other adapter name": lambda name: name.replace(".weight", ".my-run_2.weight"),
    "no prefix": lambda name: name.removeprefix("base_model.model."),
    "doubled prefix": lambda name: "base_model.model." + name,
    "compiled": lambda name: "_orig_mod." + name,
    "compiled inside": lambda name: name.replace("model.layers", "_orig_mod.model.layers"),
    "sharded": lambda name: name.replace("self_attn", "_fsdp_wrapped_module.self_attn"),
    "data parallel": lambda name: "module." + name,
    "no weight": lambda name: name.removesuffix(".weight"),
    "language model outside": lambda name: name.replace(
        "model.model.layers", "model.language_model.model.layers"
    ),
    "language model inside": lambda name: name.replace(
        "model.model.layers", "model.model.language_model.layers"
    ),
    "backbone": lambda name: name.replace("model.model.layers", "model.backbone.layers"),
    "headless": lambda name: name.replace("model.model.layers", "model.layers"),
}


@pytest.mark.parametrize("infix", INFIXES)
def test_wrappers_in_names_change_nothing(tmp_path: Path, infix: str) -> None:
    model = make_model("llama")
    plain = write_adapter(model, tmp_path / "plain", "all-linear")
    expected = load_adapter(plain, linear_shapes(model))
    renamed = rename(plain, tmp_path / "renamed", INFIXES[infix])
    adapter = load_adapter(renamed, linear_shapes(model))
    assert adapter.weights.keys() == expected.weights.keys()
    for path, weights in adapter.weights.items():
        assert torch.equal(bits(weights.a), bits(expected.weights[path].a))
        assert torch.equal(bits(weights.b), bits(expected.weights[path].b))
        assert weights.scale == expected.weights[path].scale


def literal_bfloat16(values: Tensor) -> Tensor:
    """Round float32 to bfloat16 by definition: add half of the last place kept, ties to even."""
    pattern = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    odd = (pattern >> 16) & 1
    kept = ((pattern + 0x7FFF + odd) >> 16) & 0xFFFF
    return torch.where(kept >= 1 << 15, kept - (1 << 16), kept).to(torch.int16)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_factors_are_rounded_to_nearest_even(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(4, 48, generator=generator) * 10 ** torch.randint(-6, 2, (4, 1))
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 2.0**-140, 1 + 2**-8 + 2**-20])
    values[0, :5] = ties
    stored = values.to(dtype)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    b = torch.ones(64, 4).to(dtype)
    tensors = {f"{name}.lora_A.weight": stored, f"{name}.lora_B.weight": b}
    folder = write(tmp_path, tensors, {"peft_type": "LORA", "r": 4, "lora_alpha": 4})
    [entry] = parse(folder).entries
    assert torch.equal(entry.a.view(torch.int16), literal_bfloat16(stored.float()))
    if dtype == torch.float32:
        truncated = (stored.view(torch.int32) >> 16).to(torch.int16)
        assert not torch.equal(entry.a.view(torch.int16), truncated)


def test_scales_are_rounded_once_to_float32() -> None:
    for alpha, rank in [(1.0, 3), (16.0, 12), (0.1, 7), (16777217.0, 1)]:
        exact = alpha / rank
        scale = round_scale(exact)
        assert scale == torch.tensor(exact, dtype=torch.float64).float().item()
        assert abs(scale - exact) <= abs(exact) * 2**-24
    assert round_scale(1e300) == math.inf


def test_shards_with_an_index_are_one_adapter(tmp_path: Path) -> None:
    model = make_model("llama")
    plain = write_adapter(model, tmp_path / "plain", ATTENTION)
    expected = load_adapter(plain, linear_shapes(model))
    tensors, shards = tensors_of(plain), tmp_path / "shards"
    config = json.loads((plain / "adapter_config.json").read_text())
    weight_map: dict[str, str] = {}
    for number in range(2):
        part = dict(list(tensors.items())[number::2])
        write(shards, part, config)
        file = f"adapter_model-0000{number + 1}-of-00002.safetensors"
        (shards / "adapter_model.safetensors").rename(shards / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    adapter = load_adapter(shards, linear_shapes(model))
    assert adapter.weights.keys() == expected.weights.keys()
    for path, weights in adapter.weights.items():
        assert torch.equal(bits(weights.b), bits(expected.weights[path].b))


def test_the_hub_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    model = make_model("llama")
    written = write_adapter(model, tmp_path / "written", ATTENTION)
    snapshot = tmp_path / "models--x" / "snapshots" / "abc"
    blobs = tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("adapter_config.json", "adapter_model.safetensors")):
        (written / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    assert len(load_adapter(snapshot, linear_shapes(model)).weights) == 8


def test_a_model_without_the_targets_is_a_mismatch(tmp_path: Path) -> None:
    model = make_model("llama")
    folder = write_adapter(model, tmp_path, ATTENTION)
    shapes = {path: s for path, s in linear_shapes(model).items() if "o_proj" not in path}
    with pytest.raises(AdapterMismatchError, match=r"0\.self_attn\.o_proj.*strict off") as caught:
        load_adapter(folder, shapes)
    assert vars(caught.value)["code"] == "unmatched-path"
    adapter = load_adapter(folder, shapes, strict=False)
    assert len(adapter.weights) == 6
    [skipped] = adapter.report.skipped
    assert "o_proj" in skipped


def test_an_untrained_adapter_is_refused_unless_allowed(tmp_path: Path) -> None:
    model = make_model("llama")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with old_peft():
        adapted = peft.get_peft_model(copy.deepcopy(model), settings)
    adapted.save_pretrained(str(tmp_path))
    with pytest.raises(AdapterFormatError, match="allow_inert") as caught:
        load_adapter(tmp_path, linear_shapes(model))
    assert caught.value.code == "inert"
    adapter = load_adapter(tmp_path, linear_shapes(model), allow_inert=True)
    assert all(line.delta_norm == 0 for line in adapter.report.bound)


def test_an_empty_name_is_refused_and_not_replaced(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql", dense())
    assert load_adapter(folder, targets()).name == "sql"
    with pytest.raises(AdapterFormatError, match="needs a name"):
        load_adapter(folder, targets(), name="")
