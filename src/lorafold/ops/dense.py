"""The dense operators: one adapter for all rows, or one adapter per row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorafold.numerics import Numerics, resolve
from lorafold.ops.check import check_keys, check_operands, check_routes, check_scratch
from lorafold.ops.levers import GEMV_MAX_M, NO_APPLY
from lorafold.ops.plan import Plan
from lorafold.ops.routed import is_traced, routed_delta
from lorafold.route import LoraPair, LoraRoute, tables_of

__all__ = ["apply_lora_bgmv", "apply_lora_delta"]


def apply_lora_delta(
    pair: LoraPair,
    x: Tensor,
    base_out: Tensor,
    *,
    numerics: Numerics | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Fold one adapter's delta into every row of base_out, *in place*.

        base_out[i] += scale * bf16( bf16(x[i] A^T) B^T )

    The rounding points and the order of every sum are the contract's: row i's bits do not depend on
    the other rows.

    Args:
        pair: the adapter's A, B and scale for this target.
        x: [m, k_in] bfloat16; rows may be any distance apart, columns are contiguous.
        base_out: [m, n_out] bfloat16 likewise; must not overlap x.
        numerics: "gemv" or "mma"; None for the device's default, which `LORAFOLD_GEMV_MAX_M`
            replaces for measurement.
        scratch: uint8 vector of `scratch_bytes(m, 1, k_in, max_rank)` on the device; with it,
            nothing is allocated.

    Raises:
        RouteError: if an operand has another dtype, device, shape or stride, x and base_out
            overlap, or the scratch is too small; base_out is then as before.

    Example:
        >>> a, b = torch.ones(8, 32, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
        >>> out = torch.zeros(2, 16, dtype=torch.bfloat16)
        >>> apply_lora_delta(
        ...     LoraPair(a, b, scale=0.5), torch.ones(2, 32, dtype=torch.bfloat16), out
        ... )
        >>> out[0, 0].item()  # 0.5 * 8 * 32
        128.0
    """
    route = pair.route
    num_rows = base_out.shape[0]
    check_operands((route,), x, (base_out,), num_rows, num_rows)
    check_scratch(scratch, route, 1, num_rows)
    if numerics is None and GEMV_MAX_M is not None:
        numerics = "gemv" if num_rows <= GEMV_MAX_M else "mma"
    chosen = resolve(numerics, x.device)
    if NO_APPLY or not num_rows:
        return
    routed_delta(x, (base_out,), None, (tables_of(route),), route.max_rank, chosen, scratch=scratch)


def apply_lora_bgmv(
    route: LoraRoute | Sequence[LoraRoute],
    x: Tensor,
    base_out: Tensor | Sequence[Tensor],
    seq_slot: Tensor,
    *,
    plan: Plan | None = None,
    numerics: Numerics | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Fold each row's own adapter into base_out, *in place*.

        s = seq_slot[i];  base_out[i] += scale_s * bf16( bf16(x[i] A_s^T) B_s^T )

    A row with a negative slot, or whose slot does not adapt this target, is neither read nor
    written. Equal in every bit to one `apply_lora_delta` per row. Several routes that share x
    (q/k/v, gate/up) cost one shrink and one expand launch. With `plan` and `scratch` given nothing
    is allocated and nothing synchronises, so the call can be captured in a CUDA graph; replays read
    new contents of `seq_slot` (through `make_plan(seq_slot, ..., plan=plan)`, captured too).

    Args:
        route: the target's tables, or several routes.
        x: [n, k_in] bfloat16; rows may be any distance apart, columns are contiguous.
        base_out: [n, n_out] bfloat16 likewise, one per route; must not overlap x.
        seq_slot: [n] int32 on the same device; negative means base.
        plan: `make_plan(seq_slot, max_loras)`, shared by all targets of a step; None makes one.
        numerics: "gemv" or "mma"; None for the device's default.
        scratch: uint8 vector of `scratch_bytes(n, num_routes, k_in, max_rank)` on the device.

    Raises:
        RouteError: if the operands do not fit, x and base_out overlap, a slot on the CPU is beyond
            the table, or plan or scratch have the wrong size; base_out is then as before. A slot
            beyond the table that only the device can see leaves its row untouched.

    Example:
        >>> a, b = torch.ones(8, 32, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
        >>> route = LoraRoute.from_pairs([LoraPair(a, b, scale=0.5), LoraPair(a, b, scale=1.0)])
        >>> out = torch.zeros(3, 16, dtype=torch.bfloat16)
        >>> slots = torch.tensor([1, -1, 0], dtype=torch.int32)
        >>> apply_lora_bgmv(route, torch.ones(3, 32, dtype=torch.bfloat16), out, slots)
        >>> out[:, 0].tolist()
        [256.0, 0.0, 128.0]

    Source: the batched gather of Punica (arXiv 2310.18547), with a fixed order of sums.
    """
    routes = (route,) if isinstance(route, LoraRoute) else tuple(route)
    outs = (base_out,) if isinstance(base_out, Tensor) else tuple(base_out)
    chosen = resolve(numerics, x.device)
    ready = None if plan is None or is_traced(x) else plan.ready.get(routes)
    if ready is not None and ready.run(x, outs, seq_slot, scratch, chosen):
        return
    check_routes(routes, outs)
    num_rows = outs[0].shape[0]
    check_operands(routes, x, outs, num_rows, num_rows)
    check_keys("seq_slot", seq_slot, num_rows, routes[0].device)
    check_scratch(scratch, routes[0], len(routes), num_rows)
    tile_key, tile_rows = _tiles(plan, num_rows, routes[0].max_loras, x.device)
    if NO_APPLY or not num_rows:
        return
    routed_delta(
        x,
        outs,
        seq_slot,
        tuple(tables_of(r) for r in routes),
        routes[0].max_rank,
        chosen,
        tile_key=tile_key,
        tile_rows=tile_rows,
        scratch=scratch,
    )
    if plan is not None and x.is_cuda and not is_traced(x):
        from lorafold.ops.ready import Ready

        # The plan of a prompt is used once; what comes back is worth preparing. Outputs that have
        # gradients are looked at anew each time.
        is_back = routes in plan.ready and not any(out.requires_grad for out in outs)
        plan.ready[routes] = Ready(routes, x, outs, seq_slot, plan, chosen) if is_back else None


def _tiles(
    plan: Plan | None, num_rows: int, num_keys: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """The plan's tiles, if there is a plan and it holds any."""
    if plan is None:
        return None, None
    plan.check(num_rows, num_keys, device)
    return (None, None) if device.type == "cpu" else (plan.tile_key, plan.tile_rows)
