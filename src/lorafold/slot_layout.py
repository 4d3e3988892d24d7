"""What a slot looks like: where each target's A and B are, and an adapter's factors laid out so.

    target by target:   A [max_rank, in], then B [out, max_rank], each from a multiple of 16 bytes

Nothing here knows devices or slots: `lorafold.pool` copies an image into a slot, whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafold.adapter import Adapter, LoraWeights, TargetShape

__all__ = ["TABLE_DTYPES", "PackedAdapter", "SlotLayout"]

TABLE_DTYPES = {
    "a_table": torch.int64,
    "b_table": torch.int64,
    "scale_table": torch.float32,
    "rank_table": torch.int32,
}
"""The tables over slots that each target has."""

_ALIGN = 8  # elements of bfloat16 in 16 bytes
_BF16_BYTES = 2


@dataclass(frozen=True)
class _Region:
    """Where a target's A and B begin inside a slot, in elements, and its row in the tables."""

    row: int
    a_start: int
    b_start: int


@dataclass(frozen=True)
class SlotLayout:
    """Where the factors of each target are inside a slot. Equal sizes give equal layouts.

    Args:
        targets: per path, the shape.
        max_rank: rows of every A and columns of every B; smaller ranks are padded with zeros.

    Attributes:
        num_elements: bfloat16 elements of a slot.

    Example:
        >>> SlotLayout({"lm_head": TargetShape(64, 32)}, max_rank=8).num_elements
        768
    """

    targets: Mapping[str, TargetShape]
    max_rank: int
    num_elements: int = field(init=False, compare=False)
    _regions: dict[str, _Region] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        regions: dict[str, _Region] = {}
        end = 0

        def reserve(num_elements: int) -> int:
            nonlocal end
            start = end
            end += -(-num_elements // _ALIGN) * _ALIGN
            return start

        for row, (target, shape) in enumerate(self.targets.items()):
            a_start = reserve(self.max_rank * shape.in_features)
            b_start = reserve(shape.out_features * self.max_rank)
            regions[target] = _Region(row, a_start, b_start)
        object.__setattr__(self, "_regions", regions)
        object.__setattr__(self, "num_elements", end)

    def row(self, target: str) -> int:
        """The row of a target in the tables."""
        return self._regions[target].row

    def image_bytes(self, *, pinned: bool) -> int:
        """Bytes of host memory that an image takes.

        PyTorch takes page-locked memory in powers of two.
        """
        num_bytes = _BF16_BYTES * self.num_elements
        return 1 << (num_bytes - 1).bit_length() if pinned else num_bytes

    def pack(self, adapter: Adapter, *, pinned: bool) -> PackedAdapter:
        """Lay an adapter's linear factors out as in a slot: zeros around them.

        Args:
            adapter: must fit the layout (`Pool.check`).
            pinned: use page-locked memory, from which copies run beside the host.
        """
        image = torch.zeros(
            self.num_elements, dtype=torch.bfloat16, device="cpu", pin_memory=pinned
        )
        weights: dict[str, LoraWeights] = {}
        for target, given in adapter.weights.items():
            a, b = self._factors(image, target)
            a[: given.rank] = given.a
            b[:, : given.rank] = given.b
            weights[target] = LoraWeights(a[: given.rank], b[:, : given.rank], given.scale)
        return PackedAdapter(
            adapter.name,
            weights,
            adapter.experts,
            source=adapter.source,
            base_model=adapter.base_model,
            report=adapter.report,
            image=image,
            layout=self,
        )

    def _factors(self, image: Tensor, target: str) -> tuple[Tensor, Tensor]:
        """A [max_rank, in] and B [out, max_rank] of a target, as views of an image."""
        shape, region = self.targets[target], self._regions[target]
        size_a = self.max_rank * shape.in_features
        size_b = shape.out_features * self.max_rank
        a = image[region.a_start : region.a_start + size_a].view(self.max_rank, -1)
        b = image[region.b_start : region.b_start + size_b].view(-1, self.max_rank)
        return a, b

    def columns(
        self, weights: Mapping[str, LoraWeights], address: int, *, pinned: bool
    ) -> dict[str, Tensor]:
        """What the tables say of a slot: per table one entry per target, on the host.

        Args:
            weights: the factors in the slot.
            address: where the slot begins on its device.
            pinned: use page-locked memory.
        """
        # Lists first: an element of a tensor takes a microsecond.
        entries: dict[str, list[float]] = {name: [0] * len(self.targets) for name in TABLE_DTYPES}
        for target, factors in weights.items():
            region = self._regions[target]
            entries["a_table"][region.row] = address + _BF16_BYTES * region.a_start
            entries["b_table"][region.row] = address + _BF16_BYTES * region.b_start
            entries["scale_table"][region.row] = factors.scale
            entries["rank_table"][region.row] = factors.rank
        return {
            name: torch.tensor(entries[name], dtype=dtype, device="cpu", pin_memory=pinned)
            for name, dtype in TABLE_DTYPES.items()
        }


@dataclass(frozen=True, eq=False)
class PackedAdapter(Adapter):
    """An adapter whose linear factors lie in host memory as in a slot: placing it is one copy.

    `Pool.pack` makes it. The factors in `weights` are views of the image; those of experts stay
    apart, and are laid out when the adapter is placed.

    Args:
        image: [slot elements] bfloat16.
        layout: the layout of the image.

    Example:
        >>> a, b = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
        >>> adapter = Adapter("sql", {"lm_head": LoraWeights(a, b, scale=2.0)})
        >>> layout = SlotLayout({"lm_head": TargetShape(16, 8)}, max_rank=8)
        >>> packed = layout.pack(adapter, pinned=False)
        >>> adapter.nbytes, packed.nbytes, packed.rank
        (192, 384, 4)
    """

    image: Tensor = field(kw_only=True, repr=False)
    layout: SlotLayout = field(kw_only=True, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that the adapter takes."""
        return self.expert_bytes + self.layout.image_bytes(pinned=self.image.is_pinned())
