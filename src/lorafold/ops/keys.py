"""The key of each row of a mixture-of-experts batch: slot * num_experts + expert, or -1.

A row has no adapter where its token is base, its expert is beyond the table, or an index that only
the device can see points outside: such a row is neither read nor written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorafold.ops.plan import Plan, make_plan

__all__ = ["gather_keys", "grouped_keys", "make_gathered_plan"]


def gather_keys(
    indices: Tensor,
    row_adapter: Tensor | None,
    top_k: int,
    num_experts: int,
    max_loras: int,
    out: Tensor | None = None,
) -> Tensor:
    """Keys [num_rows] int32 of (token, choice) rows: row r belongs to token r // top_k.

    Args:
        indices: [num_rows] int32 | int64 expert ids.
        row_adapter: [num_rows / top_k] int32 slots per token, negative for base; None for slot 0.
        top_k: experts per token.
        num_experts: experts per slot in the tables.
        max_loras: slots in the tables.
        out: where to put them, so that nothing is allocated on the device.
    """
    if indices.is_cuda:
        from lorafold.ops.compiled import on_device
        from lorafold.ops.keys_triton import gather_keys_triton

        with on_device(indices.device):
            return gather_keys_triton(indices, row_adapter, top_k, num_experts, max_loras, out)
    slots: Tensor | int = 0 if row_adapter is None else row_adapter.repeat_interleave(top_k)
    return _keys(slots, indices, num_experts, max_loras, out)


def make_gathered_plan(
    indices: Tensor,
    row_adapter: Tensor | None,
    top_k: int,
    num_experts: int,
    max_loras: int,
    plan: Plan,
) -> Plan:
    """`make_plan(gather_keys(...), plan=plan)`, in one launch less where the rows are few.

    Raises:
        RouteError: if the plan has other sizes.
    """
    if not indices.is_cuda or not plan.num_rows:
        keys = gather_keys(indices, row_adapter, top_k, num_experts, max_loras, out=plan.keys)
        return make_plan(keys, num_experts * max_loras, plan=plan)
    from lorafold.ops.compiled import on_device
    from lorafold.ops.group import group_gathered_triton

    plan.check(indices.shape[0], num_experts * max_loras, indices.device)
    with on_device(indices.device):
        group_gathered_triton(indices, row_adapter, top_k, num_experts, max_loras, plan)
    return plan


def grouped_keys(
    expert_offsets: Tensor,
    sorted_token_ids: Tensor,
    row_adapter: Tensor | None,
    num_tokens: int,
    row_offset: int,
    row_end: int,
    num_experts: int,
    max_loras: int,
    out: Tensor | None = None,
) -> Tensor:
    """Keys [row_end - row_offset] int32 of expert-sorted rows.

    Args:
        expert_offsets: [E + 1] int32: expert e owns rows expert_offsets[e] .. expert_offsets[e+1].
        sorted_token_ids: [te] int32: the token of each sorted row.
        row_adapter: [num_tokens] int32 slots, negative for base; None for slot 0.
        num_tokens: tokens of the batch; rows of other tokens get no key.
        row_offset: first row.
        row_end: one past the last row.
        num_experts: experts per slot in the tables; rows of higher experts get no key.
        max_loras: slots in the tables.
        out: where to put them, so that nothing is allocated on the device.
    """
    if expert_offsets.is_cuda:
        from lorafold.ops.compiled import on_device
        from lorafold.ops.keys_triton import grouped_keys_triton

        with on_device(expert_offsets.device):
            return grouped_keys_triton(
                expert_offsets, sorted_token_ids, row_adapter, num_tokens, row_offset, row_end,
                num_experts, max_loras, out,
            )  # fmt: skip
    rows = torch.arange(row_offset, row_end, dtype=torch.int32)
    experts = torch.searchsorted(expert_offsets[1:].contiguous(), rows, right=True)
    tokens = sorted_token_ids[row_offset:row_end].long()
    slots: Tensor | int = 0 if row_adapter is None else row_adapter[tokens]
    return _keys(slots, experts, num_experts, max_loras, out)


def _keys(
    slots: Tensor | int, experts: Tensor, num_experts: int, max_loras: int, out: Tensor | None
) -> Tensor:
    slots = torch.as_tensor(slots).expand(experts.shape).long()
    inside = (slots >= 0) & (slots < max_loras) & (experts >= 0) & (experts < num_experts)
    keys = torch.where(inside, slots * num_experts + experts, -1).int()
    return keys if out is None else out.copy_(keys)
