"""Routed calls that were checked and prepared once, so that a repeat costs little on the host.

Checking operands and choosing block sizes takes longer than these kernels run. A plan keeps, for
the routes that it was used with, what a repeat needs: the same sizes and strides give the same
launches, and only addresses are new.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.ops.check import check_contents, check_scratch
from lorafold.ops.compiled import Bound, is_watched
from lorafold.ops.launch import prepare_call
from lorafold.ops.plan import Plan
from lorafold.route import LoraRoute, tables_of

__all__ = ["Ready"]

_REMEMBERED = 4096


class Ready:
    """A call of these routes with this plan on a CUDA device.

    Args:
        routes: of the call.
        x: [num_rows, k_in], like all operands already checked.
        outs: [num_rows, n_out] per route, without gradients.
        seq_slot: [num_rows], which the plan was made of.
        plan: the plan.
        numerics: as resolved.
    """

    def __init__(
        self,
        routes: tuple[LoraRoute, ...],
        x: Tensor,
        outs: tuple[Tensor, ...],
        seq_slot: Tensor,
        plan: Plan,
        numerics: Numerics,
    ) -> None:
        self._routes, self._numerics = routes, numerics
        self._device = int(x.device.index)
        self._seq_slot, self._slots_layout = seq_slot, _layout(seq_slot)
        self._layouts = [_layout(t) for t in (x, *outs)]
        a_tables, b_tables, scale_tables, rank_tables = (
            tuple([table.data_ptr() for table in tables])
            for tables in zip(*map(tables_of, routes), strict=True)
        )
        self._tables = a_tables, b_tables, scale_tables, rank_tables
        self._tiles = plan.tile_key.data_ptr(), plan.tile_rows.data_ptr()
        self._call = prepare_call(
            x, outs, routes[0].max_rank, numerics, plan.tile_key, plan.tile_rows
        )
        self._launches: list[Bound] | None = None
        self._apart: set[tuple[int, ...]] = set()
        self._scratch: Tensor | None = None

    def run(
        self,
        x: Tensor,
        outs: tuple[Tensor, ...],
        seq_slot: Tensor,
        scratch: Tensor | None,
        numerics: Numerics,
    ) -> bool:
        """Launch the call, or return False where it is not the same as the first one.

        Raises:
            RouteError: if x and outs overlap in memory, or the scratch does not fit.
        """
        if (
            numerics != self._numerics
            or not (seq_slot is self._seq_slot or _layout(seq_slot) == self._slots_layout)
            or [_layout(t) for t in (x, *outs)] != self._layouts
            or torch.cuda.current_device() != self._device
            or is_watched()
        ):
            return False
        launches = self._launches
        if launches is None:
            launches = [b for each in self._call.launches if (b := each.bound(self._device))]
            if len(launches) < len(self._call.launches):
                return False
            self._launches = launches
        address = x.data_ptr()
        addresses = [out.data_ptr() for out in outs]
        if address & 15 or not self._are_apart(x, outs, address, addresses):
            return False
        if scratch is not None and scratch is not self._scratch:
            check_scratch(scratch, self._routes[0], len(outs), x.shape[0])
            self._scratch = scratch
        held, xa_bytes = scratch, self._call.xa_bytes
        if held is None and xa_bytes:
            held = torch.empty(xa_bytes, dtype=torch.uint8, device=x.device)
        xa = 0 if held is None else held.data_ptr()
        operands = self._call.operands(address, xa, tuple(addresses), self._tables, *self._tiles)
        for launch, each in zip(launches, operands, strict=True):
            launch(each)
        return True

    def _are_apart(
        self, x: Tensor, outs: tuple[Tensor, ...], address: int, addresses: list[int]
    ) -> bool:
        """Whether no operands overlap, which depends on their distances only; False where an
        output is not aligned as the kernels want it.
        """
        distances = tuple([each - address for each in addresses])
        if distances in self._apart:
            return True
        check_contents(x, outs, None, 0)
        if any(distance & 15 for distance in distances):
            return False
        if len(self._apart) < _REMEMBERED:
            self._apart.add(distances)
        return True


def _layout(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad
