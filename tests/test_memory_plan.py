"""What `lorafold plan` says beforehand is what an error says afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lorafold.cli.app import app
from lorafold.errors import BackendError
from lorafold.runtime import attach
from tests.tiny_models import make_model


def planned(folder: Path, *options: Any) -> dict[str, Any]:
    arguments = ["plan", "--model", folder, "--max-loras", 3, "--max-rank", 7, *options, "--json"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def no_memory(device: torch.device) -> int:
    return 17


def test_linear_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.config.save_pretrained(tmp_path)
    plan = planned(tmp_path)
    monkeypatch.setattr("lorafold.pool.free_bytes", no_memory)
    with pytest.raises(BackendError) as caught:
        attach(model, max_loras=3, max_rank=7)
    message = str(caught.value)
    assert f"cpu has 17 bytes free, a pool needs {plan['bytes']} bytes for 3 slots" in message
    monkeypatch.undo()
    lora = attach(model, max_loras=3, max_rank=7)  # the model is as it was
    assert lora.pool.nbytes == plan["bytes"]
    assert lora.pool._layout.image_bytes(pinned=False) < plan["bytes_per_adapter"]


def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3_next")
    model.config.save_pretrained(tmp_path)
    plan = planned(tmp_path, "--max-expert-rank", 3)
    settings: dict[str, Any] = {"max_loras": 3, "max_rank": 7, "max_expert_rank": 3}
    monkeypatch.setattr("lorafold.expert_pool.free_bytes", no_memory)
    with pytest.raises(BackendError, match=f"needs {plan['expert_bytes']} bytes .* the experts"):
        attach(model, **settings)
    monkeypatch.undo()
    monkeypatch.setattr("lorafold.pool.free_bytes", no_memory)
    rest = plan["bytes"] - plan["expert_bytes"]
    figures = f"{rest} bytes for 3 slots .* beside {plan['expert_bytes']} bytes for the experts"
    with pytest.raises(BackendError, match=figures):
        attach(model, **settings)
