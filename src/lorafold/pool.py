"""The pool: all slots of all targets on one device, allocated once, at addresses that never change.

The tables say where an adapter's factors are: per target a row over the slots of A addresses, B
addresses, scales and ranks, updated in place, so that a captured CUDA graph reads what is placed
later. An empty slot is all zero. The pool does not read files and knows no model: it is given
shapes and adapters. What happens to a name and to a slot, and when, is in docs/lifecycle.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

import torch
from torch import Tensor

from lorafold.adapter import Adapter, ExpertShape, TargetShape
from lorafold.device import free_bytes
from lorafold.errors import BackendError, RouteError
from lorafold.expert_pool import ExpertPool
from lorafold.refusal import Refusal, listed, refuse
from lorafold.route import LoraRoute
from lorafold.slot_layout import TABLE_DTYPES, PackedAdapter, SlotLayout
from lorafold.slots import SlotLedger
from lorafold.transfer import Transfer

__all__ = ["Pool", "TargetShape", "pool_bytes"]

_BF16_BYTES = 2
_TABLE_BYTES = sum(dtype.itemsize for dtype in TABLE_DTYPES.values())


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
    slot_bytes = _BF16_BYTES * SlotLayout(targets, max_rank).num_elements
    return max_loras * (slot_bytes + _TABLE_BYTES * len(targets))


class Pool:
    """All slots of all targets. Methods may be called from several threads.

    A slot in use (`acquire`) is neither overwritten nor emptied: evicting or replacing its adapter
    takes the name away at once, and the slot is emptied when its last user releases it. While an
    adapter is copied into its slot, only what needs that very name waits.

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
        >>> from lorafold.adapter import LoraWeights
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
        self.experts = experts
        self._layout = SlotLayout(self.targets, max_rank)
        self._ledger = SlotLedger(max_loras)
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._memory, self._tables = self._allocate(torch.device(device))
        self.device = self._memory.device
        if experts and (experts.max_loras, experts.device) != (max_loras, self.device):
            raise RouteError(
                f"the experts have {experts.max_loras} slots on {experts.device}, the other "
                f"targets {max_loras} on {self.device}"
            )
        self._transfer = Transfer(self.device, max_loras)
        # Held while a slot is written, which the other lock is not.
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._routes = {target: self._build_route(target) for target in self.targets}

    def _allocate(self, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """The slots' memory [max_loras, slot elements], and the tables [targets, max_loras]."""
        free = free_bytes(device)
        figures = f"{self.nbytes} bytes for {self.max_loras} slots of max_rank {self.max_rank}"
        if self.experts:
            figures += f", beside {self.experts.nbytes} bytes for the experts"
        hint = "hint: lower max_loras or max_rank, or attach fewer targets"
        if free is not None and self.nbytes > free:
            raise BackendError(f"{device} has {free} bytes free, a pool needs {figures}; {hint}")
        shape = (len(self.targets), self.max_loras)
        size = (self.max_loras, self._layout.num_elements)
        try:
            memory = torch.zeros(size, dtype=torch.bfloat16, device=device)
            tables = {
                name: torch.zeros(shape, dtype=dtype, device=device)
                for name, dtype in TABLE_DTYPES.items()
            }
        except (RuntimeError, MemoryError) as error:
            message = f"{device} could not allocate {figures}; {hint} ({error})"
            raise BackendError(message) from error
        return memory, tables

    def _build_route(self, target: str) -> LoraRoute:
        shape, row = self.targets[target], self._layout.row(target)
        return LoraRoute(
            **{name: table[row] for name, table in self._tables.items()},
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

    @property
    def image_bytes(self) -> int:
        """Bytes of host memory that an adapter takes which `pack` has laid out, experts aside."""
        return self._layout.image_bytes(pinned=self._transfer.is_pinned)

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """The same adapter, laid out in host memory as in a slot of this pool.

        Placing it is then one copy; on CUDA from page-locked memory, at the speed of the bus. What
        is laid out so already is returned as it is.

        Raises:
            AdapterMismatchError: if a target, a shape or a rank does not fit the pool.
            BackendError: if the host has no such memory.
        """
        self.check(adapter)
        if isinstance(adapter, PackedAdapter) and adapter.layout == self._layout:
            return adapter
        try:
            return self._layout.pack(adapter, pinned=self._transfer.is_pinned)
        except (RuntimeError, MemoryError) as error:
            message = f"the host could not allocate {self.image_bytes} bytes for `{adapter.name}`"
            raise BackendError(f"{message} ({error})") from error

    def place(self, adapter: Adapter, *, acquire: bool = False) -> int:
        """Put an adapter into a slot, all of it or nothing.

        An adapter of the same name is replaced. If no slot is empty, the adapter that was not used
        for longest, is not pinned and not in use is evicted. The calling thread waits until the
        slot is written; threads that serve do not, and on CUDA their kernels run on beside it.

        Args:
            adapter: what to place; it is packed here unless `pack` has done so.
            acquire: also acquire the slot, before anything else can take it.

        Returns:
            The slot.

        Raises:
            AdapterMismatchError: if a target, a shape or a rank does not fit the pool.
            PoolFullError: if every slot is pinned or in use; the pool is then unchanged.
            RouteError: if the current stream is being captured in a CUDA graph.
            BackendError: if the host has no memory to pack it.
        """
        self._transfer.check()
        packed = self.pack(adapter)
        expert_image = None
        if self.experts and packed.experts:
            expert_image = self.experts.pack(packed.experts)
        with self._turn:
            try:
                with self._changed:
                    slot = self._ledger.begin(packed.name)
                self._write(slot, packed, expert_image)
                with self._changed:
                    self._clear(self._ledger.occupy(slot))
                    if acquire:
                        self._ledger.acquire(packed.name)
                    self._changed.notify_all()
            except BaseException:
                # A full pool, a failing device, or an interrupt, maybe before `slot` was assigned:
                # the ledger knows what was begun. What that slot held is gone.
                with self._changed:
                    begun = self._ledger.vacate(packed.name)
                    self._changed.notify_all()
                    with suppress(Exception):
                        self._clear(begun)
                raise
            return slot

    def evict(self, name: str) -> None:
        """Take an adapter away, pinned or not; if it is in use, its last user empties the slot.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        self._transfer.check()
        with self._settled(name):
            self._clear(self._ledger.retire(name))

    def acquire(self, name: str) -> int:
        """The slot of an adapter, kept as it is until it is released.

        A CUDA graph or a plan that reads the slot is launched, or made, after this.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._settled(name):
            return self._ledger.acquire(name)

    def release(self, slot: int) -> None:
        """Give back what `acquire` returned.

        On CUDA, what the current stream holds may still read the slot: it is not overwritten
        before. Work of other streams must be finished, or waited for by the current one.

        Raises:
            RouteError: if the slot is not in use.
        """
        self._transfer.check()
        with self._changed:
            emptied = self._ledger.release(slot)
            self._transfer.note_use(slot)
            self._clear(emptied)

    def pin(self, name: str) -> None:
        """Keep an adapter from being evicted to make room.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._settled(name):
            self._ledger.pin(name, is_pinned=True)

    def unpin(self, name: str) -> None:
        """Allow an adapter to be evicted to make room.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._settled(name):
            self._ledger.pin(name, is_pinned=False)

    def slot(self, name: str) -> int:
        """The slot of an adapter; it may change as soon as another thread places one (`acquire`).

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._settled(name):
            return self._ledger.slot(name)

    def names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of their slots."""
        with self._changed:
            return self._ledger.names()

    def generation(self, name: str) -> int:
        """The number of an adapter's placement, which no other placement in this pool shares.

        What is computed with one generation of a name must not be reused for another.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        with self._settled(name):
            return self._ledger.generation(name)

    def generation_in(self, slot: int) -> int:
        """The generation of what a slot holds; while the slot is in use it stays the same.

        Raises:
            RouteError: if the slot holds no adapter.
        """
        with self._changed:
            return self._ledger.generation_in(slot)

    @contextmanager
    def _settled(self, name: str) -> Iterator[None]:
        """Hold the lock at a time when the adapter of this name is not just being written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._ledger.is_arriving(name))
            yield

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
                    f"hint: attach with max_rank {adapter.rank}"
                )
                raise refuse(Refusal.RANK_ABOVE_MAX, message, adapter=adapter.name)

    def _write(self, slot: int, packed: PackedAdapter, expert_image: Tensor | None) -> None:
        """Copy a packed adapter into a slot. The only place that changes what kernels read.

        The tables are zeroed first and written last: rows that come here meanwhile find nothing.
        """
        with self._transfer.writing(slot):
            for table in self._tables.values():
                table[:, slot] = 0
            self._memory[slot].copy_(packed.image, non_blocking=True)
            # Made while the copy is on its way.
            columns = self._layout.columns(
                packed.weights, self._memory[slot].data_ptr(), pinned=self._transfer.is_pinned
            )
            for name, table in self._tables.items():
                table[:, slot] = columns[name].to(self.device, non_blocking=True)
            if self.experts:
                self.experts.write(slot, packed.experts, expert_image)
        # The host memory must outlive the copies, and the name come after them.
        self._transfer.finish()

    def _clear(self, slot: int | None) -> None:
        """Zero a slot that has become empty, if one has."""
        if slot is not None:
            with self._transfer.emptying(slot):
                for table in self._tables.values():
                    table[:, slot] = 0
                self._memory[slot].zero_()
                if self.experts:
                    self.experts.write(slot, {})
