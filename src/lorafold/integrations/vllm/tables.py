"""One layer's tables over slots: where vLLM's stacked A and B of a slot are, its scales and ranks.

vLLM allocates per layer and slice one tensor over all slots, padded to its largest rank, which
never moves; adapters are copied into it. The tables say of each slot whether it adapts the slice,
with which true rank, and with which float32 scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorafold.errors import RouteError

__all__ = ["SlotTables"]

_BF16_BYTES = 2


class SlotTables:
    """The tables of the slices of one layer (q, k and v; gate and up; one for a plain linear).

    Args:
        a: per slice, [max_loras, num_experts, max_rank, k_in] bfloat16; num_experts is 1 for a
            layer without experts. A and B may be views with stride 0 over the experts.
        b: per slice, [max_loras, num_experts, n_out, max_rank] bfloat16.

    Attributes:
        a_table: [num_slices, max_loras * num_experts] int64 addresses, 0 where not adapted.
        b_table: the same for B.
        scale_table: float32, the same shape.
        rank_table: int32 true ranks, the same shape.
        n_outs: output features per slice.

    Raises:
        RouteError: if the tensors do not fit together, or lie where kernels cannot read them.

    Example:
        >>> a = torch.ones(2, 1, 8, 32, dtype=torch.bfloat16)
        >>> b = torch.ones(2, 1, 16, 8, dtype=torch.bfloat16)
        >>> tables = SlotTables([a], [b])
        >>> tables.place(1, 0, rank=4, scale=0.5)
        >>> tables.rank_table.tolist(), tables.scale_table.tolist()
        ([[0, 4]], [[0.0, 0.5]])
    """

    def __init__(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
        _check(a, b)
        self.max_loras, self.num_experts, self.max_rank, self.k_in = a[0].shape
        self.n_outs = [int(t.shape[2]) for t in b]
        self.storage = (*a, *b)
        self._a_addresses = _addresses(a)
        self._b_addresses = _addresses(b)
        self.a_table = self._table(torch.int64)
        self.b_table = self._table(torch.int64)
        self.scale_table = self._table(torch.float32)
        self.rank_table = self._table(torch.int32)

    def place(self, slot: int, slice_id: int, rank: int, scale: float | Sequence[float]) -> None:
        """Say that a slot adapts a slice; its A and B are in their places.

        Args:
            slot: 0 .. max_loras-1.
            slice_id: 0 .. num_slices-1.
            rank: the true rank.
            scale: the factor of the fold, or one per expert.

        Raises:
            RouteError: if the rank or the number of scales does not fit.
        """
        if not 1 <= rank <= self.max_rank:
            raise RouteError(f"rank must be 1 .. {self.max_rank}; given: {rank}")
        keys = self._keys(slot)
        if isinstance(scale, float):
            self.scale_table[slice_id, keys] = scale
        elif len(scale) != self.num_experts:
            raise RouteError(f"{self.num_experts} experts need as many scales; given: {len(scale)}")
        else:
            host = torch.tensor(scale, dtype=torch.float32)
            self.scale_table[slice_id, keys] = host.to(self.scale_table.device)
        self.rank_table[slice_id, keys] = rank
        self.a_table[slice_id, keys] = self._a_addresses[slice_id, keys]
        self.b_table[slice_id, keys] = self._b_addresses[slice_id, keys]

    def clear(self, slot: int) -> None:
        """Say that a slot adapts no slice of this layer."""
        keys = self._keys(slot)
        for table in (self.a_table, self.b_table, self.scale_table, self.rank_table):
            table[:, keys] = 0

    def _table(self, dtype: torch.dtype) -> Tensor:
        """Zeros, with every slice's row at a multiple of 16 bytes."""
        num_slices, num_keys = self._a_addresses.shape
        padded = (num_slices, -(-num_keys // 4) * 4)
        device = self._a_addresses.device
        return torch.zeros(padded, dtype=dtype, device=device)[:, :num_keys]

    def _keys(self, slot: int) -> slice:
        return slice(slot * self.num_experts, (slot + 1) * self.num_experts)


def _check(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    if not a or len(a) != len(b):
        raise RouteError(f"one B per A is needed; given: {len(a)} A, {len(b)} B")
    for name, tensors in (("A", a), ("B", b)):
        for t in tensors:
            shape = list(t.shape)
            if t.dtype != torch.bfloat16:
                raise RouteError(
                    f"lorafold applies adapters in bfloat16; the slots for {name} are {t.dtype}; "
                    "hint: serve the model in bfloat16, or set lora_dtype to bfloat16"
                )
            if t.dim() != 4 or t.stride()[2:] != (t.shape[3], 1):
                raise RouteError(
                    f"the slots for {name} must be 4-D with contiguous matrices; given: "
                    f"{shape}, strides {list(t.stride())}"
                )
            if t.data_ptr() % 16 or any(s * _BF16_BYTES % 16 for s in t.stride()[:2]):
                raise RouteError(
                    f"the slots for {name} must be multiples of 16 bytes apart; given: {shape}"
                )
    slots = {(*t.shape[:2], t.shape[2], t.shape[3]) for t in a}
    if len(slots) > 1 or any((*t.shape[:2], t.shape[3]) != (*a[0].shape[:3],) for t in b):
        raise RouteError(
            "slices must share slots, experts, rank and input; given: A "
            f"{[list(t.shape) for t in a]}, B {[list(t.shape) for t in b]}"
        )


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    """[num_slices, max_loras * num_experts] int64: where each matrix starts."""
    rows = []
    for t in tensors:
        slots = torch.arange(t.shape[0]).unsqueeze(1) * t.stride(0)
        experts = torch.arange(t.shape[1]) * t.stride(1)
        rows.append(t.data_ptr() + (slots + experts).flatten() * _BF16_BYTES)
    return torch.stack(rows).to(tensors[0].device)
