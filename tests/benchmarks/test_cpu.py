"""The CPU benchmark on a tiny model: adapters made by PEFT, both gates, and the ratios."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import cpu

pytest.importorskip("peft")
# transformers 5.24 renames the argument that all versions since 5.17 know.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).bfloat16().eval().requires_grad_(False)


def test_a_run_has_gates_and_ratios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lorafold.demo.model.load_smollm2", lambda: (tiny_model(), None))
    path = tmp_path / "cpu.json"
    threads = torch.get_num_threads()
    small = ["--rows", "4", "--adapters", "2,3", "--ranks", "8,5", "--past", "3", "--rounds", "2"]
    cpu.main([*small, "--threads", str(threads), "--json", str(path)])
    saved = json.loads(path.read_text())
    assert [(row["rank"], row["adapters"]) for row in saved["rows"]] == [
        (8, 2),
        (8, 3),
        (5, 2),
        (5, 3),
    ]
    for row in saved["rows"]:
        # Three rows of q, k, v, o, gate, up and down.
        assert row["elements"] == 3 * (5 * 32 + 2 * 48)
        assert row["peft_off"] < 0.25
        assert min(row[f"{name}_ms"] for name in ("ours", "base", "peft", "peft_bf16")) > 0
    assert saved["geomean"]["of_peft"] > 0


def test_wrong_bits_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = cpu.contest(tiny_model(), [8], 2, tmp_path)
    names = ["8-0", "8-1", "8-0"]
    ids = torch.arange(12).view(3, 4)
    with torch.no_grad(), both.ours.rows(names):
        step = cpu.Decode(both.ours.model, ids)
        assert cpu.check_bits(both, step, names) > 0
        with pytest.raises(SystemExit, match="bits differ"):
            cpu.check_bits(both, step, ["8-1", "8-1", "8-0"])
        route = both.ours.model.model.layers[1].mlp.down_proj.route
        route.scale_table[both.ours.pool.names().index("8-1")] = 0.0
        with pytest.raises(SystemExit, match="down_proj row 1: bits differ"):
            cpu.check_bits(both, step, names)


def test_other_logits_stop_the_run() -> None:
    ours = torch.arange(8.0).view(2, 4)
    with pytest.raises(SystemExit, match="their logits are off by"):
        cpu.check_logits(ours, torch.zeros(2, 4), torch.zeros(2, 4))


def test_the_same_tokens_are_in_the_cache_at_every_step() -> None:
    lengths = []

    def forward(*, input_ids: torch.Tensor, past_key_values: Any) -> SimpleNamespace:
        rows, tokens = input_ids.shape
        keys = torch.zeros(rows, 1, tokens, 2)
        past_key_values.update(keys, keys, 0)
        lengths.append(past_key_values.get_seq_length())
        return SimpleNamespace(logits=torch.zeros(rows, tokens, 3))

    step = cpu.Decode(forward, torch.zeros(2, 6, dtype=torch.int64))
    assert (step().shape, step().shape) == ((2, 3), (2, 3))
    assert lengths == [5, 6, 6]
