"""The mixture-of-experts operators: expert LoRA on sorted rows and on gathered rows.

Both fold one expert projection's deltas for any mix of adapters and base, and equal the dense
operators in every bit for the same (row, A, B, scale).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.expert_route import MoeExpertRoute
from lorafold.numerics import Numerics, resolve
from lorafold.ops.check import check_keys, check_operands, check_scratch
from lorafold.ops.keys import grouped_keys, make_gathered_plan
from lorafold.ops.levers import NO_APPLY
from lorafold.ops.plan import Plan, make_plan
from lorafold.ops.routed import routed_delta
from lorafold.route import tables_of

__all__ = [
    "MLG_M_TILE",
    "gather_bgmv_grids",
    "gather_row_token",
    "grouped_down_wc",
    "grouped_down_windows",
    "moe_lora_gather_bgmv",
    "moe_lora_grouped_down",
    "plan_gather",
    "plan_grouped",
]

MLG_M_TILE = 64
"""Rows of one tile in the worst-case launch bound of the grouped operator."""

_OUTPUTS_PER_BLOCK = 4


def grouped_down_wc(row_offset: int, row_end: int) -> int:
    """Tiles that bound the window [row_offset, row_end): ceil of its rows over 64, at least 1.

    Example:
        >>> grouped_down_wc(0, 65), grouped_down_wc(10, 10)
        (2, 1)
    """
    return max(1, -(-max(0, row_end - row_offset) // MLG_M_TILE))


def grouped_down_windows(total_rows: int, cap: int) -> Iterator[tuple[int, int]]:
    """Contiguous windows [start, end) of at most `cap` rows that cover 0 .. total_rows.

    Raises:
        RouteError: if cap is not positive, or total_rows is negative.

    Example:
        >>> list(grouped_down_windows(10, 4))
        [(0, 4), (4, 8), (8, 10)]
    """
    if cap < 1 or total_rows < 0:
        raise RouteError(
            f"windows need cap >= 1 and total_rows >= 0; given: cap {cap}, total_rows {total_rows}"
        )
    return ((start, min(start + cap, total_rows)) for start in range(0, total_rows, cap))


def gather_bgmv_grids(
    max_rank: int, n_out: int, n_slots: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The (shrink, expand) grids of the one-group-per-output launch: [ceil(out / 4), n_slots, 1].

    Example:
        >>> gather_bgmv_grids(max_rank=16, n_out=2048, n_slots=8)
        ((4, 8, 1), (512, 8, 1))
    """
    shrink, expand = (-(-n // _OUTPUTS_PER_BLOCK) for n in (max_rank, n_out))
    return (shrink, n_slots, 1), (expand, n_slots, 1)


def gather_row_token(row: int, top_k: int) -> int:
    """The token that owns a flat (token, choice) row.

    Raises:
        RouteError: if top_k is not positive.

    Example:
        >>> gather_row_token(17, top_k=8)
        2
    """
    _check_top_k(top_k)
    return row // top_k


def plan_grouped(
    route: MoeExpertRoute,
    expert_offsets: Tensor,
    sorted_token_ids: Tensor,
    moe_row_adapter: Tensor | None,
    num_tokens: int,
    *,
    row_offset: int = 0,
    row_end: int | None = None,
    plan: Plan | None = None,
) -> Plan:
    """The plan of a window of expert-sorted rows, for all projections of one layer.

    With `plan` given its buffers are refilled *in place* and nothing is allocated on the device.
    Arguments and errors are those of `moe_lora_grouped_down`.
    """
    row_end = sorted_token_ids.shape[0] if row_end is None else row_end
    _check_grouped(route, expert_offsets, sorted_token_ids, moe_row_adapter, num_tokens)
    _check_window(row_offset, row_end, sorted_token_ids.shape[0])
    if plan is None:
        plan = Plan.empty(row_end - row_offset, route.num_keys, route.device)
    keys = grouped_keys(
        expert_offsets, sorted_token_ids, moe_row_adapter, num_tokens, row_offset, row_end,
        route.num_experts, route.max_loras, out=plan.keys,
    )  # fmt: skip
    return make_plan(keys, route.num_keys, plan=plan)


def plan_gather(
    route: MoeExpertRoute,
    indices: Tensor,
    row_adapter: Tensor | None,
    top_k: int,
    *,
    plan: Plan | None = None,
) -> Plan:
    """The plan of (token, choice) rows, for all projections of one layer.

    With `plan` given its buffers are refilled *in place* and nothing is allocated on the device.
    Arguments and errors are those of `moe_lora_gather_bgmv`.
    """
    _check_gather(route, indices, row_adapter, top_k)
    if plan is None:
        plan = Plan.empty(indices.shape[0], route.num_keys, route.device)
    return make_gathered_plan(indices, row_adapter, top_k, route.num_experts, route.max_loras, plan)


def moe_lora_grouped_down(
    route: MoeExpertRoute,
    x: Tensor,
    base_out: Tensor,
    expert_offsets: Tensor,
    sorted_token_ids: Tensor,
    moe_row_adapter: Tensor | None = None,
    *,
    row_offset: int = 0,
    row_end: int | None = None,
    x_gather: int = 0,
    plan: Plan | None = None,
    numerics: Numerics | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Fold expert LoRA into expert-sorted rows row_offset .. row_end of base_out, *in place*.

        s = moe_row_adapter[sorted_token_ids[r]],  e = the expert whose span holds r
        base_out[r] += scale * bf16( bf16(x_r A^T) B^T )     with A, B, scale of (s, e)

    Everything that routes is read on the device; the launch shape depends on host-known sizes only,
    so the call can be captured in a CUDA graph. Any split into windows gives the same bits.

    Args:
        route: tables over (slot, expert).
        x: bfloat16; [te, k_in] sorted rows where x_gather is 0 (down), [num_tokens, k_in] where it
            is 1 (gate/up).
        base_out: [te, n_out] bfloat16, changed in place; rows may be any distance apart.
        expert_offsets: [E + 1] int32 prefix sum: expert e owns rows offsets[e] .. offsets[e + 1].
        sorted_token_ids: [te] int32: the token of each sorted row.
        moe_row_adapter: [num_tokens] int32 slot per token, negative for base; None puts every
            token on slot 0.
        row_offset: first row of the window.
        row_end: one past its last row; None for all.
        x_gather: 0 or 1, see x.
        plan: `plan_grouped(...)` of the same window; None makes one.
        numerics: "gemv" or "mma"; None for the device's default.
        scratch: uint8 vector of `scratch_bytes(row_end - row_offset, 1, k_in, max_rank)`.

    Raises:
        RouteError: if operands do not fit, the window is outside the rows, or, on the CPU, offsets
            do not ascend from 0 to te or token ids are out of range. On the device such rows are
            left alone.

    Source: vLLM's fused MoE tokens and the grouped GEMM of MegaBlocks (arXiv 2211.15841).
    """
    total = sorted_token_ids.shape[0]
    row_end = total if row_end is None else row_end
    _check_window(row_offset, row_end, total)
    if x_gather not in (0, 1):
        raise RouteError(f"x_gather must be 0 (sorted x) or 1 (x by token); given: {x_gather}")
    num_tokens = _num_tokens(x, moe_row_adapter, x_gather)
    _check_grouped(route, expert_offsets, sorted_token_ids, moe_row_adapter, num_tokens)
    check_operands((route,), x, (base_out,), total, num_tokens if x_gather else total)
    window = slice(row_offset, row_end)
    num_rows = row_end - row_offset
    check_scratch(scratch, route, 1, num_rows)
    if NO_APPLY or not num_rows:
        return
    if plan is None:
        plan = plan_grouped(
            route, expert_offsets, sorted_token_ids, moe_row_adapter, num_tokens,
            row_offset=row_offset, row_end=row_end,
        )  # fmt: skip
    source = sorted_token_ids[window] if x_gather else None
    x = x if x_gather else x[window]
    _fold(route, x, base_out[window], plan, numerics, source, 1, scratch)


def moe_lora_gather_bgmv(
    route: MoeExpertRoute,
    x: Tensor,
    base_out: Tensor,
    indices: Tensor,
    row_adapter: Tensor | None = None,
    *,
    top_k: int,
    x_gather: int = 0,
    plan: Plan | None = None,
    numerics: Numerics | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Fold expert LoRA into unsorted (token, choice) rows of base_out, *in place*.

        s = row_adapter[r // top_k],  e = indices[r]
        base_out[r] += scale * bf16( bf16(x_r A^T) B^T )     with A, B, scale of (s, e)

    Args:
        route: tables over (slot, expert).
        x: bfloat16; [n_slots, k_in] where x_gather is 0 (down), [n_slots / top_k, k_in] where it
            is 1 (gate/up: row r reads x[r // top_k]).
        base_out: [n_slots, n_out] bfloat16, changed in place; rows may be any distance apart.
        indices: [n_slots] int32 | int64 expert ids; ids beyond the table are not adapted.
        row_adapter: [n_slots / top_k] int32 slot per token, negative for base; None puts every
            token on slot 0.
        top_k: experts per token.
        x_gather: 0 or 1, see x.
        plan: `plan_gather(...)` of the same rows; None makes one.
        numerics: "gemv" or "mma"; None for the device's default.
        scratch: uint8 vector of `scratch_bytes(n_slots, 1, k_in, max_rank)`.

    Raises:
        RouteError: if top_k is not positive, operands do not fit, or, on the CPU, an expert id is
            negative or a slot is beyond the table. On the device such rows are left alone.
    """
    num_rows = indices.shape[0]
    _check_gather(route, indices, row_adapter, top_k)
    if x_gather not in (0, 1):
        raise RouteError(f"x_gather must be 0 (x by row) or 1 (x by token); given: {x_gather}")
    check_operands((route,), x, (base_out,), num_rows, num_rows // top_k if x_gather else num_rows)
    check_scratch(scratch, route, 1, num_rows)
    if NO_APPLY or not num_rows:
        return
    if plan is None:
        plan = plan_gather(route, indices, row_adapter, top_k)
    _fold(route, x, base_out, plan, numerics, None, top_k if x_gather else 1, scratch)


def _fold(
    route: MoeExpertRoute,
    x: Tensor,
    base_out: Tensor,
    plan: Plan,
    numerics: Numerics | None,
    source: Tensor | None,
    top_k: int,
    scratch: Tensor | None,
) -> None:
    plan.check(base_out.shape[0], route.num_keys, x.device)
    routed_delta(
        x,
        (base_out,),
        plan.keys,
        (tables_of(route),),
        route.max_rank,
        resolve(numerics, x.device),
        source=source,
        top_k=top_k,
        tile_key=plan.tile_key,
        tile_rows=plan.tile_rows,
        scratch=scratch,
    )


def _num_tokens(x: Tensor, row_adapter: Tensor | None, x_gather: int) -> int:
    """Tokens of the batch, as far as the host can know: 2^31 - 1 where nothing bounds them."""
    if row_adapter is not None:
        return row_adapter.shape[0]
    return x.shape[0] if x_gather else 2**31 - 1


def _check_window(row_offset: int, row_end: int, total: int) -> None:
    if not 0 <= row_offset <= row_end <= total:
        raise RouteError(f"the window must lie in 0 .. {total}; given: {row_offset} .. {row_end}")


def _check_top_k(top_k: int) -> None:
    if top_k < 1:
        raise RouteError(f"top_k must be at least 1; given: {top_k}")


def _check_grouped(
    route: MoeExpertRoute,
    expert_offsets: Tensor,
    sorted_token_ids: Tensor,
    row_adapter: Tensor | None,
    num_tokens: int,
) -> None:
    check_keys("expert_offsets", expert_offsets, max(2, expert_offsets.shape[0]), route.device)
    check_keys("sorted_token_ids", sorted_token_ids, sorted_token_ids.shape[0], route.device)
    if row_adapter is not None:
        check_keys("moe_row_adapter", row_adapter, num_tokens, route.device)
    if route.device.type != "cpu":
        return
    total = sorted_token_ids.shape[0]
    steps = expert_offsets.diff()
    if int(expert_offsets[0]) or int(expert_offsets[-1]) != total or bool((steps < 0).any()):
        raise RouteError(
            f"expert_offsets must ascend from 0 to the row count ({total}); given: "
            f"{expert_offsets.tolist()}"
        )
    if total and not 0 <= int(sorted_token_ids.min()) <= int(sorted_token_ids.max()) < num_tokens:
        raise RouteError(
            f"sorted_token_ids must be tokens 0 .. {num_tokens - 1}; given: "
            f"{int(sorted_token_ids.min())} .. {int(sorted_token_ids.max())}"
        )
    _check_slots("moe_row_adapter", row_adapter, route)


def _check_gather(
    route: MoeExpertRoute, indices: Tensor, row_adapter: Tensor | None, top_k: int
) -> None:
    _check_top_k(top_k)
    num_rows = indices.shape[0] if indices.dim() == 1 else -1
    integer = indices.dtype in (torch.int32, torch.int64)
    if num_rows < 0 or not integer or not indices.is_contiguous() or num_rows % top_k:
        raise RouteError(
            "`indices` must be a contiguous int32 or int64 vector of a multiple of top_k "
            f"({top_k}) entries; given: {list(indices.shape)} {indices.dtype}"
        )
    if indices.device != route.device:
        raise RouteError(f"`indices` must be on {route.device}; given: {indices.device}")
    if row_adapter is not None:
        check_keys("row_adapter", row_adapter, num_rows // top_k, route.device)
    if route.device.type == "cpu":
        if num_rows and int(indices.min()) < 0:
            raise RouteError(f"expert ids must not be negative; given: {int(indices.min())}")
        _check_slots("row_adapter", row_adapter, route)


def _check_slots(name: str, row_adapter: Tensor | None, route: MoeExpertRoute) -> None:
    if row_adapter is not None and row_adapter.numel():
        highest = int(row_adapter.max())
        if highest >= route.max_loras:
            raise RouteError(
                f"`{name}` must hold slots below {route.max_loras}, or negative for base; "
                f"given: {highest}"
            )
