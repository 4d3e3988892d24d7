"""Cases for the expert operators: (token, choice) rows, both of their forms, and the truth.

The truth of a row is `apply_lora_delta` on that row alone, with the A, B and scale of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafold.ops import (
    LoraPair,
    LoraRoute,
    MoeExpertRoute,
    Plan,
    apply_lora_delta,
    scratch_bytes,
)
from lorafold.ops.group import group_triton
from lorafold.ops.keys_triton import gather_keys_triton, grouped_keys_triton
from lorafold.ops.launch import routed_triton
from tests.ops.cases import make_pair, poisoned

Choose = Callable[[int, int, torch.Generator], Tensor]
"""(rows, experts, generator) -> the expert of every row, [rows] int64."""


def anywhere(num_rows: int, num_experts: int, generator: torch.Generator) -> Tensor:
    return torch.randint(num_experts, (num_rows,), generator=generator)


def skewed(num_rows: int, num_experts: int, generator: torch.Generator) -> Tensor:
    """Nearly all rows at the last expert, and most experts empty."""
    experts = torch.full((num_rows,), num_experts - 1)
    experts[:: max(2, num_rows // 3)] = 0
    return experts


@dataclass
class ExpertCase:
    """T tokens with K choices each: row r = t * K + k, in x (by token) and x_rows (by row)."""

    pairs: dict[tuple[int, int], LoraPair]
    route: MoeExpertRoute
    top_k: int
    indices: Tensor  # [T * K] int32
    row_adapter: Tensor  # [T] int32
    x: Tensor  # [T, k_in]
    x_rows: Tensor  # [T * K, k_in]
    out_buffer: Tensor  # guard cells included
    out: Tensor  # [T * K, n_out]
    order: Tensor  # the expert-sorted rows, [T * K] int64
    offsets: Tensor  # [E + 1] int32

    @property
    def num_rows(self) -> int:
        return self.indices.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.row_adapter.shape[0]

    @property
    def sorted_token_ids(self) -> Tensor:
        return (self.order // self.top_k).int()

    def keys(self) -> Tensor:
        """[T * K] int32 of the rows in order, as the contract of the operators says."""
        slots = self.row_adapter.cpu().repeat_interleave(self.top_k).long()
        experts = self.indices.cpu().long()
        inside = (slots >= 0) & (slots < self.route.max_loras) & (experts < self.route.num_experts)
        return torch.where(inside, slots * self.route.num_experts + experts, -1).int()

    def input_rows(self, x_gather: int) -> Tensor:
        """The row of x of every row, [T * K, k_in]."""
        return self.x.repeat_interleave(self.top_k, dim=0) if x_gather else self.x_rows

    def truth(self, numerics: str, x_gather: int) -> Tensor:
        """What the whole buffer must hold afterwards: one row at a time, on the CPU."""
        whole = self.out_buffer.cpu().clone()
        view = torch.as_strided(whole, self.out.shape, self.out.stride(), self.out.storage_offset())
        x = self.input_rows(x_gather).cpu()
        for row, key in enumerate(self.keys().tolist()):
            pair = self.pairs.get(divmod(key, self.route.num_experts)) if key >= 0 else None
            if pair is not None:
                on_cpu = LoraPair(pair.a.cpu(), pair.b.cpu(), pair.scale, pair.rank)
                apply_lora_delta(on_cpu, x[row : row + 1], view[row : row + 1], numerics=numerics)
        return whole


def make_expert_case(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    ranks: Sequence[int],
    k_in: int,
    n_out: int,
    max_rank: int,
    *,
    device: str,
    layer_experts: int | None = None,
    choose: Choose = anywhere,
    seed: int = 0,
) -> ExpertCase:
    """`ranks` per slot; a few experts of each slot have no adapter or a smaller rank.

    The layer has `layer_experts` (default num_experts): the rest of them is beyond the table.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        (slot, expert): make_pair(
            generator, k_in, n_out, max(1, rank - expert % 3), max_rank, device, 4 / 3 + slot
        )
        for slot, rank in enumerate(ranks)
        for expert in range(num_experts)
        if (slot + expert) % 5 != 4
    }
    layer_experts = num_experts if layer_experts is None else layer_experts
    num_rows = num_tokens * top_k
    experts = choose(num_rows, layer_experts, generator)
    choices = torch.tensor([*range(len(ranks))] * 3 + [-1, -9])
    slots = choices[torch.randint(len(choices), (num_tokens,), generator=generator)]
    half = k_in // 2
    x, x_rows = (
        torch.randn(rows, k_in, generator=generator).bfloat16() for rows in (num_tokens, num_rows)
    )
    for t in (x, x_rows):
        t[:, half : 2 * half] = t[:, :half]  # see cases: large terms cancel
    buffer = poisoned((num_rows, n_out + 6), device)
    out = buffer[:, 3 : 3 + n_out]
    out.copy_((torch.randn(num_rows, n_out, generator=generator) * 2.0**-36).bfloat16())
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=layer_experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    return ExpertCase(
        pairs=pairs,
        route=MoeExpertRoute.from_pairs(pairs, max_loras=len(ranks), num_experts=num_experts),
        top_k=top_k,
        indices=experts.int().to(device),
        row_adapter=slots.int().to(device),
        x=x.to(device),
        x_rows=x_rows.to(device),
        out_buffer=buffer,
        out=out,
        order=order.to(device),
        offsets=offsets.to(device),
    )


def tables_of(route: MoeExpertRoute) -> tuple[tuple[Tensor, ...], ...]:
    names = ("a_table", "b_table", "scale_table", "rank_table")
    return tuple((getattr(route, name),) for name in names)


def dense_route(route: MoeExpertRoute) -> LoraRoute:
    """The same tables for the dense operator: every (slot, expert) is a slot."""
    return LoraRoute(
        route.a_table, route.b_table, route.scale_table, route.rank_table,
        route.k_in, route.n_out, route.max_rank, storage=route.storage,
    )  # fmt: skip


def run_kernels(
    route: MoeExpertRoute,
    x: Tensor,
    out: Tensor,
    keys: Tensor,
    numerics: str,
    *,
    source: Tensor | None = None,
    top_k: int = 1,
) -> None:
    """What the operators launch on a GPU, on any device, with poisoned scratch."""
    num_rows = out.shape[0]
    plan = Plan.empty(num_rows, route.num_keys, x.device)
    group_triton(keys, plan)
    size = scratch_bytes(num_rows, 1, route.k_in, route.max_rank)
    scratch = poisoned((size // 2,), x.device).view(torch.uint8)
    routed_triton(
        x, (out,), tables_of(route), route.max_rank, numerics, source, top_k,
        plan.tile_key, plan.tile_rows, scratch,
    )  # fmt: skip


def gather_by_kernels(case: ExpertCase, numerics: str, x_gather: int) -> None:
    route = case.route
    keys = gather_keys_triton(
        case.indices, case.row_adapter, case.top_k, route.num_experts, route.max_loras, None
    )
    x = case.x if x_gather else case.x_rows
    run_kernels(route, x, case.out, keys, numerics, top_k=case.top_k if x_gather else 1)


def grouped_by_kernels(case: ExpertCase, sorted_out: Tensor, numerics: str, x_gather: int) -> None:
    route, tokens = case.route, case.sorted_token_ids
    keys = grouped_keys_triton(
        case.offsets, tokens, case.row_adapter, case.num_tokens, 0, case.num_rows,
        route.num_experts, route.max_loras, None,
    )  # fmt: skip
    x = case.x if x_gather else case.x_rows[case.order]
    run_kernels(route, x, sorted_out, keys, numerics, source=tokens if x_gather else None)
