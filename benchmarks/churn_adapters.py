"""Adapters that come in versions: as PEFT folders to load, and as tensors to check against.

Values are windows of one random vector, so that hundreds of adapters are made in no time. What is
checked against never passes through a file, a store or a pool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from lorafold.adapter import TargetShape
from lorafold.ops import LoraPair

__all__ = ["Versions"]


class Versions:
    """All versions of all adapters.

    Args:
        targets: per path, the shape.
        ranks: dealt over the adapters.
        max_rank: the rank to which `pair` pads.
        device: where the pairs are.
    """

    def __init__(
        self,
        targets: Mapping[str, TargetShape],
        ranks: Sequence[int],
        max_rank: int,
        device: torch.device,
    ) -> None:
        self.targets = dict(targets)
        self.ranks = list(ranks)
        self._max_rank = max_rank
        self._device = device
        self._longest = max(
            max_rank * max(shape.in_features, shape.out_features) for shape in targets.values()
        )
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(2 * self._longest + 1_000_003, generator=generator)
        self._values = (values * 0.05).bfloat16()
        self._pairs: dict[tuple[int, int], dict[str, LoraPair]] = {}

    def rank(self, adapter: int) -> int:
        return self.ranks[adapter % len(self.ranks)]

    def scale(self, adapter: int, version: int) -> float:
        """alpha / rank, rounded to float32; seldom a power of two."""
        return torch.tensor(self._alpha(adapter, version) / self.rank(adapter)).item()

    def _alpha(self, adapter: int, version: int) -> int:
        return self.rank(adapter) + 3 + version

    def factors(self, adapter: int, version: int, target: str) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] on the CPU."""
        rank, shape = self.rank(adapter), self.targets[target]
        number = (adapter * 64 + version) * len(self.targets) + list(self.targets).index(target)
        # A prime step: windows overlap, but no two begin at one place.
        start = number * 7919 % 1_000_003
        size_a, size_b = rank * shape.in_features, shape.out_features * rank
        a = self._values[start : start + size_a].view(rank, -1)
        start_b = start + self._longest
        b = self._values[start_b : start_b + size_b].view(-1, rank)
        return a, b

    def write(self, adapter: int, version: int, folder: Path) -> Path:
        """Store a version as PEFT does."""
        tensors = {}
        for target in self.targets:
            a, b = self.factors(adapter, version, target)
            tensors[f"base_model.model.{target}.lora_A.weight"] = a.clone()
            tensors[f"base_model.model.{target}.lora_B.weight"] = b.clone()
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank(adapter),
            "lora_alpha": self._alpha(adapter, version),
        }
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    def pair(self, adapter: int, version: int, target: str) -> LoraPair:
        """A version's factors on the device, copied there by themselves."""
        key = adapter, version
        if key not in self._pairs:
            self._pairs[key] = {name: self._pair(*key, name) for name in self.targets}
        return self._pairs[key][target]

    def _pair(self, adapter: int, version: int, target: str) -> LoraPair:
        rank, shape = self.rank(adapter), self.targets[target]
        # Padded, so that one compiled kernel checks all ranks.
        padded_a = torch.zeros(self._max_rank, shape.in_features, dtype=torch.bfloat16)
        padded_b = torch.zeros(shape.out_features, self._max_rank, dtype=torch.bfloat16)
        padded_a[:rank], padded_b[:, :rank] = self.factors(adapter, version, target)
        return LoraPair(
            padded_a.to(self._device),
            padded_b.to(self._device),
            self.scale(adapter, version),
            rank=rank,
        )
