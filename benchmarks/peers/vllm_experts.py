"""vLLM 0.33.0's fused kernels for LoRA on experts, without the sort that they need.

As in the engine: weights [slots, experts, rank, k_in] and [slots, experts, n_out, rank] per slice,
the scale multiplied into B in bf16, the route chosen by its own conditions (at these ranks the
GEMV kernel or the one-shot kernel, unsorted or sorted), and the row tile of the base model's tuned
MoE configuration for this device, which is all that these kernels take from it; with `invariant`
the fixed configuration of its batch-invariant mode. The engine multiplies the delta of the down
projection by the routing weight; the weights here are 1, so that results compare with ours.

The sort, one kernel per layer in the engine, is made outside the timed part, which favours it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers.fetch import FETCHED
from benchmarks.peers.operands import PeerCalls
from benchmarks.peers.vllm import Kernels, kernels, metadata_of

__all__ = ["ExpertOperands", "Sorted", "expert_calls", "sort_pairs", "tile_rows"]

_INVARIANT_TILE_ROWS = 64
_PAIRS_PER_EXPERT_TO_SORT = 8
_CONFIGS = FETCHED / "vllm/vllm/model_executor/layers/fused_moe/configs"


@dataclass(frozen=True)
class ExpertOperands:
    """One projection of one repetition.

    Args:
        x: [tokens, k_in], or [tokens * top_k, k_in] where `is_down`.
        out: [tokens, top_k, slices * n_out], changed in place.
        a: per slice [slots, experts, rank, k_in].
        b: per slice [slots, experts, n_out, rank], times the scale.
        experts: [tokens, top_k] int32 expert ids.
        slots: [tokens] int32.
        is_down: whether rows of x are (token, choice) pairs.
    """

    x: Tensor
    out: Tensor
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    experts: Tensor
    slots: Tensor
    is_down: bool


@dataclass(frozen=True)
class Sorted:
    """(token, choice) pairs by slot and expert, padded to row tiles.

    Args:
        pairs: [slots, capacity] int32; the number of pairs where a tile has no pair.
        tile_expert: [slots, tiles] int32; -1 where a tile is not in use.
        padded: [slots] int32, pairs of the slot with padding.
    """

    pairs: Tensor
    tile_expert: Tensor
    padded: Tensor


def expert_calls(
    repetitions: Sequence[ExpertOperands], inner: int, *, invariant: bool
) -> PeerCalls:
    """One call per repetition, all of the same slots; `inner` is the experts' inner size."""
    code = kernels(invariant)
    code.forget_addresses()
    first = repetitions[0]
    metadata = metadata_of(code, first.slots, first.a[0].shape[0])
    sorts: dict[int, Sorted | None] = {}
    calls: PeerCalls = []
    for operands in repetitions:
        num_tokens, top_k = operands.experts.shape
        max_loras, num_experts = operands.a[0].shape[:2]
        rows = tile_rows(num_experts, inner, num_tokens, invariant)
        key = operands.experts.data_ptr()
        if key not in sorts:
            few = num_tokens * top_k * _PAIRS_PER_EXPERT_TO_SORT <= num_experts * max_loras
            sorts[key] = (
                None
                if few
                else sort_pairs(operands.experts, operands.slots, rows, num_experts, max_loras)
            )
        calls.append(_call(code, operands, metadata, sorts[key], rows))
    return calls


def tile_rows(num_experts: int, inner: int, num_tokens: int, invariant: bool) -> int:
    """Rows of a tile: the base model's tuned configuration for the nearest number of tokens.

    Raises:
        FileNotFoundError: if the engine ships no such configuration.
    """
    if invariant:
        return _INVARIANT_TILE_ROWS
    path = _CONFIGS / f"E={num_experts},N={inner},device_name=NVIDIA_H200.json"
    tuned = json.loads(path.read_text())
    tuned.pop("triton_version", None)
    nearest = min(tuned, key=lambda tokens: abs(int(tokens) - num_tokens))
    return int(tuned[nearest]["BLOCK_SIZE_M"])


def sort_pairs(
    experts: Tensor, slots: Tensor, rows: int, num_experts: int, max_loras: int
) -> Sorted:
    """What the engine's `moe_lora_align_block_size` leaves for the kernels, in its sizes.

    Args:
        experts: [tokens, top_k] expert ids.
        slots: [tokens] slot per token, -1 for base.
        rows: rows of a tile.
        num_experts: experts of a layer.
        max_loras: slots.
    """
    num_pairs = experts.numel()
    capacity = num_pairs + num_experts * (rows - 1)
    if num_pairs < num_experts:
        capacity = num_pairs * rows
    device = experts.device
    pairs = torch.full((max_loras, capacity), num_pairs, dtype=torch.int32, device=device)
    tile_expert = torch.full(
        (max_loras, -(-capacity // rows)), -1, dtype=torch.int32, device=device
    )
    padded = torch.zeros(max_loras, dtype=torch.int32, device=device)
    slot_of_pair = slots.repeat_interleave(experts.shape[1])
    for slot in range(max_loras):
        mine = (slot_of_pair == slot).nonzero().squeeze(1)
        expert = experts.flatten()[mine].long()
        order = expert.argsort(stable=True)
        mine, expert = mine[order], expert[order]
        counts = expert.bincount(minlength=num_experts)
        tiles = (counts + rows - 1) // rows
        place = torch.arange(len(mine), device=device) - (counts.cumsum(0) - counts)[expert]
        pairs[slot, ((tiles.cumsum(0) - tiles) * rows)[expert] + place] = mine.int()
        of_tiles = torch.arange(num_experts, device=device).repeat_interleave(tiles)
        tile_expert[slot, : len(of_tiles)] = of_tiles.int()
        padded[slot] = len(of_tiles) * rows
    return Sorted(pairs, tile_expert, padded)


def _call(
    code: Kernels,
    operands: ExpertOperands,
    metadata: tuple[Tensor, ...],
    tiles: Sorted | None,
    rows: int,
) -> partial[None]:
    num_tokens, top_k = operands.experts.shape
    device = operands.x.device
    token_slots, *_, ids, _, num_ids = metadata
    enabled = torch.ones(operands.a[0].shape[0] + 1, dtype=torch.int32, device=device)
    weights = torch.ones((num_tokens, top_k), dtype=torch.float32, device=device)
    # Columns, K, group, warps, stages and split of both kernels: only read above rank 128.
    unread = (64, 32, 8, 4, 3, 1)
    return partial(
        code.experts.fused_moe_lora,
        operands.out,
        operands.x,
        operands.a,
        operands.b,
        weights,
        tiles.pairs if tiles else None,
        tiles.tile_expert if tiles else operands.experts.reshape(-1),
        tiles.padded if tiles else None,
        token_slots,
        operands.a[0].shape[2],
        top_k,
        ids,
        num_ids,
        enabled,
        rows,
        *unread,
        rows,
        *unread,
        operands.is_down,
    )
