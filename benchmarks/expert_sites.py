"""The expert projections of Qwen3-30B-A3B, and calls on them whose operands are always cold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lorafold.bench import H200_COPY_BYTES_PER_US
from lorafold.ops import (
    MoeExpertRoute,
    Plan,
    moe_lora_gather_bgmv,
    plan_gather,
    reference,
    scratch_bytes,
)

__all__ = ["HIDDEN", "INNER", "NUM_EXPERTS", "PROJECTIONS", "TOP_K", "ExpertLoad", "Projection"]

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
SCALE = 4 / 3
POOL_BYTES = 1_000_000_000
"""Of one projection's adapters: twenty times the L2 of an H200."""


@dataclass(frozen=True)
class Projection:
    """One target, or two that share x and each have an A and a B.

    Args:
        name: how the rows of results call it.
        k_in: input features.
        n_outs: output features per slice.
        is_down: whether rows of x are (token, choice) pairs and not tokens.
    """

    name: str
    k_in: int
    n_outs: tuple[int, ...]
    is_down: bool

    @property
    def n_out(self) -> int:
        return sum(self.n_outs)

    def pair_bytes(self, rank: int) -> int:
        """Bytes of the A and B of one (adapter, expert) pair."""
        return 2 * rank * (len(self.n_outs) * self.k_in + self.n_out)

    def row_bytes(self, num_tokens: int, top_k: int) -> int:
        """Bytes of x, read once, and of the outputs, read and written once."""
        num_rows = num_tokens * top_k
        x_rows = num_rows if self.is_down else num_tokens
        return 2 * (x_rows * self.k_in + 2 * num_rows * self.n_out)


PROJECTIONS = (
    Projection("gate_up", HIDDEN, (2 * INNER,), False),
    Projection("gate+up", HIDDEN, (INNER, INNER), False),
    Projection("down", INNER, (HIDDEN,), True),
)
"""gate_up as one fused target with one A, gate and up as two targets, down."""


@dataclass(frozen=True)
class Repetition:
    """Operands of one call."""

    routes: tuple[MoeExpertRoute, ...]
    first: int  # adapter in slot 0
    x: Tensor
    out: Tensor  # [tokens * top_k, n_out]
    experts: Tensor  # [tokens * top_k] int32
    plan: Plan


class ExpertLoad:
    """`num_tokens` tokens dealt over `num_adapters` adapters of one rank, through one projection.

    Every repetition has its own window of adapters and its own random choice of experts.
    """

    def __init__(
        self,
        projection: Projection,
        rank: int,
        num_tokens: int,
        num_adapters: int,
        *,
        device: str = "cuda",
        num_experts: int = NUM_EXPERTS,
        top_k: int = TOP_K,
        pool_bytes: int = POOL_BYTES,
        max_repetitions: int = 256,
    ) -> None:
        self.projection, self.rank = projection, rank
        self.num_tokens, self.num_adapters = num_tokens, num_adapters
        self.num_experts, self.top_k, self.device = num_experts, top_k, device
        self.slots = (torch.arange(num_tokens, device=device) % num_adapters).int()
        self._generator = torch.Generator(device).manual_seed(0)
        k_in, n_out = projection.k_in, projection.n_out
        pair_bytes = projection.pair_bytes(rank)
        windows = max(2, pool_bytes // (num_adapters * num_experts * pair_bytes))
        choices = [self._choose_experts()]
        keys = self.slots.repeat_interleave(top_k).long() * num_experts + choices[0]
        self.num_pairs = len(keys.unique())
        num_rows = num_tokens * top_k
        x_rows = num_rows if projection.is_down else num_tokens
        row_bytes = projection.row_bytes(num_tokens, top_k)
        self.floor_bytes = self.num_pairs * pair_bytes + row_bytes
        self.floor_us = self.floor_bytes / H200_COPY_BYTES_PER_US
        wanted = -(-300_000_000 // self.floor_bytes) + 3
        self.repetitions = min(max_repetitions, wanted)
        choices += [self._choose_experts() for _ in range((self.repetitions - 1) // windows)]
        pooled = windows * num_adapters
        self.a = [
            self._random(pooled, num_experts, rank, k_in) / k_in**0.5 for _ in projection.n_outs
        ]
        self.b = [self._random(pooled, num_experts, n, rank) for n in projection.n_outs]
        copies = max(1, min(self.repetitions, -(-200_000_000 // row_bytes)))
        xs = [self._random(x_rows, k_in) for _ in range(copies)]
        outs = [self._random(num_rows, n_out) for _ in range(copies)]
        size = scratch_bytes(num_rows, 1, k_in, rank)
        self.scratch = torch.empty(size, dtype=torch.uint8, device=device)
        routes = [self._routes(w * num_adapters) for w in range(windows)]
        plans = [self.make_plan(routes[0][0], c) for c in choices]
        self.calls = [
            Repetition(
                routes=routes[i % windows],
                first=i % windows * num_adapters,
                x=xs[i % copies],
                out=outs[i % copies],
                experts=choices[i // windows],
                plan=plans[i // windows],
            )
            for i in range(self.repetitions)
        ]

    def make_plan(self, route: MoeExpertRoute, experts: Tensor, plan: Plan | None = None) -> Plan:
        return plan_gather(route, experts, self.slots, self.top_k, plan=plan)

    def run(
        self, index: int, out: Tensor | None = None, choice: tuple[Tensor, Plan] | None = None
    ) -> None:
        """One repetition: an operator call per slice, on that slice's columns of the output.

        Args:
            index: of the repetition.
            out: instead of the repetition's own.
            choice: experts and their plan, instead of the repetition's own.
        """
        call = self.calls[index % self.repetitions]
        experts, plan = choice or (call.experts, call.plan)
        columns = (call.out if out is None else out).split(self.projection.n_outs, dim=1)
        for route, base_out in zip(call.routes, columns, strict=True):
            moe_lora_gather_bgmv(
                route,
                call.x,
                base_out,
                experts,
                self.slots,
                top_k=self.top_k,
                x_gather=0 if self.projection.is_down else 1,
                plan=plan,
                scratch=self.scratch,
            )

    def timed(self) -> list[Callable[[], None]]:
        """One callable per repetition, plans given."""
        return [partial(self.run, i) for i in range(self.repetitions)]

    def truth(self, row: int, numerics: str) -> Tensor:
        """One row of the first repetition's output after the call, from the CPU reference."""
        call = self.calls[0]
        adapter = call.first + int(self.slots[row // self.top_k])
        expert = int(call.experts[row])
        x_row = row if self.projection.is_down else row // self.top_k
        x = call.x[x_row : x_row + 1].cpu()
        deltas = [
            reference.delta_rows(x, a[adapter, expert].cpu(), b[adapter, expert].cpu(), numerics)
            for a, b in zip(self.a, self.b, strict=True)
        ]
        return reference.fold(call.out[row : row + 1].cpu(), torch.cat(deltas, 1), SCALE)[0]

    def _choose_experts(self) -> Tensor:
        weights = torch.rand(
            (self.num_tokens, self.num_experts), generator=self._generator, device=self.device
        )
        return weights.topk(self.top_k, dim=1).indices.int().flatten().contiguous()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(
            shape, generator=self._generator, device=self.device, dtype=torch.bfloat16
        )

    def _routes(self, first: int) -> tuple[MoeExpertRoute, ...]:
        """Tables in which slot s is adapter first + s."""
        keys = torch.arange(self.num_adapters * self.num_experts, device=self.device)
        key_of_pool = first * self.num_experts + keys
        return tuple(
            MoeExpertRoute(
                a_table=a.data_ptr() + key_of_pool * (a[0, 0].numel() * 2),
                b_table=b.data_ptr() + key_of_pool * (b[0, 0].numel() * 2),
                scale_table=torch.full_like(keys, SCALE, dtype=torch.float32),
                rank_table=torch.full_like(keys, self.rank, dtype=torch.int32),
                num_experts=self.num_experts,
                k_in=self.projection.k_in,
                n_out=b.shape[2],
                max_rank=self.rank,
                storage=(a, b),
            )
            for a, b in zip(self.a, self.b, strict=True)
        )
