"""What vLLM hands to its LoRA interface, made without vLLM: layers, stacked slots, mappings, rows.

Layouts are those of the layer classes of the versions in `lorafold.integrations.vllm.TESTED`; that
real layers have them is shown by test_vllm.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lorafold.integrations.vllm.punica import Punica
from lorafold.ops import reference

MAX_TOKENS = 32
SCALE = 4 / 3


@dataclass(frozen=True)
class Pair:
    """One adapter's factors for one slice, on the CPU, without padding."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


def pair(k_in: int, n_out: int, rank: int, seed: int = 0, scale: float = SCALE) -> Pair:
    """Random factors."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, k_in, generator=generator) * k_in**-0.5
    b = torch.randn(n_out, rank, generator=generator)
    return Pair(a.bfloat16(), b.bfloat16(), scale)


def punica(
    max_loras: int, *, device: str = "cpu", max_tokens: int = MAX_TOKENS, **config: Any
) -> Punica:
    settings = {"max_loras": max_loras, "fully_sharded_loras": False} | config
    return Punica(max_tokens, 8, device, lora_config=SimpleNamespace(**settings))


def start_step(
    step: Punica, tokens: Sequence[int], samples: Sequence[int] = (), vocabulary: int = 1
) -> None:
    """Slots per token row and per sampled row, -1 for base; vLLM passes ids, here slot + 1."""
    max_loras = step.tokens.max_loras
    mapping = SimpleNamespace(
        index_mapping=tuple(s + 1 for s in tokens), prompt_mapping=tuple(s + 1 for s in samples)
    )
    step.update_metadata(mapping, [*range(1, max_loras + 1)], max_loras + 1, vocabulary)


def linear(
    k_in: int, n_outs: Sequence[int], max_loras: int, max_rank: int, device: str = "cpu"
) -> SimpleNamespace:
    """A linear layer's slots: per slice, A [slots, 1, rank, in] and B [slots, 1, out, rank]."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    return SimpleNamespace(
        lora_a_stacked=tuple(zeros(max_loras, 1, max_rank, k_in) for _ in n_outs),
        lora_b_stacked=tuple(zeros(max_loras, 1, n, max_rank) for n in n_outs),
    )


def put(layer: Any, target: Any, slot: int, pairs: Mapping[int, Pair]) -> None:
    """What loading does: copy A and B of some slices into a slot, and fill in the tables."""
    for slice_id, own in pairs.items():
        layer.lora_a_stacked[slice_id][slot, 0, : own.rank] = own.a
        layer.lora_b_stacked[slice_id][slot, 0, :, : own.rank] = own.b
        target.tables.place(slot, slice_id, own.rank, own.scale)


def rows(num_rows: int, k_in: int, seed: int = 0) -> Tensor:
    """Random input rows."""
    return torch.randn(num_rows, k_in, generator=torch.Generator().manual_seed(seed)).bfloat16()


def outputs(num_rows: int, columns: int, seed: int = 1) -> Tensor:
    """Base outputs, smaller than the deltas, so that these show; every row has a negative zero."""
    y = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1
    y[:, 0] = -0.0
    return y.bfloat16()


def folded(y: Tensor, x: Tensor, own: Pair | None, numerics: str) -> Tensor:
    """The contract for one row [n_out] of one slice."""
    if own is None:
        return y
    delta = reference.delta_rows(x.unsqueeze(0), own.a, own.b, numerics)
    return reference.fold(y.unsqueeze(0), delta, own.scale)[0]


def experts(
    hidden: int,
    inner: int,
    num_experts: int,
    max_loras: int,
    max_rank: int,
    *,
    device: str = "cpu",
    fused: bool = False,
    shared: bool = False,
) -> SimpleNamespace:
    """Expert slots: A [slots, experts, rank, in]; fused: gate and up as one slice; shared: the A of
    gate and up and the B of down once for all experts."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    slices = [2 * inner] if fused else [inner, inner]
    once = 1 if shared else num_experts
    return SimpleNamespace(
        w13_lora_a_stacked=tuple(zeros(max_loras, once, max_rank, hidden) for _ in slices),
        w13_lora_b_stacked=tuple(zeros(max_loras, num_experts, n, max_rank) for n in slices),
        w2_lora_a_stacked=(zeros(max_loras, num_experts, max_rank, inner),),
        w2_lora_b_stacked=(zeros(max_loras, once, hidden, max_rank),),
    )
