"""A case handed to the public operators, and the results brought back to the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lorafold import ops
from lorafold.numerics import HOPPER, TensorCoreModel, device_model
from lorafold.ops import reference
from lorafold.verify.case import Case

__all__ = ["POISON", "device_tensor", "fold_rows", "model_of", "pair", "poisoned", "route", "truth"]

POISON = 0x7FC1
"""The pattern of a NaN that nothing computes: what must not be read shows, and what was written."""


def model_of(device: torch.device) -> TensorCoreModel | None:
    """The tensor cores that "mma" follows there; None where that is not known."""
    return HOPPER if device.type == "cpu" else device_model(device)


def poisoned(*shape: int, device: torch.device | str = "cpu") -> Tensor:
    """bf16 of the given shape, filled with POISON."""
    return torch.full(shape, POISON, dtype=torch.int16, device=device).view(torch.bfloat16)


def device_tensor(t: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, with memory of its own."""
    return torch.empty(t.shape, dtype=t.dtype, device=device).copy_(t)


def pair(
    a: Tensor, b: Tensor, scale: Tensor, rank: Tensor, device: torch.device, max_rank: int
) -> ops.LoraPair | None:
    """One adapter padded with +0 to max_rank; None where its rank is 0."""
    true_rank = int(rank)
    if not true_rank:
        return None
    padded_a = torch.zeros(max_rank, a.shape[1], dtype=torch.bfloat16, device=device)
    padded_b = torch.zeros(b.shape[0], max_rank, dtype=torch.bfloat16, device=device)
    padded_a[:true_rank] = a[:true_rank].to(device)
    padded_b[:, :true_rank] = b[:, :true_rank].to(device)
    return ops.LoraPair(padded_a, padded_b, scale=float(scale), rank=true_rank)


def route(
    case: Case,
    device: torch.device,
    *,
    max_rank: int | None = None,
    places: Mapping[int, int] | None = None,
) -> ops.LoraRoute:
    """The adapters of a dense case as tables.

    Args:
        case: with a, b, scales and ranks.
        device: where to put them.
        max_rank: the padded rank; None for the largest rank.
        places: slot of the case -> slot of the tables, None for the same.
    """
    num_slots = case["a"].shape[0]
    places = places or {slot: slot for slot in range(num_slots)}
    pairs: list[ops.LoraPair | None] = [None] * (max(places.values()) + 1)
    for slot, place in places.items():
        pairs[place] = pair(
            case["a"][slot],
            case["b"][slot],
            case["scales"][slot],
            case["ranks"][slot],
            device,
            max_rank or case["a"].shape[1],
        )
    return ops.LoraRoute.from_pairs(pairs)


def fold_rows(case: Case, device: torch.device, *, tables: ops.LoraRoute | None = None) -> Tensor:
    """The outputs [rows, cols] of one plain call of `apply_lora_bgmv`."""
    out = device_tensor(case["out"], device)
    tables = tables or route(case, device)
    x, slots = device_tensor(case["x"], device), case["slots"].to(device)
    ops.apply_lora_bgmv(tables, x, out, slots, numerics=case.numerics)
    return out.cpu()


def truth(case: Case, model: TensorCoreModel = HOPPER) -> Tensor:
    """The outputs [rows, cols] as the CPU reference has them, at the true ranks."""
    out = case["out"].clone()
    for slot, rank in enumerate(case["ranks"].tolist()):
        rows = (case["slots"] == slot).nonzero().squeeze(1)
        if not rank or not len(rows):
            continue
        a, b = case["a"][slot, :rank], case["b"][slot, :, :rank]
        delta = reference.delta_rows(case["x"][rows], a, b, case.numerics, model=model)
        out[rows] = reference.fold(out[rows], delta, case["scales"][slot])
    return out
