"""A base layer and its adapters at the same time, where a CUDA graph is captured.

Deltas need x, not the base layer's output. In a captured decode step shrink and expand run on a
second stream beside the base layer, and only the fold follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lorafold.numerics import Numerics, resolve
from lorafold.ops.check import check_contents, check_keys, check_operands, check_routes
from lorafold.ops.dense import apply_lora_bgmv
from lorafold.ops.levers import NO_APPLY
from lorafold.ops.plan import Plan
from lorafold.ops.routed import is_traced
from lorafold.route import LoraRoute, tables_of

__all__ = ["MOST_ROWS", "apply_lora_beside"]

MOST_ROWS = 256
"""Deltas of more rows take longer to write and read again than the second stream saves."""


def apply_lora_beside(
    routes: Sequence[LoraRoute],
    x: Tensor,
    base: Callable[[], Sequence[Tensor]],
    seq_slot: Tensor,
    *,
    plan: Plan,
    numerics: Numerics | None = None,
) -> Sequence[Tensor]:
    """Call the base layers of some routes, and fold each row's own adapter into what they return.

    Equal in every bit to `apply_lora_bgmv(routes, x, base(), ...)`, which this is, unless a CUDA
    graph of few rows is being captured: then the deltas are computed on a second stream while the
    base layers run.

    Args:
        routes: the targets' tables.
        x: [n, k_in] bfloat16; rows may be any distance apart, columns are contiguous.
        base: returns [n, n_out] bfloat16 per route, new tensors that do not overlap x.
        seq_slot: [n] int32 on the same device; negative means base.
        plan: `make_plan(seq_slot, max_loras)`, shared by all targets of a step.
        numerics: "gemv" or "mma"; None for the device's default.

    Returns:
        What `base` returned, changed in place.

    Raises:
        RouteError: as `apply_lora_bgmv`.

    Example:
        >>> from lorafold.ops import LoraPair, make_plan
        >>> a, b = torch.ones(8, 32, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
        >>> route = LoraRoute.from_pairs([LoraPair(a, b, scale=0.5)])
        >>> x, slots = torch.ones(2, 32, dtype=torch.bfloat16), torch.tensor([0, -1]).int()
        >>> plan = make_plan(slots, num_keys=1)
        >>> base = lambda: [torch.zeros(2, 16, dtype=torch.bfloat16)]
        >>> apply_lora_beside([route], x, base, slots, plan=plan)[0][:, 0].tolist()
        [128.0, 0.0]

    Source: the overlap of LoRA and base layers in S-LoRA (arXiv 2311.03285), with fixed bits.
    """
    num_rows = seq_slot.shape[0]
    if num_rows > MOST_ROWS or NO_APPLY or not _is_captured(x):
        outs = base()
        apply_lora_bgmv(routes, x, outs, seq_slot, plan=plan, numerics=numerics)
        return outs
    routes = tuple(routes)
    check_keys("seq_slot", seq_slot, num_rows, routes[0].device)
    plan.check(num_rows, routes[0].max_loras, x.device)
    # The second stream waits for what is before the base layer, which is launched first, so that
    # its programs find multiprocessors that are empty.
    _side_stream(x.device).wait_stream(torch.cuda.current_stream(x.device))
    outs = tuple(base())
    deltas = _deltas(routes, x, num_rows, plan, numerics)
    return _finish(routes, x, deltas, outs, seq_slot)


def _deltas(
    routes: tuple[LoraRoute, ...], x: Tensor, num_rows: int, plan: Plan, numerics: Numerics | None
) -> tuple[Tensor, ...]:
    """Launch shrink and expand on the second stream; deltas [num_rows, n_out] per route."""
    from lorafold.ops.launch import routed_triton

    with torch.cuda.stream(_side_stream(x.device)):
        deltas = tuple([x.new_empty(num_rows, route.n_out) for route in routes])
        check_routes(routes, deltas)
        check_operands(routes, x, deltas, num_rows, num_rows)
        a_tables, b_tables, scales, ranks = zip(*map(tables_of, routes), strict=True)
        routed_triton(
            x, deltas, (a_tables, b_tables, scales, ranks), routes[0].max_rank,
            resolve(numerics, x.device), None, 1, plan.tile_key, plan.tile_rows, None, folds=False,
        )  # fmt: skip
    return deltas


def _finish(
    routes: tuple[LoraRoute, ...],
    x: Tensor,
    deltas: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    seq_slot: Tensor,
) -> tuple[Tensor, ...]:
    """Wait for the deltas, and fold them."""
    from lorafold.ops.fold import fold_triton

    num_rows = seq_slot.shape[0]
    check_routes(routes, outs)
    check_operands(routes, x, outs, num_rows, num_rows)
    check_contents(x, outs, None, 0)
    torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device))
    _, b_tables, scales, _ = zip(*map(tables_of, routes), strict=True)
    fold_triton(deltas, outs, b_tables, scales, seq_slot)
    return outs


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and not is_traced(x) and torch.cuda.is_current_stream_capturing()


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
