"""One mixture-of-experts layer as vLLM calls it: before the activation, and before the top-k sum.

Rows are (token, choice) in vLLM's order, so the key of row r is slot(r // k) * num_experts +
expert(r). Keys and plan are made for gate and up, and handed through vLLM to the down projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.integrations.vllm.fold import check_rows
from lorafold.integrations.vllm.tables import SlotTables
from lorafold.integrations.vllm.target import require_in_place
from lorafold.integrations.vllm.weighted import fold_delta
from lorafold.ops.keys import make_gathered_plan
from lorafold.ops.levers import NO_APPLY
from lorafold.ops.plan import Plan
from lorafold.ops.routed import routed_delta
from lorafold.ops.tiles import max_tiles, plan_rows

if TYPE_CHECKING:
    from lorafold.integrations.vllm.punica import Punica

__all__ = ["ExpertTarget"]

_Handed = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_NOTHING: _Handed = (None, None, None, None)


class ExpertTarget:
    """The experts of one layer, and the step.

    Args:
        punica: the rows of the step.
        layer: has `w13_lora_a_stacked`, `w13_lora_b_stacked`, `w2_lora_a_stacked` and
            `w2_lora_b_stacked`; factors that all experts share have an expert dimension of 1.

    Raises:
        RouteError: if the tensors are not bfloat16, or lie where kernels cannot read them.
    """

    def __init__(self, punica: Punica, layer: Any) -> None:
        self.punica = punica
        self.w13 = SlotTables(*_per_expert(layer.w13_lora_a_stacked, layer.w13_lora_b_stacked))
        self.w2 = SlotTables(*_per_expert(layer.w2_lora_a_stacked, layer.w2_lora_b_stacked))
        self.token_mapping_meta = punica.token_mapping_meta

    def add_lora_w13(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_ids: Tensor,
        topk_weights: Tensor,
        expert_map: Tensor | None,
        *args: Any,
        add_inputs: bool = True,
        token_lora_mapping: Tensor | None = None,
        **kwargs: Any,
    ) -> _Handed:
        """Fold the deltas of gate and up into (token, choice) rows, *in place*, in one call.

        Args:
            y: [T, k, the sum of the slices] bfloat16, the base experts' output.
            x: [T, hidden] bfloat16.
            lora_a_stacked: the tensors that the tables were made from, or views of them.
            lora_b_stacked: likewise.
            topk_ids: [T, k] integer expert ids.
            topk_weights: not used here.
            expert_map: [all experts] this rank's number of each expert, -1 for others' experts;
                None where every rank has all.
            *args: not used.
            add_inputs: must be True.
            token_lora_mapping: [T] int32 slots where tokens come from other ranks; None for the
                step's own.
            **kwargs: not used.

        Returns:
            What `add_lora_w2` of the same rows takes.

        Raises:
            BackendError: if add_inputs is False.
            RouteError: if y and x do not fit the layer.
        """
        require_in_place(add_inputs)
        rows = self.punica.tokens
        # Tokens of other ranks may have adapters where this rank's own have none.
        idle = token_lora_mapping is None and not rows.any_adapter.item()
        if NO_APPLY or idle or not topk_ids.numel():
            return _NOTHING
        num_tokens, top_k = topk_ids.shape
        slots = rows.slots[:num_tokens] if token_lora_mapping is None else token_lora_mapping
        flat = y.view(num_tokens * top_k, -1)
        check_rows(flat, x, sum(self.w13.n_outs), self.w13.k_in, float32=False)
        if x.shape[0] != num_tokens or slots.shape[0] < num_tokens:
            raise RouteError(f"{num_tokens} rows of x and slots are needed; given: {x.shape[0]}")
        plan = self._plan(topk_ids, slots, expert_map)
        order = _order(self.w13.storage, lora_a_stacked)
        outs = torch.split(flat, [self.w13.n_outs[i] for i in order], dim=1)
        self._route(self.w13, x, outs, plan.keys, plan.tile_key, plan.tile_rows, top_k, order)
        return plan.keys, plan.tile_key, plan.tile_rows, slots

    def add_lora_w2(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        topk_weights: Tensor,
        keys: Tensor | None,
        tile_key: Tensor | None,
        tile_rows: Tensor | None,
        *args: Any,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fold the weighted deltas of the down projection into (token, choice) rows, *in place*.

            y[r] <- bf16( f32(y[r]) + f32(topk_weights[r] * bf16(scale * delta[r])) )

        Args:
            y: [T, k, hidden] bfloat16, the base experts' output, weighted already.
            x: [T k, inner] bfloat16.
            lora_a_stacked: the tensors that the tables were made from, or views of them.
            lora_b_stacked: likewise.
            topk_weights: [T, k], rounded to float32.
            keys: from `add_lora_w13`.
            tile_key: from `add_lora_w13`.
            tile_rows: from `add_lora_w13`.
            *args: not used.
            add_inputs: must be True.
            **kwargs: not used.

        Raises:
            BackendError: if add_inputs is False.
            RouteError: if y and x do not fit the layer.
        """
        require_in_place(add_inputs)
        if keys is None:
            return
        flat = y.view(keys.shape[0], -1)
        check_rows(flat, x, self.w2.n_outs[0], self.w2.k_in)
        delta = torch.zeros(flat.shape, dtype=torch.bfloat16, device=y.device)
        self._route(self.w2, x, (delta,), keys, tile_key, tile_rows, 1, [0])
        fold_delta(flat, delta, topk_weights.float().flatten(), keys, self.w2.a_table[0])

    def _plan(self, topk_ids: Tensor, slots: Tensor, expert_map: Tensor | None) -> Plan:
        experts = topk_ids.flatten()
        if expert_map is not None:
            experts = expert_map[experts.long()]
        num_experts, max_loras = self.w13.num_experts, self.w13.max_loras
        plan = _unfilled_plan(experts.shape[0], max_loras * num_experts, experts.device)
        top_k = topk_ids.shape[1]
        return make_gathered_plan(experts, slots, top_k, num_experts, max_loras, plan)

    def _route(
        self,
        tables: SlotTables,
        x: Tensor,
        outs: Sequence[Tensor],
        keys: Tensor,
        tile_key: Tensor | None,
        tile_rows: Tensor | None,
        top_k: int,
        order: list[int],
    ) -> None:
        columns = (tables.a_table, tables.b_table, tables.scale_table, tables.rank_table)
        by_slice = list(zip(*(table.unbind(0) for table in columns), strict=True))
        planned = keys.is_cuda
        routed_delta(
            x, outs, keys, [by_slice[i] for i in order], tables.max_rank, self.punica.numerics,
            top_k=top_k,
            tile_key=tile_key if planned else None,
            tile_rows=tile_rows if planned else None,
        )  # fmt: skip


def _unfilled_plan(num_rows: int, num_keys: int, device: torch.device) -> Plan:
    """Buffers for a plan that is filled right away: only the counters must be zero before."""
    tile_rows = plan_rows(num_rows, num_keys)
    count = max_tiles(num_rows, num_keys, tile_rows)

    def buffer(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=device)

    return Plan(
        num_rows=num_rows,
        num_keys=num_keys,
        block_rows=tile_rows,
        tile_key=buffer(count),
        tile_rows=buffer(count * tile_rows),
        keys=buffer(num_rows),
        counters=buffer(2 * num_keys + num_rows).zero_(),
    )


def _per_expert(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """A and B with one entry per expert, as views where all experts share a factor."""
    num_experts = max(t.shape[1] for t in (*a, *b))
    a_wide, b_wide = ([t.expand(-1, num_experts, -1, -1) for t in side] for side in (a, b))
    return a_wide, b_wide


def _order(storage: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> list[int]:
    """Which slice each given A is: some back ends of vLLM want up before gate."""
    addresses = [t.data_ptr() for t in storage]
    return [addresses.index(t.data_ptr()) for t in given]
