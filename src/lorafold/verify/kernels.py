"""Checks of the kernels, for CUDA devices: against the CPU, in any tile, and inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lorafold import ops
from lorafold.numerics import SEGMENT, Numerics
from lorafold.ops import tiles
from lorafold.ops.cluster_choice import Choice, candidates
from lorafold.verify.apply import device_tensor, fold_rows, model_of, poisoned, route, truth
from lorafold.verify.case import Case
from lorafold.verify.check import Calls, Sides

__all__ = ["device_is_cpu", "graph_replays", "plain_launches", "tile_launches", "tile_sizes"]


def device_is_cpu(case: Case, device: torch.device) -> Sides:
    """The kernels, and the CPU reference at the true ranks."""
    model = model_of(device)
    assert model is not None  # the check needs it
    return fold_rows(case, device), truth(case, model)


def plain_launches(case: Case, device: torch.device) -> Calls:
    """The kernels of a plain call."""
    return (partial(fold_rows, case, device),)


def graph_replays(case: Case, device: torch.device) -> Sides:
    """Replays of one CUDA graph, each with other slots and rows, and calls without a graph."""
    tables = route(case, device)
    x, out = device_tensor(case["x"], device), device_tensor(case["out"], device)
    slots = device_tensor(case["slots"], device)
    num_rows = x.shape[0]
    size = ops.scratch_bytes(num_rows, 1, tables.k_in, tables.max_rank)
    scratch = torch.empty(size, dtype=torch.uint8, device=device)
    plan = ops.make_plan(slots, tables.max_loras)

    def step() -> None:
        ops.make_plan(slots, tables.max_loras, plan=plan)
        ops.apply_lora_bgmv(
            tables, x, out, slots, plan=plan, numerics=case.numerics, scratch=scratch
        )

    step()  # compiles; a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    computed, expected = [], []
    for turn in range(4):
        other = case.changed(
            slots=(case["slots"].roll(turn) if turn < 3 else torch.full_like(case["slots"], -1)),
            x=case["x"].roll(turn, 0),
        )
        for buffer, name in ((x, "x"), (out, "out"), (slots, "slots")):
            buffer.copy_(other[name])
        graph.replay()
        computed.append(out.cpu())
        expected.append(fold_rows(other, device, tables=tables))
    return torch.stack(computed), torch.stack(expected)


def tile_sizes(case: Case, device: torch.device) -> Sides:
    """Every candidate of block sizes, warps and stages, one launch instead of two, and what the
    library chooses.
    """
    tables = route(case, device)
    computed = [call() for call in _tilings(case, device, tables)]
    expected = fold_rows(case, device, tables=tables)
    return torch.stack(computed), expected.expand(len(computed), -1, -1)


def tile_launches(case: Case, device: torch.device) -> Calls:
    """A call per candidate of `tile_sizes`."""
    return _tilings(case, device, route(case, device))


def _tilings(case: Case, device: torch.device, tables: ops.LoraRoute) -> list[Callable[[], Tensor]]:
    call = partial(_folded, case, device, tables)
    clusters: list[Callable[[], Tensor]] = [
        partial(call, tile_rows, cluster=choice)
        for tile_rows in tiles.HEIGHTS
        if case.numerics == "mma" and (choice := _cluster(tile_rows, tables))
    ]
    return clusters + [
        partial(call, tile_rows, shrink=shrink, expand=expand)
        for tile_rows in tiles.HEIGHTS
        for shrink, expand in _candidates(case.numerics, tile_rows, tables)
    ]


def _cluster(tile_rows: int, tables: ops.LoraRoute) -> Choice | None:
    """A cut of the kernel that does all in one launch, where there is one for the shape. A device
    that cannot run it folds with the other kernels.
    """
    return next(candidates(tile_rows, tables.k_in, (tables.n_out,), tables.max_rank), None)


def _candidates(
    numerics: Numerics, tile_rows: int, tables: ops.LoraRoute
) -> Sequence[tuple[tiles.AnyShrinkTile | None, tiles.AnyExpandTile | None]]:
    """(shrink, expand) for tiles of a height; None is what the library chooses."""
    if tile_rows == 32 or (tile_rows == 8 and numerics == "gemv"):
        return [(None, None)]
    if numerics == "gemv":
        return [(None, None), *_gemv_candidates(tile_rows)]
    return [(None, None), *_mma_candidates(tile_rows, tables)]


def _power_of_2(n: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << (n - 1).bit_length()))


def _gemv_candidates(
    tile_rows: int,
) -> list[tuple[tiles.GemvShrinkTile, tiles.GemvExpandTile]]:
    """The numbers are rows, parts, ranks, vectors; and rows, parts, columns, warps."""
    sizes = (((1, 16, 4, 1), (16, 1, 32, 4)), ((8, 1, 2, 2), (2, 4, 64, 2)))
    return [
        (tiles.GemvShrinkTile(tile_rows, *shrink), tiles.GemvExpandTile(tile_rows, *expand))
        for shrink, expand in sizes
    ]


def _mma_candidates(
    tile_rows: int, tables: ops.LoraRoute
) -> list[tuple[tiles.ShrinkTile, tiles.ExpandTile]]:
    """Several column blocks need a block of k that holds the rank.

    The numbers are ranks, k, warps, stages, early; and columns, blocks, k, warps, stages, ahead.
    """
    whole = _power_of_2(tables.max_rank, 16, 1024)
    sizes = [
        ((16, 32, 1, 1, True), (16, 1, whole, 1, 1, False)),
        ((64, 64, 4, 3, False), (128, 1, whole, 8, 1, True)),
        ((32, 128, 4, 4, False), (64, 1, 16, 4, 1, False)),
        ((64, 16, 8, 2, False), (64, 4, whole, 4, 3, True)),
    ]
    if tile_rows == 8:
        sizes = [((16, 64, 2, 3, False), (64, 4, whole, 4, 3, True))]
    if tables.k_in >= SEGMENT and tile_rows <= 16:
        sizes.append(((16, SEGMENT, 2, 1, tile_rows == 8), (32, 2, whole, 4, 2, tile_rows == 16)))
    return [
        (
            tiles.ShrinkTile(tile_rows, *shrink),
            tiles.ExpandTile(tile_rows, *expand),
        )
        for shrink, expand in sizes
    ]


def _folded(
    case: Case,
    device: torch.device,
    tables: ops.LoraRoute,
    tile_rows: int,
    shrink: tiles.AnyShrinkTile | None = None,
    expand: tiles.AnyExpandTile | None = None,
    cluster: Choice | None = None,
) -> Tensor:
    """One call of the kernels with given tiles or cut, and scratch that is poisoned."""
    from lorafold.ops.group import group_triton
    from lorafold.ops.launch import routed_triton

    x, out = device_tensor(case["x"], device), device_tensor(case["out"], device)
    plan = ops.Plan.empty(x.shape[0], tables.max_loras, device, block_rows=tile_rows)
    size = ops.scratch_bytes(x.shape[0], 1, tables.k_in, tables.max_rank)
    scratch = poisoned(size // 2, device=device).view(torch.uint8)
    group_triton(device_tensor(case["slots"], device), plan)
    routed_triton(
        x,
        (out,),
        ((tables.a_table,), (tables.b_table,), (tables.scale_table,), (tables.rank_table,)),
        tables.max_rank,
        case.numerics,
        None,
        1,
        plan.tile_key,
        plan.tile_rows,
        scratch,
        shrink=shrink,
        expand=expand,
        cluster=cluster,
    )
    return out.cpu()
