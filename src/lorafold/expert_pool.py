"""The experts' part of a pool: per slot and expert A and B of gate, up and down, at one address.

    slot k, experts module m, slice s:   A [experts, max_rank, in], then B [experts, out, max_rank]

Gate and up are two slices with an A, a B and a scale each, whatever a file has: factors that a file
gives apart go where they belong, with their own rank; where gate and up share an A, it stands in
both slices and the rows of B are divided. Either way a row's dot products are those of the file's
own factors, and the slices are contiguous halves also where the base interleaves its outputs.
`Pool` decides which adapter is in which slot; nothing here knows names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lorafold.adapter import Adapter, ExpertLora, ExpertShape, ExpertWeights, Kind
from lorafold.device import free_bytes
from lorafold.errors import BackendError, RouteError
from lorafold.expert_route import MoeExpertRoute
from lorafold.refusal import Refusal, listed, refuse

__all__ = ["ExpertPool", "ExpertRoutes", "Slice", "expert_pool_bytes", "expert_slices"]

Slice = Literal["gate", "up", "down"]
"""A part of an expert's product that has an A, a B and a scale of its own."""

_SLICES: tuple[Slice, ...] = ("gate", "up", "down")
_ALIGN = 8  # elements of bfloat16 in 16 bytes
_BF16_BYTES = 2
_TABLE_BYTES = 8 + 8 + 4 + 4


@dataclass(frozen=True, eq=False)
class ExpertRoutes:
    """The tables of one experts module over keys slot * num_experts + expert.

    Example:
        >>> shapes = {"mlp.experts": ExpertShape(num_experts=4, hidden=16, inner=8)}
        >>> routes = ExpertPool(shapes, max_loras=2, max_rank=4).routes("mlp.experts")
        >>> (routes.gate.k_in, routes.gate.n_out), (routes.down.k_in, routes.down.n_out)
        ((16, 8), (8, 16))
    """

    gate: MoeExpertRoute
    up: MoeExpertRoute
    down: MoeExpertRoute


def expert_slices(
    lora: ExpertLora, shape: ExpertShape
) -> dict[Slice, tuple[Tensor, Tensor, float]]:
    """What an adapter changes in the experts of one layer, by slice.

    Args:
        lora: the adapter's factors for the layer.
        shape: the shape of the layer's experts.

    Returns:
        Per changed slice A [experts, rank, in], B [experts, out, rank] (views) and the scale.

    Example:
        >>> a = torch.ones(2, 5, 16, dtype=torch.bfloat16)
        >>> b = torch.ones(2, 24, 5, dtype=torch.bfloat16)
        >>> lora = ExpertLora(gate_up=ExpertWeights(a, b, 2.0, gate_rank=2))
        >>> slices = expert_slices(lora, ExpertShape(num_experts=2, hidden=16, inner=12))
        >>> {name: (tuple(a.shape), tuple(b.shape)) for name, (a, b, _) in slices.items()}
        {'gate': ((2, 2, 16), (2, 12, 2)), 'up': ((2, 3, 16), (2, 12, 3))}
    """
    slices: dict[Slice, tuple[Tensor, Tensor, float]] = {}
    if lora.gate_up is not None:
        a, b, scale = lora.gate_up.a, lora.gate_up.b, lora.gate_up.scale
        cut = lora.gate_up.gate_rank
        gate, up = b[:, : shape.inner], b[:, shape.inner :]
        if shape.interleaved:
            gate, up = b[:, 0::2], b[:, 1::2]
        if cut is None:
            slices = {"gate": (a, gate, scale), "up": (a, up, scale)}
        else:
            slices = {
                "gate": (a[:, :cut], gate[:, :, :cut], scale),
                "up": (a[:, cut:], up[:, :, cut:], scale),
            }
    if lora.down is not None:
        slices["down"] = (lora.down.a, lora.down.b, lora.down.scale)
    return {name: part for name, part in slices.items() if part[0].shape[1]}


@dataclass(frozen=True)
class _Block:
    """One factor of all experts: where it is in a slot, in elements, and its rows and columns."""

    start: int
    num_experts: int
    rows: int
    columns: int

    @property
    def stride(self) -> int:
        """From one expert's factor to the next: each begins at a multiple of 16 bytes."""
        return -(-self.rows * self.columns // _ALIGN) * _ALIGN

    @property
    def end(self) -> int:
        return self.start + self.num_experts * self.stride

    def of(self, slot: Tensor) -> Tensor:
        """The factors in a slot's memory, [num_experts, rows, columns]."""
        whole = slot[self.start : self.end].view(self.num_experts, self.stride)
        size = (self.num_experts, self.rows, self.columns)
        return whole.as_strided(size, (self.stride, self.columns, 1))

    def addresses(self, slot: Tensor) -> Tensor:
        """Where each expert's factor begins, [num_experts] int64 on the CPU."""
        expert = torch.arange(self.num_experts, device="cpu")
        return slot.data_ptr() + _BF16_BYTES * (self.start + expert * self.stride)


@dataclass(frozen=True)
class _Region:
    """One slice of the experts of one layer: its factors, and its entries in the tables."""

    a: _Block
    b: _Block
    table_start: int  # the entry of slot 0, expert 0
    column_start: int  # the same, among the entries of one slot

    @property
    def num_experts(self) -> int:
        return self.a.num_experts


def _regions(
    shapes: Mapping[str, ExpertShape], max_loras: int, max_rank: int
) -> dict[tuple[str, Slice], _Region]:
    regions: dict[tuple[str, Slice], _Region] = {}
    end = column = 0
    for module, shape in shapes.items():
        for name in _SLICES:
            k_in, n_out = shape.hidden, shape.inner
            if name == "down":
                k_in, n_out = n_out, k_in
            a = _Block(end, shape.num_experts, max_rank, k_in)
            b = _Block(a.end, shape.num_experts, n_out, max_rank)
            regions[module, name] = _Region(a, b, column * max_loras, column)
            end, column = b.end, column + shape.num_experts
    return regions


def _sizes(regions: Mapping[tuple[str, Slice], _Region]) -> tuple[int, int]:
    """(elements of a slot, table entries of a slot)."""
    last = list(regions.values())[-1]
    return last.b.end, last.column_start + last.num_experts


def expert_pool_bytes(shapes: Mapping[str, ExpertShape], max_loras: int, max_rank: int) -> int:
    """Bytes that the experts of a pool take on its device, tables included; nothing is allocated.

    Args:
        shapes: per experts module, the shape.
        max_loras: number of slots.
        max_rank: the largest rank of a slice that fits.

    Raises:
        RouteError: if there is no experts module, or a size is below 1.

    Example:
        >>> qwen3_30b = {f"layers.{i}.mlp.experts": ExpertShape(128, 2048, 768) for i in range(48)}
        >>> f"{expert_pool_bytes(qwen3_30b, max_loras=4, max_rank=16) / 1e9:.1f} GB"
        '6.6 GB'
    """
    sizes = [max_loras, max_rank]
    sizes += [n for s in shapes.values() for n in (s.num_experts, s.hidden, s.inner)]
    if not shapes or min(sizes) < 1:
        raise RouteError(
            "experts in a pool need at least one module, and max_loras, max_rank and all sizes at "
            f"least 1; given: {len(shapes)} modules, max_loras {max_loras}, max_rank {max_rank}, "
            f"least size {min(sizes)}"
        )
    elements, entries = _sizes(_regions(shapes, max_loras, max_rank))
    return max_loras * (_BF16_BYTES * elements + _TABLE_BYTES * entries)


class ExpertPool:
    """The factors of routed experts for every slot of a pool; all of it is allocated here.

    Args:
        shapes: per experts module in the model, the shape.
        max_loras: number of slots.
        max_rank: the largest rank of a slice that fits; smaller ones are padded with zeros.
        device: where the slots are.
        max_bytes: refuse to allocate more; None for as much as the device has free.

    Attributes:
        shapes: as given, read-only.
        max_loras: as given.
        max_rank: as given.
        device: the device.
        nbytes: bytes on the device, as `expert_pool_bytes` says.

    Raises:
        RouteError: if there is no module, or a size is below 1.
        BackendError: if it would take more than max_bytes or than the device has; the message says
            how much.

    Example:
        >>> shapes = {"mlp.experts": ExpertShape(num_experts=4, hidden=16, inner=8)}
        >>> pool = ExpertPool(shapes, max_loras=2, max_rank=4)
        >>> pool.routes("mlp.experts").down.num_keys, pool.nbytes
        (8, 5184)
    """

    def __init__(
        self,
        shapes: Mapping[str, ExpertShape],
        *,
        max_loras: int,
        max_rank: int,
        device: torch.device | str = "cpu",
        max_bytes: int | None = None,
    ) -> None:
        self.shapes: Mapping[str, ExpertShape] = MappingProxyType(dict(shapes))
        self.nbytes = expert_pool_bytes(self.shapes, max_loras, max_rank)
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._regions = _regions(self.shapes, max_loras, max_rank)
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._memory, self._tables = self._allocate(torch.device(device), max_bytes)
        self.device = self._memory.device
        # The entries of slot 0, and how far those of the next slot are.
        firsts: list[int] = []
        strides: list[int] = []
        for at in self._regions.values():
            firsts += range(at.table_start, at.table_start + at.num_experts)
            strides += [at.num_experts] * at.num_experts
        self._firsts, self._strides = (
            torch.tensor(values, device=self.device) for values in (firsts, strides)
        )
        self._routes = {module: self._build_routes(module) for module in self.shapes}

    def _allocate(
        self, device: torch.device, max_bytes: int | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The memory of all slots [max_loras, slot elements], and the four tables."""
        figures = (
            f"{self.nbytes} bytes ({self.nbytes / 2**30:.2f} GiB) for the experts of "
            f"{len(self.shapes)} layers in {self.max_loras} slots of max_rank {self.max_rank}"
        )
        hint = "hint: lower max_loras or max_expert_rank"
        if max_bytes is not None and self.nbytes > max_bytes:
            raise BackendError(f"{max_bytes} bytes are allowed, and a pool needs {figures}; {hint}")
        free = free_bytes(device)
        if free is not None and self.nbytes > free:
            raise BackendError(
                f"{device} has {free} bytes free, and a pool needs {figures}; {hint}"
            )
        elements, entries = _sizes(self._regions)
        dtypes = {
            "a_table": torch.int64,
            "b_table": torch.int64,
            "scale_table": torch.float32,
            "rank_table": torch.int32,
        }
        try:
            memory = torch.zeros(self.max_loras, elements, dtype=torch.bfloat16, device=device)
            tables = {
                name: torch.zeros(self.max_loras * entries, dtype=dtype, device=device)
                for name, dtype in dtypes.items()
            }
        except (RuntimeError, MemoryError) as error:
            raise BackendError(
                f"{device} could not allocate {figures}; {hint} ({error})"
            ) from error
        return memory, tables

    def _build_routes(self, module: str) -> ExpertRoutes:
        def route(name: Slice) -> MoeExpertRoute:
            at = self._regions[module, name]
            entries = slice(at.table_start, at.table_start + self.max_loras * at.num_experts)
            return MoeExpertRoute(
                a_table=self._tables["a_table"][entries],
                b_table=self._tables["b_table"][entries],
                scale_table=self._tables["scale_table"][entries],
                rank_table=self._tables["rank_table"][entries],
                num_experts=at.num_experts,
                k_in=at.a.columns,
                n_out=at.b.rows,
                max_rank=self.max_rank,
                storage=(self._memory,),
            )

        return ExpertRoutes(route("gate"), route("up"), route("down"))

    def routes(self, module: str) -> ExpertRoutes:
        """The tables of an experts module: the same objects, at the same addresses, for ever.

        Raises:
            RouteError: if the pool has no such module.
        """
        if module not in self._routes:
            few = listed(self.shapes, limit=3)
            raise RouteError(f"the pool has no experts `{module}`; its experts are {few}")
        return self._routes[module]

    def check(self, adapter: Adapter) -> None:
        """Refuse an adapter of which any expert part does not fit.

        Raises:
            AdapterMismatchError: if a module, a shape or a rank does not fit.
        """
        unknown = [module for module in adapter.experts if module not in self.shapes]
        if unknown:
            message = f"the pool has no experts {listed(unknown)}"
            raise refuse(Refusal.UNMATCHED_PATH, message, adapter=adapter.name)
        for module, lora in adapter.experts.items():
            shape = self.shapes[module]
            parts: tuple[tuple[Kind, ExpertWeights | None], ...] = (
                ("experts.gate_up", lora.gate_up),
                ("experts.down", lora.down),
            )
            for kind, part in parts:
                if part is None:
                    continue
                sizes = (part.num_experts, part.in_features, part.out_features)
                if sizes != (shape.num_experts, *shape.features(kind)):
                    message = f"`{module}` is {shape} in the pool; {kind} is given with {sizes}"
                    raise refuse(Refusal.SHAPE_MISMATCH, message, adapter=adapter.name)
            ranks = [a.shape[1] for a, _, _ in expert_slices(lora, shape).values()]
            if max(ranks, default=0) > self.max_rank:
                message = (
                    f"`{module}` has rank {max(ranks)}; experts in the pool have at most "
                    f"{self.max_rank}; hint: attach with max_expert_rank {max(ranks)}"
                )
                raise refuse(Refusal.RANK_ABOVE_MAX, message, adapter=adapter.name)

    def pack(self, experts: Mapping[str, ExpertLora]) -> Tensor:
        """The content of a slot [slot elements] bfloat16 on the host; on CUDA page-locked.

        Args:
            experts: per experts module, the factors; they must have passed `check`.
        """
        elements, _ = _sizes(self._regions)
        pinned = self.device.type == "cuda"
        image = torch.zeros(elements, dtype=torch.bfloat16, device="cpu", pin_memory=pinned)
        for module, lora in experts.items():
            for part, (a, b, _) in expert_slices(lora, self.shapes[module]).items():
                at, rank = self._regions[module, part], a.shape[1]
                at.a.of(image)[:, :rank] = a
                at.b.of(image)[:, :, :rank] = b
        return image

    def write(
        self, slot: int, experts: Mapping[str, ExpertLora], image: Tensor | None = None
    ) -> None:
        """Make a slot hold these factors and nothing else; `{}` empties it.

        The tables are zeroed first and written last: rows that are routed here meanwhile find
        nothing. What is given must have passed `check`.

        Args:
            slot: which one.
            experts: per experts module, the factors.
            image: what `pack` has made of them; None does so here.
        """
        memory = self._memory[slot]
        entries = self._firsts + slot * self._strides
        for table in self._tables.values():
            table.index_fill_(0, entries, 0)
        if not experts:
            memory.zero_()
            return
        memory.copy_(self.pack(experts) if image is None else image, non_blocking=True)
        columns = {
            name: torch.zeros(len(self._firsts), dtype=table.dtype, device="cpu")
            for name, table in self._tables.items()
        }
        for module, lora in experts.items():
            for part, (a, _, scale) in expert_slices(lora, self.shapes[module]).items():
                at = self._regions[module, part]
                own = slice(at.column_start, at.column_start + at.num_experts)
                columns["a_table"][own] = at.a.addresses(memory)
                columns["b_table"][own] = at.b.addresses(memory)
                columns["scale_table"][own] = scale
                columns["rank_table"][own] = a.shape[1]
        for name, table in self._tables.items():
            table.index_copy_(0, entries, columns[name].to(self.device))
