"""A workload's operands in the layouts of other engines: stacked adapters and packed outputs.

Engines keep the adapters of a layer in one tensor per slice, [slots, rank, k_in] and
[slots, n_out, rank], and the outputs of projections that share x next to each other in one tensor.
A repetition is a window of `num_adapters` adapters in a longer stack, the same adapters that our
routes of that repetition name, so nothing is found in the cache here either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafold.bench import Call, Workload

__all__ = ["Operands", "PeerCalls", "stack"]

PeerCalls = list[Callable[[], None]]
"""One callable per repetition; call i changes `Operands.outs[i]` in place."""


@dataclass(frozen=True)
class Operands:
    """All repetitions of a workload.

    Args:
        a: per slice [stacked, rank, k_in].
        b: per slice [stacked, n_out, rank].
        starts: per repetition, the place of slot 0 in the stacks.
        xs: per repetition [rows, k_in].
        outs: per repetition [rows, sum of n_out].
        slots: [rows] int32.
        num_adapters: slots of a window.
        rank: of all adapters.
        scale: of all adapters.
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    starts: tuple[int, ...]
    xs: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    slots: Tensor
    num_adapters: int
    rank: int
    scale: float

    @property
    def num_rows(self) -> int:
        return int(self.slots.shape[0])

    @property
    def k_in(self) -> int:
        return int(self.a[0].shape[2])

    @property
    def n_outs(self) -> tuple[int, ...]:
        return tuple(int(b.shape[1]) for b in self.b)

    def window(self, stacked: Tensor, repetition: int) -> Tensor:
        """The slots of one repetition, as a view."""
        start = self.starts[repetition]
        return stacked[start : start + self.num_adapters]


def stack(load: Workload) -> Operands:
    """Copy the adapters that the workload's routes point to, and pack its outputs."""
    routes = load.calls[0].routes
    pools = [route.storage for route in routes]
    first_addresses = torch.stack([call.routes[0].a_table[0] for call in load.calls]).tolist()
    a_pool = pools[0][0]
    starts = [(at - a_pool.data_ptr()) // (a_pool[0].numel() * 2) for at in first_addresses]
    num_pooled = a_pool.shape[0]
    # Our routes wrap around the end of the pool; a window must be in one piece.
    order = torch.arange(num_pooled + load.num_adapters, device=a_pool.device) % num_pooled
    packed: dict[int, Tensor] = {}
    for call in load.calls:
        packed.setdefault(_key(call), torch.cat(call.outs, dim=1))
    return Operands(
        a=tuple(a[order] for a, _ in pools),
        b=tuple(b[order] for _, b in pools),
        starts=tuple(starts),
        xs=tuple(call.x for call in load.calls),
        outs=tuple(packed[_key(call)] for call in load.calls),
        slots=load.slots,
        num_adapters=load.num_adapters,
        rank=load.rank,
        scale=float(routes[0].scale_table[0]),
    )


def _key(call: Call) -> int:
    return call.outs[0].data_ptr()
