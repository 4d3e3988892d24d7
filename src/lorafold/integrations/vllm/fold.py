"""The operator that vLLM's compiled and captured forward sees for one layer: `lorafold::fold_rows`.

It takes tensors at fixed addresses only. What changes per step is read when it runs: whether the
step has an adapter at all, from a CPU tensor (nothing is launched if not), and the rest on the
device. torch.compile sees one opaque call that changes y in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.integrations.vllm.rows import StepRows, tiles_for
from lorafold.integrations.vllm.tables import SlotTables
from lorafold.integrations.vllm.weighted import fold_delta
from lorafold.numerics import Numerics, resolve
from lorafold.ops.levers import NO_APPLY
from lorafold.ops.routed import routed_delta

__all__ = ["check_rows", "fold_rows"]

_SCHEMA = (
    "fold_rows(Tensor(a!) y, Tensor x, int[] n_outs, Tensor a_table, Tensor b_table, "
    "Tensor scale_table, Tensor rank_table, int max_rank, str numerics, Tensor slots, "
    "Tensor any_adapter, Tensor[] tiles) -> ()"
)


def fold_rows(y: Tensor, x: Tensor, tables: SlotTables, rows: StepRows, numerics: Numerics) -> None:
    """Fold every row's own adapter into the slices of y, *in place*.

    Args:
        y: [n, at least the sum of the slices] bfloat16 or float32: the slices' outputs side by
            side.
        x: [n, k_in] bfloat16.
        tables: the layer's.
        rows: the step's; n may be more than its rows, and those beyond have no adapter.
        numerics: how dot products are summed.

    Raises:
        RouteError: if y and x do not fit the tables; y is then as before.

    Example:
        >>> ones = lambda *shape: torch.ones(shape, dtype=torch.bfloat16)
        >>> tables = SlotTables([ones(2, 1, 8, 32)], [ones(2, 1, 16, 8)])
        >>> tables.place(1, 0, rank=4, scale=0.5)
        >>> rows = StepRows(8, max_loras=2, device="cpu")
        >>> rows.update(torch.tensor([1, -1], dtype=torch.int32))
        >>> y = torch.zeros(2, 16, dtype=torch.bfloat16)
        >>> fold_rows(y, ones(2, 32), tables, rows, "gemv")
        >>> y[:, 0].tolist()  # 0.5 * 4 * 32 and base
        [64.0, 0.0]
    """
    check_rows(y, x, sum(tables.n_outs), tables.k_in)
    torch.ops.lorafold.fold_rows(
        y, x, tables.n_outs, tables.a_table, tables.b_table, tables.scale_table, tables.rank_table,
        tables.max_rank, numerics, rows.slots, rows.any_adapter, rows.tiles,
    )  # fmt: skip


def check_rows(y: Tensor, x: Tensor, columns: int, k_in: int, *, float32: bool = True) -> None:
    """Whether y and x are rows of a layer with these sizes; `float32`: whether y may be that.

    Raises:
        RouteError: naming the tensor, what was given and what is allowed.

    Example:
        >>> check_rows(torch.zeros(2, 16), torch.zeros(2, 32).bfloat16(), columns=16, k_in=32)
    """
    allowed = (torch.bfloat16, torch.float32) if float32 else (torch.bfloat16,)
    if x.dtype != torch.bfloat16 or y.dtype not in allowed:
        raise RouteError(
            f"x must be bfloat16 and y one of {allowed}; given: {x.dtype} and {y.dtype}; "
            "hint: serve the model with dtype bfloat16"
        )
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != k_in or y.shape[1] < columns:
        raise RouteError(
            f"x must be [n, {k_in}] and y [n, {columns}] or wider; given: {list(x.shape)} and "
            f"{list(y.shape)}"
        )


def _fold_rows(
    y: Tensor,
    x: Tensor,
    n_outs: list[int],
    a_table: Tensor,
    b_table: Tensor,
    scale_table: Tensor,
    rank_table: Tensor,
    max_rank: int,
    numerics: str,
    slots: Tensor,
    any_adapter: Tensor,
    tiles: list[Tensor],
) -> None:
    num_rows, max_loras = y.shape[0], a_table.shape[1]
    if NO_APPLY or not num_rows or not any_adapter.item():
        return
    if num_rows > slots.shape[0] or x.shape[0] != num_rows:
        raise RouteError(
            f"x and y must have one row count of at most {slots.shape[0]}; given: {x.shape[0]} and "
            f"{num_rows}"
        )
    keys = slots[:num_rows]
    outs = torch.split(y, [*n_outs, y.shape[1] - sum(n_outs)], dim=1)[: len(n_outs)]
    deltas = outs if y.dtype == torch.bfloat16 else tuple(_zeros_like(out) for out in outs)
    tile_key, tile_rows = tiles_for(tiles, num_rows, max_loras)
    columns = (a_table, b_table, scale_table, rank_table)
    tables = list(zip(*(table.unbind(0) for table in columns), strict=True))
    routed_delta(
        x, deltas, keys, tables, max_rank, resolve(numerics, x.device),
        tile_key=tile_key, tile_rows=tile_rows,
    )  # fmt: skip
    if deltas is not outs:
        for out, delta, a_addresses in zip(outs, deltas, a_table.unbind(0), strict=True):
            fold_delta(out, delta, None, keys, a_addresses)


def _zeros_like(out: Tensor) -> Tensor:
    return torch.zeros(out.shape, dtype=torch.bfloat16, device=out.device)


def _fold_rows_fake(*args: object) -> None:
    """What tracing sees: y changes, nothing is returned."""


_LIBRARY = torch.library.Library("lorafold", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]
_LIBRARY.impl("fold_rows", _fold_rows, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("fold_rows", _fold_rows, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("lorafold::fold_rows", _fold_rows_fake, lib=_LIBRARY)
