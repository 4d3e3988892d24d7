"""The plan: rows grouped by table key into tiles, made on the device in a fixed launch shape.

A tile holds up to `block_rows` rows of one key. Because a row's bits do not depend on its tile, a
plan may order and split rows as it likes. Nothing here synchronises with the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.ops import tiles

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows of one step, grouped into tiles of equal key; made by `make_plan`.

    On the CPU, where rows are routed one by one, the tiles are not filled.

    Args:
        num_rows: rows that the plan covers.
        num_keys: keys 0 .. num_keys-1 exist; a row with any other key has no adapter.
        block_rows: rows of a tile.
        tile_key: [max_tiles] int32, -1 where a tile is not in use.
        tile_rows: [max_tiles * block_rows] int32 row indices, -1 where there is no row.
        keys: [num_rows] int32, where the expert operators put the keys that they compute.
        counters: int32 working memory.
        ready: calls that were checked and prepared, per routes; see `lorafold.ops.ready`.

    Source: the segments of Punica (arXiv 2310.18547) and the sorted tokens of fused MoE kernels.
    """

    num_rows: int
    num_keys: int
    block_rows: int
    tile_key: Tensor
    tile_rows: Tensor
    keys: Tensor
    counters: Tensor
    ready: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def empty(
        cls,
        num_rows: int,
        num_keys: int,
        device: torch.device | str,
        *,
        block_rows: int | None = None,
    ) -> Plan:
        """Buffers for a plan; they keep their addresses while `make_plan(..., plan=)` refills them.

        Args:
            num_rows: rows that the plan covers.
            num_keys: keys 0 .. num_keys-1 exist.
            device: where the rows are.
            block_rows: rows of a tile, one of `tiles.HEIGHTS`; what suits the sizes unless given.

        Raises:
            RouteError: if num_rows is negative or num_keys is not positive.

        Example:
            >>> plan = Plan.empty(num_rows=40, num_keys=2, device="cpu")
            >>> plan.block_rows, plan.tile_key.numel()
            (16, 4)
        """
        if num_rows < 0 or num_keys < 1:
            raise RouteError(
                f"a plan needs num_rows >= 0 and num_keys >= 1; given: {num_rows}, {num_keys}"
            )
        if block_rows is None:
            block_rows = tiles.plan_rows(num_rows, num_keys)
        num_tiles = tiles.max_tiles(num_rows, num_keys, block_rows)

        def buffer(size: int, value: int) -> Tensor:
            return torch.full((size,), value, dtype=torch.int32, device=device)

        return cls(
            num_rows=num_rows,
            num_keys=num_keys,
            block_rows=block_rows,
            tile_key=buffer(num_tiles, -1),
            tile_rows=buffer(num_tiles * block_rows, -1),
            keys=buffer(num_rows, -1),
            # rows counted per key, first tile per key, place of a row among its key's rows
            counters=buffer(2 * num_keys + num_rows, 0),
        )

    def check(self, num_rows: int, num_keys: int, device: torch.device) -> None:
        """Whether the plan is one for these sizes.

        Raises:
            RouteError: if it is not.
        """
        own = (self.num_rows, self.num_keys, self.tile_key.device)
        if own != (num_rows, num_keys, device):
            raise RouteError(
                f"the plan is for {self.num_rows} rows and {self.num_keys} keys on "
                f"{self.tile_key.device}; given: {num_rows} rows, {num_keys} keys on {device}"
            )


def make_plan(keys: Tensor, num_keys: int, *, plan: Plan | None = None) -> Plan:
    """Group rows by key, on the device, once per step for all layers.

    With `plan` given, its buffers are refilled *in place* and nothing is allocated, so the call can
    be captured in a CUDA graph whose replays read new contents of `keys`.

    Operators that are given the plan read adapters and tables ahead of the kernels before them:
    write those before the plan is made, or make it again.

    Args:
        keys: [num_rows] int32, for the dense operators `seq_slot`; values outside 0 .. num_keys-1
            mean "no adapter".
        num_keys: for the dense operators `max_loras`.
        plan: a plan of the same sizes to refill.

    Returns:
        The plan: the given one, or a new one.

    Raises:
        RouteError: if `keys` is not a contiguous int32 vector, or does not fit the plan.

    Example:
        >>> plan = make_plan(torch.tensor([1, -1, 0], dtype=torch.int32), num_keys=2)
        >>> plan.num_rows, plan.num_keys
        (3, 2)
    """
    if keys.dtype != torch.int32 or keys.dim() != 1 or not keys.is_contiguous():
        raise RouteError(
            f"keys must be a contiguous int32 vector; given: {tuple(keys.shape)} {keys.dtype}"
        )
    if plan is None:
        plan = Plan.empty(keys.shape[0], num_keys, keys.device)
    plan.check(keys.shape[0], num_keys, keys.device)
    if keys.device.type == "cuda" and plan.num_rows:
        from lorafold.ops.compiled import on_device
        from lorafold.ops.group import group_triton

        with on_device(keys.device):
            group_triton(keys, plan)
    return plan
