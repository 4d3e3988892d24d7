"""Where a row finds its adapter: one pair of matrices, and the tables over slots.

Tensors only: nothing here knows adapters, names or models. All addresses are fixed when a route is
built; what changes per step is the contents of `seq_slot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from lorafold.errors import RouteError

__all__ = ["LoraAttnWeights", "LoraFfnWeights", "LoraPair", "LoraRoute"]


@dataclass(frozen=True, eq=False)
class LoraPair:
    """One target's A and B of one adapter.

    Args:
        a: [max_rank, k_in] bfloat16, contiguous: A in the first `rank` rows.
        b: [n_out, max_rank] bfloat16, contiguous: B in the first `rank` columns.
        scale: the factor of the fold, applied in fp32 after the delta is rounded.
        rank: the true rank; None means max_rank.

    Raises:
        RouteError: if the tensors do not fit together.

    Example:
        >>> a = torch.zeros(8, 32, dtype=torch.bfloat16)
        >>> b = torch.zeros(16, 8, dtype=torch.bfloat16)
        >>> pair = LoraPair(a, b, scale=2.0)
        >>> pair.rank, pair.k_in, pair.n_out
        (8, 32, 16)
    """

    a: Tensor
    b: Tensor
    scale: float
    rank: int | None = None
    route: LoraRoute = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name, t in (("a", self.a), ("b", self.b)):
            if t.dtype != torch.bfloat16 or t.dim() != 2 or not t.is_contiguous():
                raise RouteError(
                    f"`{name}` must be a contiguous 2-D bfloat16 tensor; given: "
                    f"{tuple(t.shape)} {t.dtype}, contiguous: {t.is_contiguous()}"
                )
            if t.data_ptr() % 16:
                raise RouteError(f"`{name}` must start at a multiple of 16 bytes; hint: clone it")
        if self.a.device != self.b.device:
            raise RouteError(
                f"a and b must be on one device; given: {self.a.device}, {self.b.device}"
            )
        if self.a.shape[0] != self.b.shape[1] or 0 in self.a.shape or 0 in self.b.shape:
            raise RouteError(
                "a must be [max_rank, k_in] and b [n_out, max_rank], none of them 0; given: "
                f"{tuple(self.a.shape)} and {tuple(self.b.shape)}"
            )
        if self.rank is None:
            object.__setattr__(self, "rank", self.max_rank)
        if not 1 <= int(self.rank or 0) <= self.max_rank:
            raise RouteError(f"rank must be 1 .. {self.max_rank} (max_rank); given: {self.rank}")
        # Built once here, so that no later call has to copy anything to the device.
        object.__setattr__(self, "route", LoraRoute.from_pairs([self]))

    @property
    def max_rank(self) -> int:
        """Rows of a and columns of b, padding included."""
        return int(self.a.shape[0])

    @property
    def k_in(self) -> int:
        """Input features."""
        return int(self.a.shape[1])

    @property
    def n_out(self) -> int:
        """Output features."""
        return int(self.b.shape[0])


class Tables(Protocol):
    """What all routes have: four tables over keys, and the sizes of the matrices behind them."""

    @property
    def a_table(self) -> Tensor: ...
    @property
    def b_table(self) -> Tensor: ...
    @property
    def scale_table(self) -> Tensor: ...
    @property
    def rank_table(self) -> Tensor: ...
    @property
    def k_in(self) -> int: ...
    @property
    def n_out(self) -> int: ...
    @property
    def max_rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


def tables_of(route: Tables) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A addresses, B addresses, scales, ranks: the order in which operators take them."""
    return route.a_table, route.b_table, route.scale_table, route.rank_table


def check_tables(route: Tables) -> None:
    """Whether a route's tables fit together; raises RouteError naming the table if not."""
    expected = {
        "a_table": torch.int64,
        "b_table": torch.int64,
        "scale_table": torch.float32,
        "rank_table": torch.int32,
    }
    first = route.a_table
    for name, dtype in expected.items():
        table: Tensor = getattr(route, name)
        fits = table.dtype == dtype and table.shape == first.shape and table.dim() == 1
        if not (fits and table.is_contiguous() and table.device == first.device):
            raise RouteError(
                f"`{name}` must be a contiguous {dtype} vector, as long as a_table "
                f"({tuple(first.shape)}) and on its device; given: "
                f"{tuple(table.shape)} {table.dtype} on {table.device}"
            )
    if min(route.k_in, route.n_out, route.max_rank) < 1:
        raise RouteError(
            "k_in, n_out and max_rank must be at least 1; given: "
            f"{route.k_in}, {route.n_out}, {route.max_rank}"
        )


@dataclass(frozen=True, eq=False)
class LoraRoute:
    """Per target, the tables over slots that the kernels read.

    Args:
        a_table: [max_loras] int64 addresses of A, 0 where the slot does not adapt this target.
        b_table: [max_loras] int64 addresses of B, 0 likewise.
        scale_table: [max_loras] float32.
        rank_table: [max_loras] int32 true ranks.
        k_in: input features.
        n_out: output features.
        max_rank: padded rank: the rows of every A and the row stride of every B.
        storage: the tensors that the tables point into, held so that they outlive the route.

    Raises:
        RouteError: if the tables do not fit together.

    Example:
        >>> a, b = torch.ones(8, 32, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
        >>> route = LoraRoute.from_pairs([LoraPair(a, b, scale=2.0), None])
        >>> route.max_loras
        2
    """

    a_table: Tensor
    b_table: Tensor
    scale_table: Tensor
    rank_table: Tensor
    k_in: int
    n_out: int
    max_rank: int
    storage: tuple[Tensor, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_tables(self)

    @property
    def max_loras(self) -> int:
        """Length of the tables: slots 0 .. max_loras-1 exist."""
        return int(self.a_table.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.a_table.device

    @classmethod
    def from_pairs(cls, pairs: Sequence[LoraPair | None]) -> LoraRoute:
        """Build the tables from one pair (or None) per slot.

        Raises:
            RouteError: if there is no pair, or the pairs differ in device, k_in, n_out or max_rank.

        Example:
            >>> a = torch.ones(4, 8, dtype=torch.bfloat16)
            >>> b = torch.ones(8, 4, dtype=torch.bfloat16)
            >>> LoraRoute.from_pairs([None, LoraPair(a, b, 1.0)]).rank_table.tolist()
            [0, 4]
        """
        present = [p for p in pairs if p is not None]
        if not present:
            raise RouteError("a route needs at least one pair; given: only None")
        dims = {(p.a.device, p.k_in, p.n_out, p.max_rank) for p in present}
        if len(dims) > 1:
            raise RouteError(
                "all pairs of a route must share device, k_in, n_out and max_rank; given: "
                + ", ".join(map(str, sorted(dims, key=str)))
            )
        ((device, k_in, n_out, max_rank),) = dims

        def table(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            a_table=table([p.a.data_ptr() if p else 0 for p in pairs], torch.int64),
            b_table=table([p.b.data_ptr() if p else 0 for p in pairs], torch.int64),
            scale_table=table([p.scale if p else 0.0 for p in pairs], torch.float32),
            rank_table=table([int(p.rank or 0) if p else 0 for p in pairs], torch.int32),
            k_in=k_in,
            n_out=n_out,
            max_rank=max_rank,
            storage=tuple(t for p in present for t in (p.a, p.b)),
        )


@dataclass(frozen=True, eq=False)
class LoraAttnWeights:
    """One attention layer's pairs and routes; None where a projection is not adapted.

    Example:
        >>> LoraAttnWeights(layer_idx=0).q is None
        True
    """

    layer_idx: int
    q: LoraPair | None = None
    k: LoraPair | None = None
    v: LoraPair | None = None
    o: LoraPair | None = None
    q_route: LoraRoute | None = None
    k_route: LoraRoute | None = None
    v_route: LoraRoute | None = None
    o_route: LoraRoute | None = None


@dataclass(frozen=True, eq=False)
class LoraFfnWeights:
    """One dense feed-forward layer's pairs and routes; None where a projection is not adapted.

    Example:
        >>> LoraFfnWeights().gate_route is None
        True
    """

    gate: LoraPair | None = None
    up: LoraPair | None = None
    down: LoraPair | None = None
    gate_route: LoraRoute | None = None
    up_route: LoraRoute | None = None
    down_route: LoraRoute | None = None
