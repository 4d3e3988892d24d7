"""Modules of an adapter and targets of a model: found in one place, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorafold.errors import AdapterError, AdapterMismatchError
from lorafold.peft import load_adapter, parse
from lorafold.peft.names import TensorName, read_name
from lorafold.peft.paths import Match, resolve, resolve_flat
from lorafold.refusal import Decisions
from tests.peft.folders import CONFIG, HIDDEN, PREFIX, dense, factor, pair, targets, write


def found(path: str, *names: str) -> tuple[str, ...] | str:
    """The targets of a path among some names, or the code of the refusal."""
    try:
        return resolve([path], names, Decisions("sql"))[path].targets
    except AdapterError as error:
        return str(error.code)


Q = "0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("path", "names", "result"),
    [
        (f"model.layers.{Q}", [f"model.layers.{Q}"], 0),
        (f"model.layers.{Q}", [f"model.language_model.layers.{Q}"], 0),
        (f"model.layers.{Q}", [f"language_model.model.layers.{Q}"], 0),
        (f"language_model.model.layers.{Q}", [f"model.layers.{Q}"], 0),
        (f"backbone.layers.{Q}", [f"model.layers.{Q}"], 0),
        (f"layers.{Q}", [f"model.layers.{Q}"], 0),
        (f"x.model.layers.{Q}", [f"model.layers.{Q}"], 0),
        ("lm_head", ["language_model.lm_head"], 0),
        ("lm_head", ["thinker.lm_head"], 0),
        ("lm_head", ["lm_head", "talker.lm_head"], 0),
        ("lm_head", ["thinker.lm_head", "talker.lm_head"], "ambiguous-path"),
        ("model.unembed_tokens", ["lm_head"], 0),
        ("model.layers.0.attn.q_proj", [f"model.layers.{Q}"], 0),
        ("model.layers.0.block_sparse_moe.gate", ["model.layers.0.mlp.gate"], 0),
        # A language adapter never lands in another tower, and two places are one too many.
        (f"model.layers.{Q}", [f"model.vision_tower.layers.{Q}"], "unmatched-path"),
        (
            f"layers.{Q}",
            [f"model.vision_tower.layers.{Q}", f"model.language_model.layers.{Q}"],
            "ambiguous-path",
        ),
        (
            f"model.layers.{Q}",
            [f"model.language_model.layers.{Q}", f"language_model.layers.{Q}"],
            "ambiguous-path",
        ),
        (f"model.layers.{Q}", [f"model.layers.{Q}", f"language_model.layers.{Q}"], 0),
        # Segments count as wholes.
        ("model.layers.0.q_proj", ["model.layers.0.qq_proj"], "unmatched-path"),
        ("ers.0.q_proj", ["layers.0.q_proj"], "unmatched-path"),
        ("model.layers.1.q_proj", ["model.layers.11.q_proj"], "unmatched-path"),
    ],
)
def test_a_module_is_found_in_one_place(path: str, names: list[str], result: int | str) -> None:
    assert found(path, *names) == ((names[result],) if isinstance(result, int) else result)


def test_a_list_of_layers_moves_as_a_whole() -> None:
    text = [f"model.text.layers.{layer}.q_proj" for layer in range(2)]
    vision = [f"model.vision.layers.{layer}.q_proj" for layer in range(3)]
    paths = [f"layers.{layer}.q_proj" for layer in range(3)]
    # Only the vision tower has three layers: the three belong there together, never two and one.
    matches = resolve(paths, text + vision, Decisions("sql"))
    assert [match.targets[0] for match in matches.values()] == vision
    # A place of the very name wins, and is not left for single modules.
    exact = [f"layers.{layer}.q_proj" for layer in range(2)]
    with pytest.raises(AdapterError, match=r"`layers\.2\.q_proj`; targets"):
        resolve(paths, exact + vision, Decisions("sql"))


def test_a_move_is_reported() -> None:
    decisions = Decisions("sql")
    resolve([f"model.layers.{Q}"], [f"model.language_model.layers.{Q}"], decisions)
    assert decisions.notes == [
        "`model.layers` in the file is `model.language_model.layers` in the model"
    ]


def test_two_modules_never_share_a_target() -> None:
    paths = ["model.layers.0.attn.q_proj", f"model.layers.{Q}"]
    with pytest.raises(AdapterError, match="are both the target"):
        resolve(paths, [f"model.layers.{Q}"], Decisions("sql"))


def test_all_that_is_missing_is_told_at_once() -> None:
    paths = ["a.0.up", "b.0.up", "lm_head"]
    with pytest.raises(AdapterMismatchError, match=r"`a.0.up`, `b.0.up`, `lm_head`; .*all-linear"):
        resolve(paths, ["c.0.up"], Decisions("sql"))
    decisions = Decisions("sql", strict=False)
    assert resolve([*paths, "c.0.up"], ["c.0.up"], decisions).keys() == {"c.0.up"}
    assert len(decisions.skipped) == 1


def test_fused_modules_are_slices() -> None:
    parts = tuple(f"model.layers.0.{name}" for name in ("q_proj", "k_proj", "v_proj"))
    whole = "model.layers.0.qkv_proj"
    assert resolve([whole], parts, Decisions("sql")) == {whole: Match(parts)}
    assert resolve(parts[:1], [whole], Decisions("sql")) == {parts[0]: Match((whole,), "q_proj")}
    assert found(whole, *parts[:2]) == "unmatched-path"
    # Where the model has both, names are taken literally.
    assert found(parts[0], whole, *parts) == (parts[0],)
    assert found(parts[0], whole, *parts[1:]) == "unmatched-path"


@given(
    st.lists(st.sampled_from(["model", "language_model", "vision", "x"]), max_size=3),
    st.lists(st.sampled_from(["model", "language_model", "vision", "x"]), max_size=3),
    st.integers(1, 3),
)
def test_finding_is_one_to_one(here: list[str], there: list[str], num_layers: int) -> None:
    names = [".".join([*there, f"layers.{layer}.q_proj"]) for layer in range(num_layers)]
    paths = [".".join([*here, f"layers.{layer}.q_proj"]) for layer in range(num_layers)]
    try:
        matches = resolve(paths, names, Decisions("sql"))
    except AdapterMismatchError:
        assert here != there
    else:
        # One list in the model: layer i of the file is layer i of the model.
        assert [matches[path].targets for path in paths] == [(name,) for name in names]


@pytest.mark.parametrize(
    ("raw", "path", "role", "adapter"),
    [
        ("base_model.model.lm_head.lora_A.weight", "lm_head", "a", ""),
        ("base_model.model.model.x.lora_B.default.weight", "model.x", "b", "default"),
        ("_orig_mod.base_model.model.x.lora_A.weight", "x", "a", ""),
        ("module.base_model.model.module.x.lora_A", "x", "a", ""),
        ("base_model.x.lora_embedding_A.default", "x", "embedding_a", "default"),
        ("lora_unet_x.lora_up.weight", "lora_unet_x", "b", ""),
        ("lora_unet_x.alpha", "lora_unet_x", "alpha", ""),
        ("base_model.model.lm_head.base_layer.weight", "lm_head", "copy", ""),
        (
            "base_model.model.x.lora_velora_embed.default",
            "x.lora_velora_embed.default",
            "dropped",
            "",
        ),
    ],
)
def test_names_are_taken_apart(raw: str, path: str, role: str, adapter: str) -> None:
    name = read_name(raw)
    assert isinstance(name, TensorName)
    assert (name.path, name.role, name.adapter) == (path, role, adapter)


@given(st.text(alphabet="ab.lora_AB weight0", max_size=40))
def test_any_name_is_taken_apart_or_refused(raw: str) -> None:
    name = read_name(raw)
    assert not isinstance(name, TensorName) or name.raw == raw


def kohya(prefix: str, *, alpha: float | None = None, root: str = "model_layers") -> dict[str, Any]:
    """A plain adapter in kohya's names."""
    tensors: dict[str, Any] = {}
    for name, tensor in dense(prefix="").items():
        layer_and_module, factor_name = name.split(".lora_")
        flat = f"{prefix}{root}_{layer_and_module.replace('.', '_')}"
        kind = "lora_down" if factor_name.startswith("A") else "lora_up"
        tensors[f"{flat}.{kind}.weight"] = tensor
        if alpha is not None:
            tensors[f"{flat}.alpha"] = torch.tensor(alpha)
    return tensors


@pytest.mark.parametrize("prefix", ["lora_te_", "lora_unet_", "lora_", ""])
@pytest.mark.parametrize("root", ["model_layers", "layers"])
def test_kohya_names_are_the_same_adapter(tmp_path: Path, prefix: str, root: str) -> None:
    expected = load_adapter(write(tmp_path / "peft", dense()), targets())
    folder = write(tmp_path / "kohya", kohya(prefix, alpha=6.0, root=root), None)
    (folder / "adapter_model.safetensors").rename(folder / "my-style.safetensors")
    adapter = load_adapter(folder, targets())
    assert adapter.weights.keys() == expected.weights.keys()
    for path, weights in adapter.weights.items():
        assert torch.equal(weights.a, expected.weights[path].a)
        assert torch.equal(weights.b, expected.weights[path].b)
        assert weights.scale == expected.weights[path].scale == 1.5
    assert adapter.report.num_tensors == 12


def test_kohya_scales_come_from_the_file_or_are_one(tmp_path: Path) -> None:
    without = load_adapter(write(tmp_path / "0", kohya("lora_te_"), None), targets())
    assert {weights.scale for weights in without.weights.values()} == {1.0}
    with_config = load_adapter(write(tmp_path / "1", kohya("lora_te_"), CONFIG), targets())
    assert {weights.scale for weights in with_config.weights.values()} == {1.5}
    with pytest.raises(AdapterError, match="the config says 6"):
        parse(write(tmp_path / "2", kohya("lora_te_", alpha=3.0), CONFIG))


def test_flat_names_must_mean_one_target() -> None:
    decisions = Decisions("sql")
    names = ["a.b_c.proj", "a_b.c.proj"]
    with pytest.raises(AdapterError, match="could be"):
        resolve_flat(["lora_te_a_b_c_proj"], names, decisions)
    with pytest.raises(AdapterError, match="no target"):
        resolve_flat(["lora_te_other_proj"], names, decisions)
    with pytest.raises(AdapterError, match="are both the target"):
        resolve_flat(["lora_te_lm_head", "lora_lm_head"], ["lm_head"], decisions)


def test_tinker_names_are_known(tmp_path: Path) -> None:
    tensors = pair("base_model.model.model.unembed_tokens", (HIDDEN, 40))
    tensors |= pair(f"{PREFIX}0.attn.q_proj", (HIDDEN, HIDDEN))
    tensors[f"{PREFIX}1.attn.q_proj.lora_A.weight"] = factor(4, HIDDEN)
    tensors[f"{PREFIX}1.attn.q_proj.lora_B.weight"] = factor(HIDDEN, 4)
    adapter = load_adapter(write(tmp_path, tensors), targets())
    assert sorted(adapter.weights) == [
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
    ]
