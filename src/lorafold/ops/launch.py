"""From checked operands to launches: block sizes, scratch; shrink and expand, or both in one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.ops import tiles
from lorafold.ops.cluster import ClusterLaunch, cluster_launch
from lorafold.ops.cluster_choice import Choice, Shape, cluster_choice
from lorafold.ops.compiled import Launch, has_pdl, is_aligned, shared_memory_of
from lorafold.ops.expand import expand_launch
from lorafold.ops.gemv_expand import gemv_expand_launch
from lorafold.ops.gemv_shrink import gemv_shrink_launch
from lorafold.ops.scratch import num_sums
from lorafold.ops.shrink import shrink_launch

__all__ = ["Call", "Tables", "prepare", "prepare_call", "routed_triton"]

Tables = tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]
"""Per output of a call: A addresses, B addresses, scales, ranks."""


@dataclass(frozen=True)
class Call:
    """All that the sizes and strides of a call decide, so that it is decided once.

    Args:
        xa_bytes: memory between shrink and expand, 0 where one kernel does both.
        launches: shrink and expand, or the cluster kernel.
    """

    xa_bytes: int
    launches: tuple[Launch | ClusterLaunch, ...]

    def operands(
        self,
        x: Any,
        xa: Any,
        outs: Any,
        tables: tuple[Any, Any, Any, Any],
        tile_key: Any,
        tile_rows: Any,
        source: Any = None,
    ) -> tuple[tuple[Any, ...], ...]:
        """What each launch takes: tensors or addresses, and tuples of them."""
        a_tables, b_tables, scale_tables, rank_tables = tables
        if len(self.launches) == 1:
            return ((x, outs, *tables, tile_key, tile_rows, source),)
        return (
            (x, xa, a_tables, rank_tables, tile_key, tile_rows, source),
            (xa, outs, b_tables, scale_tables, rank_tables, tile_key, tile_rows),
        )


@functools.lru_cache(4096)
def prepare(
    num_rows: int,
    k_in: int,
    n_outs: tuple[int, ...],
    x_stride: int,
    out_strides: tuple[int, ...],
    is_x_aligned: bool,
    are_outs_aligned: tuple[bool, ...],
    max_rank: int,
    numerics: Numerics,
    top_k: int,
    has_source: bool,
    plan_tiles: tuple[int, int] | None,
    folds: bool,
    device: torch.device,
    shrink: tiles.AnyShrinkTile | None = None,
    expand: tiles.AnyExpandTile | None = None,
    cluster: Choice | None = None,
) -> Call:
    """Block sizes and launches of a call; `plan_tiles` are the plan's tiles and rows of a tile.

    Whether one launch does it comes from `cluster_choice`, block sizes from `tiles`, unless given.
    """
    are_aligned = is_x_aligned and all(are_outs_aligned)
    may_cluster = numerics == "mma" and folds and are_aligned and not (shrink or expand)
    if plan_tiles is not None and may_cluster:
        cluster = cluster or cluster_choice(*plan_tiles, k_in, n_outs, max_rank)
        if cluster is not None:
            shape = Shape(plan_tiles[1], k_in, n_outs, max_rank, cluster)
            launch = cluster_launch(shape, plan_tiles[0], top_k, x_stride, out_strides, device)
            if launch is not None:
                return Call(xa_bytes=0, launches=(launch,))
    if plan_tiles is None:
        block_rows = tiles.plan_rows(num_rows, 1)
        num_tiles = tiles.cdiv(num_rows, block_rows)
    else:
        num_tiles, block_rows = plan_tiles
    slices, has_plan = len(n_outs), plan_tiles is not None
    shared_memory, pdl = shared_memory_of(device), has_pdl(device)
    own_shrink, own_expand = tiles.call_tiles(
        numerics, num_rows, num_tiles, block_rows, k_in, n_outs, max_rank, shared_memory,
        is_beside=not folds,
    )  # fmt: skip
    shrink, expand = shrink or own_shrink, expand or own_expand
    if isinstance(shrink, tiles.GemvShrinkTile) and isinstance(expand, tiles.GemvExpandTile):
        return Call(
            xa_bytes=slices * num_rows * max_rank * 2,
            launches=(
                gemv_shrink_launch(
                    num_rows, num_tiles, slices, top_k, k_in, max_rank, x_stride, is_x_aligned,
                    has_plan, has_source, shrink, pdl,
                ),
                gemv_expand_launch(
                    num_rows, num_tiles, max_rank, n_outs, out_strides, are_outs_aligned,
                    has_plan, expand, folds, pdl,
                ),
            ),
        )  # fmt: skip
    assert isinstance(shrink, tiles.ShrinkTile)
    assert isinstance(expand, tiles.ExpandTile)
    segments = num_sums(k_in, numerics)
    # A shrink that starts the expand after its own wait starts it when outs are complete.
    has_late_shrink = not (has_plan and shrink.early)

    return Call(
        xa_bytes=slices * num_rows * max_rank * (4 * segments if segments else 2),
        launches=(
            shrink_launch(
                num_rows, num_tiles, slices, top_k, k_in, max_rank, x_stride,
                is_x_aligned, has_plan, has_source, shrink, pdl,
            ),
            expand_launch(
                num_rows, num_tiles, max_rank, segments, n_outs, out_strides,
                are_outs_aligned, has_plan, expand, folds, has_late_shrink, pdl,
            ),
        ),
    )  # fmt: skip


def prepare_call(
    x: Tensor,
    outs: tuple[Tensor, ...],
    max_rank: int,
    numerics: Numerics,
    tile_key: Tensor | None,
    tile_rows: Tensor | None,
    top_k: int = 1,
    has_source: bool = False,
    folds: bool = True,
    shrink: tiles.AnyShrinkTile | None = None,
    expand: tiles.AnyExpandTile | None = None,
    cluster: Choice | None = None,
) -> Call:
    """`prepare` for these operands."""
    plan_tiles = None
    if tile_key is not None and tile_rows is not None:
        num_tiles = tile_key.shape[0]
        plan_tiles = num_tiles, tile_rows.shape[0] // num_tiles
    return prepare(
        outs[0].shape[0],
        x.shape[1],
        tuple([out.shape[1] for out in outs]),
        x.stride(0),
        tuple([out.stride(0) for out in outs]),
        is_aligned(x),
        tuple([is_aligned(out) for out in outs]),
        max_rank,
        numerics,
        top_k,
        has_source,
        plan_tiles,
        folds,
        x.device,
        shrink,
        expand,
        cluster,
    )


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
    shrink: tiles.AnyShrinkTile | None = None,
    expand: tiles.AnyExpandTile | None = None,
    *,
    folds: bool = True,
    cluster: Choice | None = None,
) -> None:
    """Launch one call, as `prepare` chooses unless given.

    Without `folds`, outs get the deltas themselves.
    """
    call = prepare_call(
        x, outs, max_rank, numerics, tile_key, tile_rows, top_k, source is not None, folds,
        shrink, expand, cluster,
    )  # fmt: skip
    if scratch is None and call.xa_bytes:
        scratch = torch.empty(call.xa_bytes, dtype=torch.uint8, device=x.device)
    operands = call.operands(x, scratch, outs, tables, tile_key, tile_rows, source)
    for launch, each in zip(call.launches, operands, strict=True):
        launch(*each)
