"""Writes an adapter of linear layers as PEFT does today: a config and one safetensors file.

The folder appears whole or not at all, and only after it was read back and found equal.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lorafold.adapter import Adapter, LoraWeights, TargetShape
from lorafold.errors import LoraError
from lorafold.peft import load_adapter
from lorafold.peft.scale import round_scale

__all__ = ["alpha_of", "write_peft"]

_PREFIX = "base_model.model."


def alpha_of(weights: LoraWeights, *, use_rslora: bool = False) -> float:
    """The alpha that gives exactly this scale at this rank: a whole number where one does.

    Args:
        weights: of one target.
        use_rslora: whether alpha is divided by sqrt(rank) instead of rank.

    Example:
        >>> a, b = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, 3, dtype=torch.bfloat16)
        >>> alpha_of(LoraWeights(a, b, scale=round_scale(4 / 3)))
        4
    """
    divisor = math.sqrt(weights.rank) if use_rslora else weights.rank
    # Divided by the rank, a float64 gives the scale back: it holds 24 bits times a rank.
    exact = weights.scale * divisor
    whole = round(exact)
    return whole if round_scale(whole / divisor) == weights.scale else exact


def write_peft(adapter: Adapter, folder: Path) -> None:
    """Write an adapter whose targets are linear layers.

    Args:
        adapter: what to write; its factors are bfloat16 and stay so.
        folder: where; it must not exist, or be empty.

    Raises:
        LoraError: if the adapter has experts, the folder is in use or cannot be written, or what
            was written does not read back as the same adapter.
    """
    if adapter.experts:
        raise LoraError(
            f"`{adapter.name}` adapts routed experts ({next(iter(adapter.experts))} and so on); "
            "only adapters of linear layers can be written"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LoraError(f"`{folder}` exists and is not empty; hint: name a new folder")
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        partial.mkdir(parents=True)
        try:
            _write(adapter, partial)
            _check_equal(adapter, partial)
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise LoraError(f"`{folder}` cannot be written: {error}") from error


def _write(adapter: Adapter, folder: Path) -> None:
    tensors = {}
    for target, weights in adapter.weights.items():
        tensors[f"{_PREFIX}{target}.lora_A.weight"] = weights.a
        tensors[f"{_PREFIX}{target}.lora_B.weight"] = weights.b
    # Factors may share memory, which a file of tensors does not allow.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_config(adapter), indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")


def _config(adapter: Adapter) -> dict[str, Any]:
    """The most common rank and alpha, and patterns for the targets that have others."""
    all_weights = adapter.weights.values()
    # rsLoRA only where it is what was meant: whole alphas with it, and none without.
    use_rslora = any(not isinstance(alpha_of(w), int) for w in all_weights) and all(
        isinstance(alpha_of(w, use_rslora=True), int) for w in all_weights
    )
    settings = {
        path: (w.rank, alpha_of(w, use_rslora=use_rslora)) for path, w in adapter.weights.items()
    }
    (rank, alpha), _ = Counter(settings.values()).most_common(1)[0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(settings),
        "rank_pattern": {path: r for path, (r, _) in settings.items() if r != rank},
        "alpha_pattern": {path: a for path, (_, a) in settings.items() if a != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": use_rslora,
    }


def _check_equal(adapter: Adapter, folder: Path) -> None:
    """Read the folder back: the same targets, factors and scales, in every bit."""
    shapes = {
        path: TargetShape(weights.in_features, weights.out_features)
        for path, weights in adapter.weights.items()
    }
    found = load_adapter(folder, shapes, name=adapter.name, allow_inert=True).weights
    for path, weights in adapter.weights.items():
        other = found[path]
        if not (
            torch.equal(weights.a.view(torch.int16), other.a.view(torch.int16))
            and torch.equal(weights.b.view(torch.int16), other.b.view(torch.int16))
            and weights.scale == other.scale
        ):
            raise LoraError(f"`{path}` does not read back as it was written to `{folder}`")
