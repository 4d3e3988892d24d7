"""The sites of a model's layers, and calls on them whose operands are always cold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafold.adapter import TargetShape
from lorafold.bench.timing import H200_COPY_BYTES_PER_US
from lorafold.numerics import HOPPER, Numerics, device_model
from lorafold.ops import LoraRoute, Plan, make_plan, reference, scratch_bytes

__all__ = ["SCALE", "SITES", "Call", "Site", "Workload", "sites_of"]

SCALE = 4 / 3
"""Of all adapters: it shows whether the fold is fused."""

_COLD_BYTES = 200_000_000
"""What the repetitions should touch together: several times the L2 of an H200."""

_SHARING = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up"}
_SHARING["up_proj"] = "gate_up"


@dataclass(frozen=True)
class Site:
    """Linear layers that share x.

    Args:
        name: how results call it.
        k_in: input features.
        n_outs: output features of each.
        layers: how often a model has it.
    """

    name: str
    k_in: int
    n_outs: tuple[int, ...]
    layers: int = 1


SITES = {
    site.name: site
    for site in (
        Site("o", 4096, (4096,), 32),
        Site("qkv", 4096, (4096, 1024, 1024), 32),
        Site("gate_up", 4096, (14336, 14336), 32),
        Site("down", 14336, (4096,), 32),
    )
}
"""Those of Llama-3-8B."""


def sites_of(shapes: Mapping[str, TargetShape]) -> list[Site]:
    """The sites of a model: q, k and v of a layer are one, and so are gate and up.

    Args:
        shapes: per path, the linear layers.

    Example:
        >>> shapes = {f"layers.{i}.{n}_proj": TargetShape(8, 4) for i in (0, 1) for n in "qvo"}
        >>> [(site.name, site.n_outs, site.layers) for site in sites_of(shapes)]
        [('qkv', (4, 4), 2), ('o', (4,), 2)]
    """
    groups: dict[tuple[str, str, int], list[int]] = {}
    for path, shape in shapes.items():
        parent, _, leaf = path.rpartition(".")
        name = _SHARING.get(leaf, leaf.removesuffix("_proj"))
        groups.setdefault((parent, name, shape.in_features), []).append(shape.out_features)
    counts = Counter((name, k_in, tuple(n_outs)) for (_, name, k_in), n_outs in groups.items())
    return [Site(*site, layers) for site, layers in counts.items()]


@dataclass(frozen=True, eq=False)
class Call:
    """Operands of one repetition.

    Args:
        routes: one per output.
        x: [num_rows, k_in] bf16.
        outs: per output [num_rows, n_out] bf16, changed by the call.
    """

    routes: tuple[LoraRoute, ...]
    x: Tensor
    outs: tuple[Tensor, ...]


class Workload:
    """`num_rows` rows dealt over `num_adapters` adapters of one rank, many times over.

    Args:
        site: what is adapted.
        rank: of all adapters.
        num_rows: of the batch.
        num_adapters: slots; row i has the adapter of slot i modulo this.
        repetitions: calls, at most; fewer where they are large enough to be cold.
        device: where; on a CPU there is one repetition, whatever the caches hold.
        copy_bytes_per_us: the rate of the floor.

    Attributes:
        floor_bytes: that a call must move: each adapter in use once, x once, the outputs read and
            written once.
        floor_us: how long that takes.
        calls: the operands, per repetition.
        slots: [num_rows] int32.

    Example:
        >>> load = Workload(Site("o", 16, (8,)), 4, num_rows=3, num_adapters=2, device="cpu")
        >>> len(load.calls), load.slots.tolist(), load.floor_bytes
        (1, [0, 1, 0], 576)
    """

    def __init__(
        self,
        site: Site,
        rank: int,
        num_rows: int,
        num_adapters: int,
        *,
        repetitions: int = 512,
        device: torch.device | str = "cuda",
        copy_bytes_per_us: float = H200_COPY_BYTES_PER_US,
    ) -> None:
        self.site, self.rank, self.num_rows, self.num_adapters = site, rank, num_rows, num_adapters
        self.device = torch.device(device)
        cold = _COLD_BYTES if self.device.type == "cuda" else 0
        used = min(num_rows, num_adapters)
        adapter_bytes = 2 * rank * sum(site.k_in + n for n in site.n_outs)
        row_bytes = 2 * num_rows * (site.k_in + 2 * sum(site.n_outs))
        self.floor_bytes = used * adapter_bytes + row_bytes
        self.floor_us = self.floor_bytes / copy_bytes_per_us
        self.repetitions = max(1, min(repetitions, -(-cold // self.floor_bytes) + 1))
        pool = max(used, -(-cold // adapter_bytes))
        generator = torch.Generator(self.device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)

        self._a = [random(pool, rank, site.k_in) / site.k_in**0.5 for _ in site.n_outs]
        self._b = [random(pool, n, rank) for n in site.n_outs]
        self.slots = (torch.arange(num_rows, device=self.device) % num_adapters).int()
        self.plan: Plan = make_plan(self.slots, num_adapters)
        size = scratch_bytes(num_rows, len(site.n_outs), site.k_in, rank)
        self.scratch = torch.empty(size, dtype=torch.uint8, device=self.device)
        x_copies = max(1, min(self.repetitions, -(-cold // max(1, row_bytes))))
        xs = [random(num_rows, site.k_in) for _ in range(x_copies)]
        outs = [tuple(random(num_rows, n) for n in site.n_outs) for _ in range(x_copies)]
        self.calls = [
            Call(self._routes(i * used, pool), xs[i % x_copies], outs[i % x_copies])
            for i in range(self.repetitions)
        ]

    def _routes(self, first: int, pool: int) -> tuple[LoraRoute, ...]:
        """Tables in which slot s is adapter first + s of the pool."""
        index = (torch.arange(self.num_adapters, device=self.device) + first) % pool
        full = torch.full_like(index, self.rank, dtype=torch.int32)
        scale = torch.full_like(index, SCALE, dtype=torch.float32)
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

    def truth(self, call: Call, row: int, numerics: Numerics) -> list[Tensor]:
        """One row's outputs after the call, from the CPU reference.

        Args:
            call: one of `calls`, before it runs.
            row: of the batch.
            numerics: how dot products are summed.

        Returns:
            Per output [n_out] bf16, on the CPU.
        """
        slot = int(self.slots[row])
        model = device_model(call.x.device) or HOPPER
        results = []
        for i, (route, out) in enumerate(zip(call.routes, call.outs, strict=True)):
            a_pool, b_pool = self._a[i], self._b[i]
            at = (int(route.a_table[slot]) - a_pool.data_ptr()) // (a_pool[0].numel() * 2)
            x = call.x[row : row + 1].cpu()
            a, b = a_pool[at].cpu(), b_pool[at].cpu()
            delta = reference.delta_rows(x, a, b, numerics, model=model)
            results.append(reference.fold(out[row : row + 1].cpu(), delta, SCALE)[0])
        return results
