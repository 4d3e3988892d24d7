"""Folders of adapters for tests: shapes of real models, and files written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lorafold.adapter import ExpertShape, TargetShape

CONFIG: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6}
PREFIX = "base_model.model.model.layers."
HIDDEN, INNER, VOCABULARY = 16, 24, 40

SIZES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, 8),
    "self_attn.v_proj": (HIDDEN, 8),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}

Targets = dict[str, TargetShape | ExpertShape]


def targets(root: str = "model.layers", num_layers: int = 2) -> Targets:
    """The targets of a dense model of the sizes above, with an output head."""
    found: Targets = {
        f"{root}.{layer}.{module}": TargetShape(*sizes)
        for layer in range(num_layers)
        for module, sizes in SIZES.items()
    }
    return found | {"lm_head": TargetShape(HIDDEN, VOCABULARY)}


def linear_shapes(model: nn.Module) -> Targets:
    """The targets of a real model: its linear layers."""
    return {
        path: TargetShape(module.in_features, module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def factor(*shape: int, seed: int = 0) -> Tensor:
    """Random values that are exact in bfloat16, stored in float32."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16).float()


def pair(path: str, sizes: tuple[int, int], rank: int = 4, *, seed: int = 0) -> dict[str, Tensor]:
    """lora_A and lora_B of one module, by their names in the file."""
    return {
        f"{path}.lora_A.weight": factor(rank, sizes[0], seed=seed),
        f"{path}.lora_B.weight": factor(sizes[1], rank, seed=seed + 1),
    }


def dense(
    modules: tuple[str, ...] = ("self_attn.q_proj", "mlp.down_proj"),
    *,
    prefix: str = PREFIX,
    rank: int = 4,
) -> dict[str, Tensor]:
    """The tensors of a plain adapter on two layers."""
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        for number, module in enumerate(modules):
            name = f"{prefix}{layer}.{module}"
            tensors |= pair(name, SIZES[module], rank, seed=10 * layer + 2 * number)
    return tensors


def write(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = CONFIG
) -> Path:
    """Write an adapter's folder as PEFT lays it out; config None writes none."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder."""
    return load_file(folder / "adapter_model.safetensors")


def rename(folder: Path, to: Path, change: Any, **config: Any) -> Path:
    """Copy a folder with every tensor name changed, and fields of the config replaced."""
    fields = json.loads((folder / "adapter_config.json").read_text()) | config
    return write(to, {change(name): tensor for name, tensor in tensors_of(folder).items()}, fields)
