"""The sites of a Llama-3-8B layer, and calls on them whose operands are always cold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.timing import COPY_BYTES_PER_US
from lorafold.ops import LoraRoute, Plan, make_plan, reference, scratch_bytes

__all__ = ["SITES", "Call", "Site", "Workload"]


@dataclass(frozen=True)
class Site:
    """Linear layers that share x."""

    name: str
    k_in: int
    n_outs: tuple[int, ...]


SITES = {
    site.name: site
    for site in (
        Site("o", 4096, (4096,)),
        Site("qkv", 4096, (4096, 1024, 1024)),
        Site("gate_up", 4096, (14336, 14336)),
        Site("down", 14336, (4096,)),
    )
}


@dataclass(frozen=True)
class Call:
    """Operands of one repetition."""

    routes: tuple[LoraRoute, ...]
    x: Tensor
    outs: tuple[Tensor, ...]


class Workload:
    """`num_rows` rows dealt over `num_adapters` adapters of one rank, many times over."""

    def __init__(
        self, site: Site, rank: int, num_rows: int, num_adapters: int, *, repetitions: int = 512
    ) -> None:
        self.site, self.rank, self.num_rows, self.num_adapters = site, rank, num_rows, num_adapters
        used = min(num_rows, num_adapters)
        adapter_bytes = 2 * rank * sum(site.k_in + n for n in site.n_outs)
        row_bytes = 2 * num_rows * (site.k_in + 2 * sum(site.n_outs))
        self.floor_bytes = used * adapter_bytes + row_bytes
        self.floor_us = self.floor_bytes / COPY_BYTES_PER_US
        self.repetitions = max(1, min(repetitions, -(-200_000_000 // self.floor_bytes) + 1))
        pool = max(used, -(-200_000_000 // adapter_bytes))
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        self._a = [random(pool, rank, site.k_in) / site.k_in**0.5 for _ in site.n_outs]
        self._b = [random(pool, n, rank) for n in site.n_outs]
        self.slots = (torch.arange(num_rows, device="cuda") % num_adapters).int()
        self.plan: Plan = make_plan(self.slots, num_adapters)
        size = scratch_bytes(num_rows, len(site.n_outs), site.k_in, rank)
        self.scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
        x_copies = max(1, min(self.repetitions, -(-200_000_000 // max(1, row_bytes))))
        xs = [random(num_rows, site.k_in) for _ in range(x_copies)]
        outs = [tuple(random(num_rows, n) for n in site.n_outs) for _ in range(x_copies)]
        self.calls = [
            Call(self._routes(i * used, pool), xs[i % x_copies], outs[i % x_copies])
            for i in range(self.repetitions)
        ]

    def _routes(self, first: int, pool: int) -> tuple[LoraRoute, ...]:
        """Tables in which slot s is adapter first + s of the pool."""
        index = (torch.arange(self.num_adapters, device="cuda") + first) % pool
        full = torch.full_like(index, self.rank, dtype=torch.int32)
        scale = torch.full_like(index, 4 / 3, dtype=torch.float32)
        return tuple(
            LoraRoute(
                a_table=a.data_ptr() + index * (a[0].numel() * 2),
                b_table=b.data_ptr() + index * (b[0].numel() * 2),
                scale_table=scale,
                rank_table=full,
                k_in=self.site.k_in,
                n_out=b.shape[1],
                max_rank=self.rank,
                storage=(a, b),
            )
            for a, b in zip(self._a, self._b, strict=True)
        )

    def truth(self, call: Call, row: int, numerics: str) -> list[Tensor]:
        """One row's outputs after the call, from the CPU reference."""
        slot = int(self.slots[row])
        results = []
        for i, (route, out) in enumerate(zip(call.routes, call.outs, strict=True)):
            a_pool, b_pool = self._a[i], self._b[i]
            at = (int(route.a_table[slot]) - a_pool.data_ptr()) // (a_pool[0].numel() * 2)
            x = call.x[row : row + 1].cpu()
            delta = reference.delta_rows(x, a_pool[at].cpu(), b_pool[at].cpu(), numerics)
            results.append(reference.fold(out[row : row + 1].cpu(), delta, 4 / 3)[0])
        return results
