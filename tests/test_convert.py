"""`lorafold convert`: what it writes loads to the same bits, and means the same to real PEFT."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lorafold.adapter import Adapter
from lorafold.cli.shapes import read_shapes
from lorafold.peft import load_adapter, parse
from tests.moe_models import make_moe, merged, router_name, write_apart
from tests.peft.folders import CONFIG, dense, pair, rename, tensors_of, write
from tests.test_cli import cli, cli_json
from tests.tiny_models import (
    COMMON,
    adapted_by_peft,
    bits,
    make_model,
    random_ids,
    write_adapter,
)

# PEFT says so of the patterns of every expert parameter, and applies them all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not")

DATA = Path(__file__).parent / "data" / "peft_experts"


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_model()


@pytest.fixture(scope="module")
def model_folder(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "sql"
    return write_adapter(model, folder, ["q_proj", "down_proj"], rank=3, alpha=4.0)


def logits(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    adapted = adapted_by_peft(model, folder, torch.float64)
    with torch.no_grad():
        return adapted(random_ids(2, 7)).logits


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"rank": 8, "use_rslora": True},
        {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 9}},
        {"layers_to_transform": [1]},
    ],
    ids=["plain", "rslora", "patterns", "one-layer"],
)
def test_a_converted_adapter_means_the_same_to_peft(config, model, tmp_path):
    before = write_adapter(model, tmp_path / "before", ["q_proj", "down_proj"], **config)
    after = tmp_path / "deep" / "after"
    shown = cli_json("convert", before, after)
    assert shown["rank"] == max(row["rank"] for row in cli_json("inspect", before)["targets"])
    assert torch.equal(logits(model, after), logits(model, before))
    assert {tensor.dtype for tensor in tensors_of(after).values()} == {torch.bfloat16}


def test_a_scale_that_no_whole_alpha_gives_survives(tmp_path):
    before = write(tmp_path / "before", dense(rank=4), CONFIG | {"lora_alpha": 0.7})
    cli("convert", before, tmp_path / "after")
    scales = [
        {entry.scale for entry in parse(tmp_path / each).entries} for each in ("before", "after")
    ]
    assert scales[0] == scales[1]


def test_kohya_files_need_the_model(model_folder, tmp_path):
    """Names with underscores for dots, and alphas as tensors."""
    path = "model.layers.1.self_attn.q_proj"
    factors = pair("x", (COMMON["hidden_size"], 4 * COMMON["head_dim"]), rank=4)
    flat = f"lora_unet_{path.replace('.', '_')}"
    tensors = {
        f"{flat}.lora_down.weight": factors["x.lora_A.weight"],
        f"{flat}.lora_up.weight": factors["x.lora_B.weight"],
        f"{flat}.alpha": torch.tensor(2.0),
    }
    before = write(tmp_path / "before", tensors, None)
    after = tmp_path / "after"
    assert "name its model with --model" in cli("convert", before, after, code=1)
    assert not after.exists()
    shown = cli_json("convert", before, after, "--model", model_folder)
    assert shown["targets"] == [path]
    written = tensors_of(after)
    prefix = f"base_model.model.{path}"
    assert torch.equal(written[f"{prefix}.lora_A.weight"].float(), factors["x.lora_A.weight"])
    assert torch.equal(written[f"{prefix}.lora_B.weight"].float(), factors["x.lora_B.weight"])
    assert parse(after).entries[0].scale == 0.5


def test_convert_leaves_nothing_half_done(adapter, tmp_path, monkeypatch):
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").write_text("mine")
    assert "not empty" in cli("convert", adapter, used, code=1)
    assert [each.name for each in used.iterdir()] == ["file"]
    experts = DATA / "peft-0.19.0-qwen3_moe"
    assert "name its model with --model" in cli("convert", experts, tmp_path / "out", code=1)
    copied = dense() | {"base_model.model.lm_head.base_layer.weight": torch.zeros(4, 4)}
    head = write(tmp_path / "head", copied)
    assert "name its model with --model" in cli("convert", head, tmp_path / "out", code=1)

    from lorafold.cli import write_peft

    monkeypatch.setattr(write_peft, "alpha_of", lambda *args, **kwargs: 1)
    assert "does not read back" in cli("convert", adapter, tmp_path / "out", code=1)
    assert {each.name for each in tmp_path.iterdir()} == {"used", "head"}


def factors_of(adapter: Adapter) -> dict[str, tuple[Tensor, Tensor, float]]:
    found = {path: (bits(w.a), bits(w.b), w.scale) for path, w in adapter.weights.items()}
    for path, lora in adapter.experts.items():
        for name, part in (("gate_up", lora.gate_up), ("down", lora.down)):
            if part is not None:
                found[f"{path}.{name}"] = (bits(part.a), bits(part.b), part.scale)
    return found


def assert_same_factors(before: Path, after: Path, model_folder: Path, **options: Any) -> None:
    targets = read_shapes(model_folder).targets
    one = factors_of(load_adapter(before, targets, **options))
    other = factors_of(load_adapter(after, targets))
    assert one.keys() == other.keys()
    for path, (a, b, scale) in one.items():
        assert torch.equal(a, other[path][0])
        assert torch.equal(b, other[path][1])
        assert scale == other[path][2]


@pytest.mark.parametrize("with_model", [False, True])
def test_an_embedding_and_a_head_survive(model, model_folder, tmp_path, with_model):
    targets = ["embed_tokens", "q_proj", "lm_head"]
    before = write_adapter(model, tmp_path / "before", targets, rank_pattern={"embed_tokens": 2})
    tensors = {n: t for n, t in tensors_of(before).items() if "base_layer" not in n}
    before = write(
        tmp_path / "plain", tensors, json.loads((before / "adapter_config.json").read_text())
    )
    after = tmp_path / "after"
    cli("convert", before, after, *(["--model", model_folder] if with_model else []))
    assert any(name.endswith("embed_tokens.lora_embedding_A") for name in tensors_of(after))
    assert_same_factors(before, after, model_folder)
    assert torch.equal(logits(model, after), logits(model, before))


EXPERTS: dict[str, dict[str, Any]] = {
    "both": {},
    "ranks and alphas": {
        "rank_pattern": {"experts.down_proj": 5},
        "alpha_pattern": {"experts.gate_up_proj": 7},
    },
    "gate_up alone": {"target_parameters": ["experts.gate_up_proj"]},
    "down alone": {"target_parameters": ["experts.down_proj"]},
    "one layer of two": {
        "target_parameters": ["1.mlp.experts.gate_up_proj", "0.mlp.experts.down_proj"]
    },
    "rslora": {"use_rslora": True},
}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("variant", EXPERTS)
def test_experts_and_routers_survive(tmp_path, family, variant):
    model = make_moe(family)
    model.save_pretrained(tmp_path / "model")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    parameters.append(f"mlp.{router_name(family)}.weight")
    settings = {"target_parameters": parameters, "rank": 3, "alpha": 4.0} | EXPERTS[variant]
    before = write_adapter(model, tmp_path / "before", ["q_proj"], **settings)
    after = tmp_path / "after"
    shown = cli_json("convert", before, after, "--model", tmp_path / "model")
    assert any(target.endswith("experts") for target in shown["targets"])
    assert_same_factors(before, after, tmp_path / "model")
    assert torch.equal(logits(model, after), logits(model, before))
    plain = make_moe(family).double()
    plain.set_experts_implementation("eager")
    assert not torch.allclose(logits(model, after), plain(random_ids(2, 7)).logits, atol=0.1)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_one_by_one_become_peft_s_parameters(tmp_path, family):
    """Gate and up have an A and a rank of their own; real PEFT then computes what they mean."""
    model = make_moe(family)
    model.save_pretrained(tmp_path / "model")
    before, after = write_apart(model, tmp_path / "before"), tmp_path / "after"
    shown = cli_json("convert", before, after, "--model", tmp_path / "model")
    assert shown["rank"] == 3 + 5
    assert_same_factors(before, after, tmp_path / "model")
    ids = random_ids(2, 7)
    want = merged(model, before, torch.float64)(ids).logits
    torch.testing.assert_close(logits(model, after), want, rtol=1e-5, atol=1e-5)
    assert (model(ids).logits - want).abs().max() > 0.5


@pytest.mark.parametrize("layout", ["peft-0.18", "unsloth"])
def test_older_layouts_become_today_s(tmp_path, layout):
    model = make_moe("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    today = write_adapter(model, tmp_path / "today", [], rank=3, target_parameters=parameters)
    tensors, num_experts = tensors_of(today), 6
    for name in [name for name in tensors if "lora_A" in name]:
        other = name.replace("lora_A", "lora_B")
        a, b = tensors[name], tensors[other]
        by_expert = b.view(-1, 3, num_experts).permute(2, 0, 1)
        if layout == "unsloth":
            tensors[other] = by_expert.transpose(0, 1).flatten(1)
        else:  # in and out swapped
            tensors[name] = by_expert.transpose(1, 2).flatten(0, 1)
            swapped = a.view(num_experts, 3, -1).transpose(1, 2)
            tensors[other] = swapped.permute(1, 2, 0).flatten(1)
    config = json.loads((today / "adapter_config.json").read_text()) | {"peft_version": "0.18.1"}
    old, after = write(tmp_path / "old", tensors, config), tmp_path / "after"
    options = ("--model", tmp_path / "model", "--expert-layout", layout)
    cli("convert", old, after, *options)
    assert_same_factors(today, after, tmp_path / "model")
    assert_same_factors(old, after, tmp_path / "model", expert_layout=layout)
    assert cli_json("inspect", old, *options)["rank"] == 3
    assert "must be one of peft, peft-0.18" in " ".join(
        cli("convert", old, tmp_path / "x", *options[:3], "x", code=2).replace("│", " ").split()
    )


def test_what_does_not_read_back_is_not_written(tmp_path, monkeypatch):
    model = make_moe("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    before = write_adapter(
        model, tmp_path / "before", [], target_parameters=["mlp.experts.down_proj"]
    )
    from lorafold.cli import write_peft

    monkeypatch.setattr(
        write_peft, "fold", lambda a, b: (a.flatten(0, 1), b.transpose(0, 1).flatten(1))
    )
    arguments = ("convert", before, tmp_path / "after", "--model", tmp_path / "model")
    assert "experts.down_proj` does not read back" in cli(*arguments, code=1)
    assert not (tmp_path / "after").exists()


def test_names_of_other_wrappers_become_the_model_s(model_folder, model, adapter, tmp_path):
    renamed = rename(
        adapter, tmp_path / "renamed", lambda name: name.replace("model.model", "language_model")
    )
    cli("convert", renamed, tmp_path / "after", "--model", model_folder)
    assert torch.equal(logits(model, tmp_path / "after"), logits(model, adapter))


def test_convert_writes_into_an_empty_folder_but_not_under_ones_feet(
    adapter, tmp_path, monkeypatch
):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    for name in (".", empty):
        assert "is the current folder" in cli("convert", adapter, name, code=1)
    assert not list(empty.iterdir())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(empty)
    cli("convert", adapter, "link")
    assert (tmp_path / "link").is_symlink()
    assert parse(empty).entries
    assert {each.name for each in tmp_path.iterdir()} == {"empty", "link"}


def test_what_a_killed_convert_left_behind_is_not_in_the_way(adapter, tmp_path):
    (tmp_path / ".out.partial").mkdir()
    cli("convert", adapter, tmp_path / "out")
    assert parse(tmp_path / "out").entries


def test_a_full_disk_is_a_refusal(adapter, tmp_path):
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
        "from lorafold.cli import main; main()"
    )
    words = [sys.executable, "-c", code, "convert", str(adapter), str(tmp_path / "out")]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
