"""From checked operands to the two launches: scratch, block sizes, shrink, expand."""

from __future__ import annotations

import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.ops import tiles
from lorafold.ops.expand import expand_triton
from lorafold.ops.scratch import num_sums
from lorafold.ops.shrink import shrink_triton

__all__ = ["Tables", "routed_triton"]

Tables = tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]
"""Per output of a call: A addresses, B addresses, scales, ranks."""


def routed_triton(
    x: Tensor,
    outs: tuple[Tensor, ...],
    tables: Tables,
    max_rank: int,
    numerics: Numerics,
    source: Tensor | None,
    top_k: int,
    tile_key: Tensor | None,
    tile_rows: Tensor | None,
    scratch: Tensor | None,
    shrink: tiles.ShrinkTile | None = None,
    expand: tiles.ExpandTile | None = None,
) -> None:
    """Launch the shrink and the expand of one call; block sizes come from `tiles` unless given."""
    a_tables, b_tables, scale_tables, rank_tables = tables
    num_rows, k_in = outs[0].shape[0], x.shape[1]
    num_tiles, block_rows = _launch_shape(num_rows, tile_key, tile_rows)
    if shrink is None:
        shrink = tiles.shrink_tile(numerics, num_tiles, block_rows, len(outs), k_in, max_rank)
    segments = num_sums(k_in, numerics)
    if expand is None:
        columns = sum(out.shape[1] for out in outs)
        expand = tiles.expand_tile(numerics, num_tiles, block_rows, columns, max_rank, segments)
    dtype = torch.float32 if segments else torch.bfloat16
    size = len(outs) * max(1, segments) * num_rows * max_rank
    if scratch is None:
        xa = torch.empty(size, dtype=dtype, device=x.device)
    else:
        xa = scratch[: size * dtype.itemsize].view(dtype)
    # Programmatic dependent launch: the expand starts while the shrink is still running.
    pdl = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    gemv = numerics == "gemv"
    shrink_triton(
        x, xa, a_tables, rank_tables, tile_key, tile_rows, source, num_rows, top_k, k_in, max_rank,
        shrink, gemv, pdl,
    )  # fmt: skip
    expand_triton(
        xa, outs, b_tables, scale_tables, rank_tables, tile_key, tile_rows, num_rows, max_rank,
        segments, expand, gemv, pdl,
    )  # fmt: skip


def _launch_shape(
    num_rows: int, tile_key: Tensor | None, tile_rows: Tensor | None
) -> tuple[int, int]:
    """(tiles, rows of a tile): the plan's, or, without a plan, all rows under one key."""
    if tile_key is None or tile_rows is None:
        block_rows = tiles.plan_rows(num_rows, 1)
        return -(-num_rows // block_rows), block_rows
    return tile_key.shape[0], tile_rows.shape[0] // tile_key.shape[0]
