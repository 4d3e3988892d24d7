"""The slot of every row of a step, and the rows grouped by slot, at addresses that never change.

vLLM replays CUDA graphs whose row count is padded: a graph of n rows reads the first n slots here,
and rows past the step's own read -1, "no adapter". The grouping is made once per step, outside the
graphs, for every tile size that a call of any row count can ask for; a call uses the first tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.ops.plan import Plan, make_plan
from lorafold.ops.tiles import HEIGHTS, max_tiles, plan_rows

__all__ = ["StepRows", "tiles_for"]


class StepRows:
    """The rows of one step of one model.

    Args:
        max_rows: the most rows that a step can have.
        max_loras: slots 0 .. max_loras-1 exist.
        device: where the slots are read.

    Attributes:
        slots: [max_rows] int32 on the device, -1 for base and beyond the step's rows.
        any_adapter: [1] bool on the CPU: whether any row of the step has a slot.
        tiles: on a CUDA device a `Plan`'s tile_key and tile_rows per tile size, else empty.
        num_rows: rows of the step.

    Example:
        >>> rows = StepRows(8, max_loras=2, device="cpu")
        >>> rows.update(torch.tensor([1, -1, 0], dtype=torch.int32))
        >>> rows.slots.tolist(), rows.any_adapter.item()
        ([1, -1, 0, -1, -1, -1, -1, -1], True)
    """

    def __init__(self, max_rows: int, max_loras: int, device: torch.device | str) -> None:
        self.max_rows = max_rows
        self.max_loras = max_loras
        self.slots = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.any_adapter = torch.zeros(1, dtype=torch.bool)
        self.tiles: list[Tensor] = []
        self.num_rows = 0
        self._written = 0  # rows of the step before, whose slots and tiles are still in the buffers
        if self.slots.is_cuda:
            self._make_buffers()

    def update(self, slots: Tensor) -> None:
        """Take the rows of the next step.

        Nothing is launched where neither this step nor the one before has an adapter.

        Args:
            slots: [num_rows] int32 on the CPU; negative means base.

        Raises:
            RouteError: if there are too many rows, or a slot is beyond the table; the rows are
                then as before.
        """
        num_rows = slots.shape[0]
        highest = int(slots.max()) if num_rows else -1
        if num_rows > self.max_rows or highest >= self.max_loras:
            raise RouteError(
                f"a step has at most {self.max_rows} rows and slots below {self.max_loras}; given: "
                f"{num_rows} rows, highest slot {highest}"
            )
        had_adapter = bool(self.any_adapter.item())
        self.any_adapter.fill_(highest >= 0)
        self._written = max(self._written, self.num_rows)
        self.num_rows = num_rows
        if highest < 0 and not had_adapter:
            return
        # The step before may have been longer: its rows must read "no adapter" now.
        size = max(num_rows, self._written)
        staged = torch.full((size,), -1, dtype=torch.int32, pin_memory=self.slots.is_cuda)
        staged[:num_rows] = slots
        self.slots[:size].copy_(staged, non_blocking=True)
        self.refresh()

    def refresh(self) -> None:
        """Group the rows again: after an update, and after adapters have been written to slots."""
        size = max(self.num_rows, self._written)
        self._written = 0
        if not self.tiles or not size:
            return
        for tile_rows in self._tile_sizes:
            make_plan(self.slots[:size], self.max_loras, plan=self._plan(size, tile_rows))

    def _make_buffers(self) -> None:
        largest = plan_rows(self.max_rows, self.max_loras)
        self._tile_sizes = [t for t in HEIGHTS if t <= largest]
        device = self.slots.device
        size = 2 * self.max_loras + self.max_rows
        self._counters = torch.zeros(size, dtype=torch.int32, device=device)
        for tile_rows in self._tile_sizes:
            count = max_tiles(self.max_rows, self.max_loras, tile_rows)
            for length in (count, count * tile_rows):
                self.tiles.append(torch.full((length,), -1, dtype=torch.int32, device=device))

    def _plan(self, num_rows: int, tile_rows: int) -> Plan:
        """A plan of the first rows, in the buffers of one tile size."""
        first = 2 * self._tile_sizes.index(tile_rows)
        count = max_tiles(num_rows, self.max_loras, tile_rows)
        return Plan(
            num_rows=num_rows,
            num_keys=self.max_loras,
            block_rows=tile_rows,
            tile_key=self.tiles[first][:count],
            tile_rows=self.tiles[first + 1][: count * tile_rows],
            keys=self.slots[:num_rows],
            counters=self._counters[: 2 * self.max_loras + num_rows],
        )


def tiles_for(
    tiles: list[Tensor], num_rows: int, max_loras: int
) -> tuple[Tensor | None, Tensor | None]:
    """tile_key and tile_rows for a call of num_rows rows, out of `StepRows.tiles`.

    The step itself may have fewer rows: its tiles are the first ones, and the others are empty.

    Example:
        >>> tiles_for(StepRows(8, max_loras=2, device="cpu").tiles, num_rows=8, max_loras=2)
        (None, None)
    """
    if not tiles:
        return None, None
    tile_rows = plan_rows(num_rows, max_loras)
    first = 2 * HEIGHTS.index(tile_rows)
    count = max_tiles(num_rows, max_loras, tile_rows)
    return tiles[first][:count], tiles[first + 1][: count * tile_rows]
