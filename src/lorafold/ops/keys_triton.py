"""The kernels that compute the keys of mixture-of-experts rows on the device."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafold.ops.compiled import Launch, has_pdl
from lorafold.ops.rows import let_next_start, wait_for_predecessor
from lorafold.ops.tiles import cdiv, next_power_of_2

__all__ = [
    "gather_keys_kernel",
    "gather_keys_of",
    "gather_keys_triton",
    "grouped_keys_kernel",
    "grouped_keys_triton",
]

_BLOCK = 128


@triton.jit
def gather_keys_of(indices_ptr, row_adapter_ptr, rows, num_rows, top_k, num_experts, max_loras):
    """The keys of some rows, -1 for those that have none."""
    has_row = rows < num_rows
    experts = tl.load(indices_ptr + rows, mask=has_row, other=-1)
    if row_adapter_ptr is None:
        slots = rows * 0
    else:
        slots = tl.load(row_adapter_ptr + rows // top_k, mask=has_row, other=-1)
    inside = (slots >= 0) & (slots < max_loras) & (experts >= 0) & (experts < num_experts)
    return tl.where(inside, slots * num_experts + experts.to(tl.int32), -1)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["indices_ptr", "row_adapter_ptr", "keys_ptr"],
)
def gather_keys_kernel(
    indices_ptr,
    row_adapter_ptr,
    keys_ptr,
    num_rows,
    top_k,
    num_experts,
    max_loras,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """keys[r] = slot(r // top_k) * num_experts + indices[r], or -1."""
    wait_for_predecessor(PDL)
    let_next_start(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys = gather_keys_of(
        indices_ptr, row_adapter_ptr, rows, num_rows, top_k, num_experts, max_loras
    )
    tl.store(keys_ptr + rows, keys, mask=rows < num_rows)


@triton.jit(
    do_not_specialize=["num_tokens", "row_offset", "row_end", "total_rows"],
    do_not_specialize_on_alignment=["offsets_ptr", "token_ids_ptr", "row_adapter_ptr", "keys_ptr"],
)
def grouped_keys_kernel(
    offsets_ptr,
    token_ids_ptr,
    row_adapter_ptr,
    keys_ptr,
    num_tokens,
    row_offset,
    row_end,
    total_rows,
    layer_experts,
    num_experts,
    max_loras,
    BLOCK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keys of rows row_offset .. row_end; all -1 if the offsets do not cut up the rows."""
    wait_for_predecessor(PDL)
    let_next_start(PDL)
    local = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = row_offset + local
    has_row = rows < row_end
    e = tl.arange(0, BLOCK_EXPERTS)
    in_layer = e < layer_experts
    begins = tl.load(offsets_ptr + e, mask=in_layer, other=0)
    ends = tl.load(offsets_ptr + e + 1, mask=in_layer, other=0)
    descends = in_layer & (ends < begins)
    misfits = (e == 0) & (begins != 0) | (e == layer_experts - 1) & (ends != total_rows)
    broken = tl.max((descends | misfits).to(tl.int32), axis=0)
    passed = in_layer[None, :] & (ends[None, :] <= rows[:, None])
    experts = tl.sum(passed.to(tl.int32), axis=1)  # [BLOCK]
    tokens = tl.load(token_ids_ptr + rows, mask=has_row, other=-1)
    known = has_row & (tokens >= 0) & (tokens < num_tokens)
    if row_adapter_ptr is None:
        slots = local * 0
    else:
        slots = tl.load(row_adapter_ptr + tokens, mask=known, other=-1)
    inside = known & (slots >= 0) & (slots < max_loras) & (experts < num_experts) & (broken == 0)
    tl.store(keys_ptr + local, tl.where(inside, slots * num_experts + experts, -1), mask=has_row)


def gather_keys_triton(
    indices: Tensor,
    row_adapter: Tensor | None,
    top_k: int,
    num_experts: int,
    max_loras: int,
    out: Tensor | None,
) -> Tensor:
    """Launch `gather_keys_kernel`; see `keys.gather_keys`."""
    num_rows = indices.shape[0]
    keys = torch.empty_like(indices, dtype=torch.int32) if out is None else out
    if num_rows:
        launch = _gather_launch(
            indices.dtype, row_adapter is None, has_pdl(indices.device),
            num_rows, top_k, num_experts, max_loras,
        )  # fmt: skip
        launch(indices, row_adapter, keys)
    return keys


@functools.lru_cache(4096)
def _gather_launch(
    dtype: torch.dtype,
    is_one_slot: bool,
    pdl: bool,
    num_rows: int,
    top_k: int,
    num_experts: int,
    max_loras: int,
) -> Launch:
    return Launch(
        gather_keys_kernel,
        (dtype, is_one_slot, top_k, num_experts, max_loras),
        (cdiv(num_rows, _BLOCK), 1, 1),
        (num_rows, top_k, num_experts, max_loras),
        (_BLOCK, pdl),
        launch_pdl=pdl,
    )


def grouped_keys_triton(
    expert_offsets: Tensor,
    sorted_token_ids: Tensor,
    row_adapter: Tensor | None,
    num_tokens: int,
    row_offset: int,
    row_end: int,
    num_experts: int,
    max_loras: int,
    out: Tensor | None,
) -> Tensor:
    """Launch `grouped_keys_kernel`; see `keys.grouped_keys`."""
    num_rows = row_end - row_offset
    keys = expert_offsets.new_empty(num_rows) if out is None else out
    if num_rows:
        launch = _grouped_launch(
            row_adapter is None, has_pdl(expert_offsets.device), num_tokens, row_offset, row_end,
            sorted_token_ids.shape[0], expert_offsets.shape[0] - 1, num_experts, max_loras,
        )  # fmt: skip
        launch(expert_offsets, sorted_token_ids, row_adapter, keys)
    return keys


@functools.lru_cache(4096)
def _grouped_launch(
    is_one_slot: bool,
    pdl: bool,
    num_tokens: int,
    row_offset: int,
    row_end: int,
    total_rows: int,
    layer_experts: int,
    num_experts: int,
    max_loras: int,
) -> Launch:
    return Launch(
        grouped_keys_kernel,
        (is_one_slot, layer_experts, num_experts, max_loras),
        (cdiv(row_end - row_offset, _BLOCK), 1, 1),
        (num_tokens, row_offset, row_end, total_rows, layer_experts, num_experts, max_loras),
        (_BLOCK, next_power_of_2(layer_experts), pdl),
        launch_pdl=pdl,
    )
