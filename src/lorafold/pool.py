"""The pool: all slots of all targets on one device, allocated once, at addresses that never change.

    slot k, target t:   A [max_rank, in], then B [out, max_rank], each from a multiple of 16 bytes

The tables say where: per target a row over the slots of A addresses, B addresses, scales and ranks,
updated in place, so that a captured CUDA graph reads what is placed later. An empty slot is all
zero. The pool does not read files and knows no model: it is given shapes and adapters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lorafold.adapter import Adapter, ExpertShape, LoraWeights, TargetShape
from lorafold.device_memory import free_bytes
from lorafold.errors import BackendError, RouteError
from lorafold.expert_pool import ExpertPool
from lorafold.refusal import Refusal, listed, refuse
from lorafold.route import LoraRoute
from lorafold.slots import SlotLedger

__all__ = ["Pool", "TargetShape", "pool_bytes"]

_ALIGN = 8  # elements of bfloat16 in 16 bytes
_TABLE_BYTES = 8 + 8 + 4 + 4


@dataclass(frozen=True)
class _Region:
    """Where a target's A and B begin inside a slot, in elements."""

    row: int
    a_start: int
    b_start: int


def _layout(targets: Mapping[str, TargetShape], max_rank: int) -> tuple[dict[str, _Region], int]:
    """The regions of a slot, and its length in elements."""
    regions: dict[str, _Region] = {}
    end = 0

    def reserve(num_elements: int) -> int:
        nonlocal end
        start = end
        end += -(-num_elements // _ALIGN) * _ALIGN
        return start

    for row, (target, shape) in enumerate(targets.items()):
        a_start = reserve(max_rank * shape.in_features)
        regions[target] = _Region(row, a_start, reserve(shape.out_features * max_rank))
    return regions, end


def pool_bytes(targets: Mapping[str, TargetShape], max_loras: int, max_rank: int) -> int:
    """Bytes that a pool takes on its device, tables included; nothing is allocated.

    Args:
        targets: per path, the shape.
        max_loras: number of slots.
        max_rank: the largest rank that fits.

    Raises:
        RouteError: if there is no target, or a size is below 1.

    Example:
        >>> pool_bytes({"lm_head": TargetShape(64, 32)}, max_loras=2, max_rank=8)
        3120
    """
    sizes = [max_loras, max_rank]
    sizes += [n for s in targets.values() for n in (s.in_features, s.out_features)]
    if not targets or min(sizes) < 1:
        raise RouteError(
            "a pool needs at least one target, and max_loras, max_rank and all features at least "
            f"1; given: {len(targets)} targets, max_loras {max_loras}, max_rank {max_rank}, least "
            f"size {min(sizes)}"
        )
    _, num_elements = _layout(targets, max_rank)
    return max_loras * (2 * num_elements + _TABLE_BYTES * len(targets))


class Pool:
    """All slots of all targets. Methods may be called from several threads.

    A slot in use (`acquire`) is neither overwritten nor emptied: evicting or replacing its adapter
    takes the name away at once, and the slot is emptied when its last user releases it.

    Args:
        targets: per path in the model, the shape.
        max_loras: number of slots.
        max_rank: the largest rank that fits; smaller ones are padded with zeros.
        device: where the slots are.
        experts: the part of the same slots that holds routed experts; None where there is none.

    Attributes:
        max_loras: as given.
        max_rank: as given.
        device: the device.
        targets: as given, read-only.
        experts: as given.
        nbytes: bytes on the device without those of the experts, as `pool_bytes` says.

    Raises:
        RouteError: if there is no target, a size is below 1, or `experts` has other slots.
        BackendError: if the device cannot hold the pool.

    Example:
        >>> a, b = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
        >>> adapter = Adapter("sql", {"lm_head": LoraWeights(a, b, scale=2.0)})
        >>> pool = Pool({"lm_head": TargetShape(16, 8)}, max_loras=2, max_rank=8)
        >>> pool.place(adapter), pool.names()
        (0, ('sql',))
        >>> pool.route("lm_head").rank_table.tolist()
        [4, 0]
    """

    def __init__(
        self,
        targets: Mapping[str, TargetShape],
        *,
        max_loras: int,
        max_rank: int,
        device: torch.device | str = "cpu",
        experts: ExpertPool | None = None,
    ) -> None:
        self.targets: Mapping[str, TargetShape] = MappingProxyType(dict(targets))
        self.nbytes = pool_bytes(self.targets, max_loras, max_rank)
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._regions, self._slot_elements = _layout(self.targets, max_rank)
        self._lock = threading.RLock()
        self._ledger = SlotLedger(max_loras)
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._memory, self._tables = self._allocate(torch.device(device))
        self.device = self._memory.device
        self.experts = experts
        if experts and (experts.max_loras, experts.device) != (max_loras, self.device):
            raise RouteError(
                f"the experts have {experts.max_loras} slots on {experts.device}, the other "
                f"targets {max_loras} on {self.device}"
            )
        self._routes = {target: self._build_route(target) for target in self.targets}

    def _allocate(self, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """The slots' memory [max_loras, slot elements], and the tables [targets, max_loras]."""
        free = free_bytes(device)
        figures = f"{self.nbytes} bytes for {self.max_loras} slots of max_rank {self.max_rank}"
        hint = "hint: lower max_loras or max_rank, or attach fewer targets"
        if free is not None and self.nbytes > free:
            raise BackendError(f"{device} has {free} bytes free, a pool needs {figures}; {hint}")
        shape = (len(self.targets), self.max_loras)
        try:
            memory = torch.zeros(
                self.max_loras, self._slot_elements, dtype=torch.bfloat16, device=device
            )
            tables = {
                "a_table": torch.zeros(shape, dtype=torch.int64, device=device),
                "b_table": torch.zeros(shape, dtype=torch.int64, device=device),
                "scale_table": torch.zeros(shape, dtype=torch.float32, device=device),
                "rank_table": torch.zeros(shape, dtype=torch.int32, device=device),
            }
        except (RuntimeError, MemoryError) as error:
            message = f"{device} could not allocate {figures}; {hint} ({error})"
            raise BackendError(message) from error
        return memory, tables

    def _build_route(self, target: str) -> LoraRoute:
        shape, row = self.targets[target], self._regions[target].row
        return LoraRoute(
            a_table=self._tables["a_table"][row],
            b_table=self._tables["b_table"][row],
            scale_table=self._tables["scale_table"][row],
            rank_table=self._tables["rank_table"][row],
            k_in=shape.in_features,
            n_out=shape.out_features,
            max_rank=self.max_rank,
            storage=(self._memory,),
        )

    def route(self, target: str) -> LoraRoute:
        """The tables of a target: the same object, at the same addresses, for the pool's life.

        Raises:
            RouteError: if the pool has no such target.
        """
        if target not in self._routes:
            few = listed(self.targets, limit=3)
            raise RouteError(f"the pool has no target `{target}`; its targets are {few}")
        return self._routes[target]

    @property
    def shapes(self) -> Mapping[str, TargetShape | ExpertShape]:
        """The shapes of all targets: `targets`, and the experts modules."""
        return {**self.targets, **(self.experts.shapes if self.experts else {})}

    def place(self, adapter: Adapter) -> int:
        """Put an adapter into a slot, all of it or nothing.

        An adapter of the same name is replaced. If no slot is empty, the adapter that was not used
        for longest, is not pinned and not in use is evicted.

        Returns:
            The slot.

        Raises:
            AdapterMismatchError: if a target, a shape or a rank does not fit the pool.
            PoolFullError: if every slot is pinned or in use; the pool is then unchanged.
        """
        self.check(adapter)
        image = self._pack(adapter)
        with self._lock:
            slot = self._ledger.choose(adapter.name)
            try:
                self._write(slot, image, adapter.weights)
                if self.experts:
                    self.experts.write(slot, adapter.experts)
            except BaseException:
                # Only a failing device gets here; what the slot held is gone then.
                self._ledger.vacate(slot)
                raise
            self._ledger.occupy(slot, adapter.name)
            return slot

    def evict(self, name: str) -> None:
        """Take an adapter away, pinned or not; if it is in use, its last user empties the slot.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._lock:
            self._clear(self._ledger.retire(name))

    def acquire(self, name: str) -> int:
        """The slot of an adapter, kept as it is until it is released.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._lock:
            return self._ledger.acquire(name)

    def release(self, slot: int) -> None:
        """Give back what `acquire` returned.

        Raises:
            RouteError: if the slot is not in use.
        """
        with self._lock:
            self._clear(self._ledger.release(slot))

    def pin(self, name: str) -> None:
        """Keep an adapter from being evicted to make room.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._lock:
            self._ledger.pin(name, is_pinned=True)

    def unpin(self, name: str) -> None:
        """Allow an adapter to be evicted to make room.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._lock:
            self._ledger.pin(name, is_pinned=False)

    def slot(self, name: str) -> int:
        """The slot of an adapter; it may change as soon as another thread places one (`acquire`).

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._lock:
            return self._ledger.slot(name)

    def names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of their slots."""
        with self._lock:
            return self._ledger.names()

    def generation(self, name: str) -> int:
        """The number of an adapter's placement, which no other placement in this pool shares.

        What is computed with one generation of a name must not be reused for another.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._lock:
            return self._ledger.generation(name)

    def check(self, adapter: Adapter) -> None:
        """Refuse an adapter of which any part does not fit, as `place` does, and change nothing.

        Raises:
            AdapterMismatchError: if a target, a shape or a rank does not fit the pool.
        """
        unknown = [target for target in adapter.weights if target not in self.targets]
        if self.experts:
            self.experts.check(adapter)
        else:
            unknown += list(adapter.experts)
        if unknown:
            message = f"the pool has no target {listed(unknown)}"
            raise refuse(Refusal.UNMATCHED_PATH, message, adapter=adapter.name)
        for target, weights in adapter.weights.items():
            given = TargetShape(weights.in_features, weights.out_features)
            if given != self.targets[target]:
                message = f"`{target}` is {self.targets[target]} in the pool; given: {given}"
                raise refuse(Refusal.SHAPE_MISMATCH, message, adapter=adapter.name)
            if weights.rank > self.max_rank:
                message = (
                    f"`{target}` has rank {weights.rank}; the pool's max_rank is {self.max_rank}; "
                    f"hint: attach with max_rank={adapter.rank}"
                )
                raise refuse(Refusal.RANK_ABOVE_MAX, message, adapter=adapter.name)

    def _pack(self, adapter: Adapter) -> Tensor:
        """The content of a slot [slot elements] bfloat16, on the host: zeros around the factors."""
        image = self._blank()
        for target, weights in adapter.weights.items():
            region, shape = self._regions[target], self.targets[target]
            num_a = weights.rank * shape.in_features
            image[region.a_start : region.a_start + num_a] = weights.a.reshape(-1)
            num_b = shape.out_features * self.max_rank
            b = image[region.b_start : region.b_start + num_b].view(-1, self.max_rank)
            b[:, : weights.rank] = weights.b
        return image

    def _blank(self) -> Tensor:
        return torch.zeros(self._slot_elements, dtype=torch.bfloat16, device="cpu")

    def _write(self, slot: int, image: Tensor, weights: Mapping[str, LoraWeights]) -> None:
        """Copy a packed slot to the device. The only place that changes what kernels read.

        The tables are zeroed first and written last: rows that come here meanwhile find nothing.
        """
        base = self._memory[slot].data_ptr()
        columns = {
            name: torch.zeros(len(self.targets), dtype=table.dtype, device="cpu")
            for name, table in self._tables.items()
        }
        for target, factors in weights.items():
            region = self._regions[target]
            columns["a_table"][region.row] = base + 2 * region.a_start
            columns["b_table"][region.row] = base + 2 * region.b_start
            columns["scale_table"][region.row] = factors.scale
            columns["rank_table"][region.row] = factors.rank
        for table in self._tables.values():
            table[:, slot] = 0
        self._memory[slot].copy_(image)
        for name, table in self._tables.items():
            table[:, slot] = columns[name].to(self.device)

    def _clear(self, slot: int | None) -> None:
        """Zero a slot that has become empty."""
        if slot is not None:
            self._write(slot, self._blank(), {})
            if self.experts:
                self.experts.write(slot, {})
