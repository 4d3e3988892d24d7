"""Small adapters in PEFT folders, of any rank and many versions, and a pool that they fit."""

from __future__ import annotations

from pathlib import Path

from lorafold.adapter import Adapter, TargetShape
from lorafold.peft import load_adapter
from lorafold.pool import Pool
from tests.peft.folders import CONFIG, PREFIX, SIZES, pair, write

MODULES = ("self_attn.q_proj", "mlp.down_proj")
TARGETS = {f"model.layers.0.{m}": TargetShape(*SIZES[m]) for m in MODULES}

NAMES = ["a", "b", "c", "d"]
NUM_VERSIONS = 3
_RANKS = [1, 2, 4]


def make_pool(max_loras: int = 2, max_rank: int = 4) -> Pool:
    return Pool(TARGETS, max_loras=max_loras, max_rank=max_rank)


def write_adapter(folder: Path, *, rank: int = 2, seed: int = 0) -> Path:
    """Folders of another seed hold other values, and another scale."""
    tensors = {}
    for number, module in enumerate(MODULES):
        tensors |= pair(f"{PREFIX}0.{module}", SIZES[module], rank, seed=1000 * seed + 10 * number)
    return write(folder, tensors, CONFIG | {"r": rank, "lora_alpha": 4 + seed})


def read(name: str, folder: str | Path) -> Adapter:
    return load_adapter(folder, TARGETS, name=name)


def write_versions(root: Path) -> dict[tuple[str, int], Path]:
    """Per name and version a folder, of several ranks; version 0 is broken."""
    found = {}
    for number, name in enumerate(NAMES):
        for version in range(NUM_VERSIONS):
            rank = _RANKS[(number + version) % len(_RANKS)]
            folder = write_adapter(root / f"{name}{version}", rank=rank, seed=10 * number + version)
            if version == 0:
                (folder / "adapter_config.json").write_text("{")
            found[name, version] = folder
    return found
