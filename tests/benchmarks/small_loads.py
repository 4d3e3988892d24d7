"""A dense workload of a few small adapters, with everything that lorafold.bench.Workload has."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch

from lorafold.bench import Call, Site, Workload
from lorafold.ops import LoraRoute, make_plan, scratch_bytes

SCALE = 4 / 3


def small_load(
    n_outs: tuple[int, ...],
    *,
    device: str = "cpu",
    rank: int = 16,
    k_in: int = 64,
    num_rows: int = 5,
    num_adapters: int = 3,
    pooled: int = 4,
    repetitions: int = 2,
) -> SimpleNamespace:
    """Windows of `num_adapters` adapters over `pooled` ones, wrapping around; rows out of order."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    a = [random(pooled, rank, k_in) / k_in**0.5 for _ in n_outs]
    b = [random(pooled, n, rank) for n in n_outs]

    def routes(first: int) -> tuple[LoraRoute, ...]:
        index = (torch.arange(num_adapters, device=device) + first) % pooled
        return tuple(
            LoraRoute(
                a_table=a_pool.data_ptr() + index * (a_pool[0].numel() * 2),
                b_table=b_pool.data_ptr() + index * (b_pool[0].numel() * 2),
                scale_table=torch.full_like(index, SCALE, dtype=torch.float32),
                rank_table=torch.full_like(index, rank, dtype=torch.int32),
                k_in=k_in,
                n_out=n,
                max_rank=rank,
                storage=(a_pool, b_pool),
            )
            for a_pool, b_pool, n in zip(a, b, n_outs, strict=True)
        )

    slots = (torch.arange(num_rows, device=device) * 2 % num_adapters).int()
    size = scratch_bytes(num_rows, len(n_outs), k_in, rank)
    load = SimpleNamespace(
        _a=a,
        _b=b,
        floor_us=0.5,
        site=Site("small", k_in, n_outs),
        rank=rank,
        num_rows=num_rows,
        num_adapters=num_adapters,
        slots=slots,
        plan=make_plan(slots, num_adapters),
        scratch=torch.empty(size, dtype=torch.uint8, device=device),
        calls=[
            Call(
                routes(3 * i % pooled),
                random(num_rows, k_in),
                tuple(random(num_rows, n) for n in n_outs),
            )
            for i in range(repetitions)
        ],
    )
    load.truth = partial(Workload.truth, load)
    return load
