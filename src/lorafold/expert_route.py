"""Where a row of a mixture-of-experts layer finds its adapter: tables over (slot, expert).

The key of a row is `slot * num_experts + expert`, so one batch mixes any adapters on the experts.
A single active adapter is the case of one slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.route import LoraPair, check_tables

__all__ = ["ExpertTables", "MoeExpertRoute", "pack_expert_tables"]


@dataclass(frozen=True)
class ExpertTables:
    """Host-side tables over expert ids, ready to be copied to a device.

    Args:
        a: addresses of A per expert, 0 where the expert is not adapted.
        b: addresses of B likewise.
        scale: factors of the fold, 0.0 where the expert is not adapted.
        num_experts: length of the tables: highest adapted expert id + 1.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    scale: tuple[float, ...]
    num_experts: int


def pack_expert_tables(entries: Iterable[tuple[int, int, int, float]]) -> ExpertTables | None:
    """Pack (expert id, A address, B address, scale) entries into tables indexed by expert id.

    Args:
        entries: adapted experts in any order; a repeated id keeps its last entry.

    Returns:
        The tables, or None where there is no entry (a router-only adapter).

    Raises:
        RouteError: if an expert id is negative.

    Example:
        >>> pack_expert_tables([(2, 64, 128, 0.5)])
        ExpertTables(a=(0, 0, 64), b=(0, 0, 128), scale=(0.0, 0.0, 0.5), num_experts=3)
        >>> pack_expert_tables([]) is None
        True
    """
    by_id = {expert: (a, b, scale) for expert, a, b, scale in entries}
    if not by_id:
        return None
    if min(by_id) < 0:
        raise RouteError(f"expert ids must not be negative; given: {min(by_id)}")
    rows = [by_id.get(expert, (0, 0, 0.0)) for expert in range(max(by_id) + 1)]
    a, b, scale = zip(*rows, strict=True)
    return ExpertTables(a=a, b=b, scale=scale, num_experts=len(rows))


@dataclass(frozen=True, eq=False)
class MoeExpertRoute:
    """The tables of one expert projection over keys slot * num_experts + expert.

    Args:
        a_table: [max_loras * num_experts] int64 addresses of A, 0 where a key is not adapted.
        b_table: the same for B.
        scale_table: float32, as long.
        rank_table: int32 true ranks, as long.
        num_experts: experts per slot; rows of higher expert ids are not adapted.
        k_in: input features.
        n_out: output features.
        max_rank: padded rank: the rows of every A and the row stride of every B.
        storage: the tensors that the tables point into, held so that they outlive the route.

    Raises:
        RouteError: if the tables do not fit together, or their length is no multiple of
            num_experts.
    """

    a_table: Tensor
    b_table: Tensor
    scale_table: Tensor
    rank_table: Tensor
    num_experts: int
    k_in: int
    n_out: int
    max_rank: int
    storage: tuple[Tensor, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_tables(self)
        if self.num_experts < 1 or self.a_table.shape[0] % self.num_experts:
            raise RouteError(
                "the tables must hold a whole number of slots of num_experts entries; given: "
                f"{self.a_table.shape[0]} entries, num_experts {self.num_experts}"
            )

    @property
    def max_loras(self) -> int:
        """Slots 0 .. max_loras-1 exist."""
        return self.num_keys // self.num_experts

    @property
    def num_keys(self) -> int:
        """Length of the tables."""
        return int(self.a_table.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.a_table.device

    @classmethod
    def from_pairs(
        cls, pairs: Mapping[tuple[int, int], LoraPair], *, max_loras: int, num_experts: int
    ) -> MoeExpertRoute:
        """Build the tables from one pair per adapted (slot, expert).

        Raises:
            RouteError: if there is no pair, a key is outside the tables, or the pairs differ in
                device, k_in, n_out or max_rank.

        Example:
            >>> a = torch.ones(4, 8, dtype=torch.bfloat16)
            >>> b = torch.ones(8, 4, dtype=torch.bfloat16)
            >>> pairs = {(1, 0): LoraPair(a, b, 1.0)}
            >>> MoeExpertRoute.from_pairs(pairs, max_loras=2, num_experts=3).rank_table.tolist()
            [0, 0, 0, 4, 0, 0]
        """
        from lorafold.route import LoraRoute

        outside = [k for k in pairs if not (0 <= k[0] < max_loras and 0 <= k[1] < num_experts)]
        if outside:
            raise RouteError(
                f"keys must be (slot below {max_loras}, expert below {num_experts}); "
                f"given: {outside[0]}"
            )
        flat = [pairs.get((s, e)) for s in range(max_loras) for e in range(num_experts)]
        route = LoraRoute.from_pairs(flat)
        return cls(
            a_table=route.a_table,
            b_table=route.b_table,
            scale_table=route.scale_table,
            rank_table=route.rank_table,
            num_experts=num_experts,
            k_in=route.k_in,
            n_out=route.n_out,
            max_rank=route.max_rank,
            storage=route.storage,
        )
