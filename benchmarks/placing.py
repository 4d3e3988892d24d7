"""How fast an adapter gets from host memory into a slot: all linear layers of Llama-3-8B, rank 64.

    python -m benchmarks.placing

Three ways, each timed on the host from call to return, the median of several: a plain copy of a
slot's bytes from page-locked memory, `Pool.place` of a packed adapter, and `Pool.place` of one that
it must pack first. What was placed is compared with what was given, byte for byte.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.record import describe
from lorafold.adapter import Adapter, LoraWeights, TargetShape
from lorafold.pool import Pool

__all__ = ["llama_targets", "measure_placing"]

LINEARS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}


def llama_targets(num_layers: int = 32, scale: int = 1) -> dict[str, TargetShape]:
    """The linear layers of Llama-3-8B, all sizes divided by `scale`."""
    return {
        f"model.layers.{layer}.{name}": TargetShape(k_in // scale, n_out // scale)
        for layer in range(num_layers)
        for name, (k_in, n_out) in LINEARS.items()
    }


def make_adapter(targets: dict[str, TargetShape], rank: int) -> Adapter:
    """An adapter of any bits."""
    generator = torch.Generator().manual_seed(0)

    def bits(*size: int) -> torch.Tensor:
        words = torch.empty(size, dtype=torch.int16).random_(generator=generator)
        return words.view(torch.bfloat16)

    weights = {
        target: LoraWeights(bits(rank, s.in_features), bits(s.out_features, rank), 1.0)
        for target, s in targets.items()
    }
    return Adapter("measured", weights)


def measure_placing(
    targets: dict[str, TargetShape] | None = None,
    *,
    rank: int = 64,
    device: str = "cuda",
    repeats: int = 9,
) -> dict[str, Any]:
    """Gigabytes per second of the three ways, and the share of the plain copy's that placing has.

    Raises:
        SystemExit: if what was placed differs from what was given.
    """
    targets = targets or llama_targets()
    adapter = make_adapter(targets, rank)
    pool = Pool(targets, max_loras=2, max_rank=rank, device=device)
    packed = pool.pack(adapter)
    there = torch.empty_like(packed.image, device=device)
    num_bytes = packed.image.nbytes

    def copy() -> None:
        there.copy_(packed.image, non_blocking=True)
        if there.is_cuda:
            torch.cuda.current_stream().synchronize()

    ways: dict[str, Callable[[], object]] = {
        "copy": copy,
        "place": lambda: pool.place(packed),
        "pack_and_place": lambda: pool.place(replace(adapter, name="other")),
    }
    rates = {name: num_bytes / _seconds(way, repeats) / 1e9 for name, way in ways.items()}
    for name in ("measured", "other"):
        if not torch.equal(_bits(pool._memory[pool.slot(name)]), _bits(there)):
            raise SystemExit(f"`{name}` is not in its slot as it was given")
    return {
        "adapter_bytes": num_bytes,
        **{f"{name}_gb_per_s": round(rate, 2) for name, rate in rates.items()},
        "place_share": round(rates["place"] / rates["copy"], 3),
    }


def _bits(image: torch.Tensor) -> torch.Tensor:
    return image.view(torch.int16)


def _seconds(way: Callable[[], object], repeats: int) -> float:
    """The median of some calls, after one that takes what memory it needs."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        way()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


if __name__ == "__main__":
    print(json.dumps(describe("placing", [measure_placing()])))
