"""A folder that holds what the documentation speaks of: tiny models and adapters by those names."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lorafold import ops
from lorafold.cli.app import app
from tests.moe_models import make_moe, write_apart
from tests.tiny_models import make_model, write_adapter
from tests.tiny_text import make_tokenizer, save_model

MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "llama", "path/to/model")
ADAPTERS = {
    "pirate": "examples/adapters/pirate",
    "json": "examples/adapters/json",
    "telegram": "examples/adapters/telegram",
    "sql": "adapters/sql",
    "poet": "adapters/poet",
    "sql again": "path/to/sql-adapter",
    "poet again": "path/to/poet-adapter",
}
WEIGHTS = "adapter_model.safetensors"
TARGETS = (["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"])


def write_place(folder: Path) -> Path:
    """Write the models, the adapters and a case of `lorafold verify`."""
    source = save_model(folder / MODELS[0])
    for other in MODELS[1:]:
        shutil.copytree(source, folder / other)
    model = make_model()
    for number, path in enumerate(ADAPTERS.values()):
        write_adapter(model, folder / path, TARGETS[number % 2], rank=8, alpha=16, seed=number)
    write_adapter(model, folder / "adapters/dora", ["q_proj"], use_dora=True)
    write_adapter(model, folder / "adapters/one-layer", TARGETS[0], layers_to_transform=[0])
    torch.save(load_file(folder / ADAPTERS["sql"] / WEIGHTS), folder / "adapter_model.bin")
    experts = make_moe("qwen3_moe")
    experts.save_pretrained(folder / "qwen3-moe")
    make_tokenizer().save_pretrained(folder / "qwen3-moe")
    write_apart(experts, folder / "adapters/experts")
    write_case(folder / "lorafold-verify-case.safetensors")
    return folder


def write_case(file: Path) -> None:
    """What `lorafold verify` writes where a bit differs, here because an operator is broken."""
    original = ops.apply_lora_bgmv

    def broken(route: Any, x: Any, out: Any, *rest: Any, **kwargs: Any) -> None:
        original(route, x, out, *rest, **kwargs)
        if x.shape[0] > 1:
            out.view(torch.int16)[-1, -1] ^= 1

    words = ["verify", "--quick", "--device", "cpu", "--only", "row alone", "--case", str(file)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "apply_lora_bgmv", broken)
        assert CliRunner().invoke(app, words).exit_code == 1
    assert file.exists()
