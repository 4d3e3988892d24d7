"""Compiling ahead: every kernel that calls of some shapes can need, several at a time.

Block sizes depend on the number of rows, so a server would meet new kernels for as long as prompts
have new lengths. Loading an adapter never compiles anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lorafold.numerics import Numerics, resolve
from lorafold.ops import tiles
from lorafold.ops.beside import MOST_ROWS
from lorafold.ops.cluster_choice import Choice, Shape, cluster_choice
from lorafold.ops.plan import Plan

if TYPE_CHECKING:
    from lorafold.ops.cluster import ClusterLaunch
    from lorafold.ops.compiled import Launch

__all__ = ["CallShape", "distinct_rows", "warm_up"]

_Job = tuple["Launch | ClusterLaunch", tuple[Any, ...]]


@dataclass(frozen=True)
class CallShape:
    """What the routes of a call decide of its kernels.

    Args:
        k_in: input features.
        n_outs: output features per route.
        max_rank: padded rank.
        num_keys: length of the tables.
        rows_per_token: rows of a token: 1, or the experts that it chooses.
        has_source: whether rows read x through an index, as experts' gate and up do.

    Example:
        >>> CallShape(k_in=64, n_outs=(64, 32, 32), max_rank=16, num_keys=8).rows_per_token
        1
    """

    k_in: int
    n_outs: tuple[int, ...]
    max_rank: int
    num_keys: int
    rows_per_token: int = 1
    has_source: bool = False


def warm_up(
    shapes: Iterable[CallShape],
    max_tokens: int,
    *,
    device: torch.device,
    numerics: Numerics | None = None,
) -> int:
    """Compile and load what calls of these shapes with up to `max_tokens` tokens can need.

    Operands are taken to start at multiples of 16 bytes, as those of a model do. Takes seconds to a
    minute the first time; Triton keeps what it has compiled on disk. Does nothing on a CPU.

    Args:
        shapes: the calls; equal ones count once.
        max_tokens: of a step.
        device: where the calls will be.
        numerics: "gemv" or "mma"; None for the device's default.

    Returns:
        The number of distinct launches, 0 on a CPU.

    Example:
        >>> shape = CallShape(k_in=64, n_outs=(64,), max_rank=16, num_keys=8)
        >>> warm_up([shape], 2048, device=torch.device("cpu"))
        0
    """
    if device.type != "cuda":
        return 0
    from triton import AsyncCompileMode

    from lorafold.ops.cluster import compile_ahead, has_clusters
    from lorafold.ops.compiled import on_device

    chosen, distinct = resolve(numerics, device), set(shapes)
    with on_device(device):
        rows = {shape: distinct_rows(shape, max_tokens, chosen) for shape in distinct}
        if has_clusters(device):
            compile_ahead(c for shape in distinct for c in clusters_of(shape, rows[shape], chosen))
        jobs = [job for shape in distinct for job in _jobs(shape, rows[shape], device, chosen)]
        # Triton compiles outside of Python's lock.
        with ThreadPoolExecutor(os.cpu_count()) as threads, AsyncCompileMode(threads):
            for launch, tensors in jobs:
                launch.compile(*tensors)
        for launch, tensors in jobs:  # loads what was compiled; there is no row to work on
            launch(*tensors)
    return len(jobs)


def distinct_rows(shape: CallShape, max_tokens: int, numerics: Numerics) -> list[int]:
    """Numbers of rows, up to those of `max_tokens` tokens, that need each block size once.

    Example:
        >>> distinct_rows(CallShape(64, (64,), 16, num_keys=8), 1, "gemv")
        [1]
    """
    found: dict[object, int] = {}
    for num_rows in range(shape.rows_per_token, max_tokens * shape.rows_per_token + 1):
        call = *_plan_tiles(shape, num_rows), shape.k_in, shape.n_outs, shape.max_rank
        sizes = tiles.call_tiles(numerics, num_rows, *call)
        group = num_rows <= MOST_ROWS, tiles.next_power_of_2(num_rows)
        found.setdefault((sizes, _cluster(shape, num_rows, numerics), group), num_rows)
    return list(found.values())


def clusters_of(shape: CallShape, rows: Iterable[int], numerics: Numerics) -> Iterator[Shape]:
    """The cluster kernels that calls of this shape with these numbers of rows need.

    Example:
        >>> list(clusters_of(CallShape(64, (64,), 16, num_keys=8), [1], "gemv"))
        []
    """
    for num_rows in rows:
        choice = _cluster(shape, num_rows, numerics)
        if choice is not None:
            _, height = _plan_tiles(shape, num_rows)
            yield Shape(height, shape.k_in, shape.n_outs, shape.max_rank, choice)


def _cluster(shape: CallShape, num_rows: int, numerics: Numerics) -> Choice | None:
    """What `launch.prepare` chooses for calls of that many rows."""
    if numerics != "mma":
        return None
    plan_tiles = _plan_tiles(shape, num_rows)
    return cluster_choice(*plan_tiles, shape.k_in, shape.n_outs, shape.max_rank)


def _plan_tiles(shape: CallShape, num_rows: int) -> tuple[int, int]:
    """Tiles of a plan, and rows of a tile."""
    height = tiles.plan_rows(num_rows, shape.num_keys)
    return tiles.max_tiles(num_rows, shape.num_keys, height), height


def _jobs(
    shape: CallShape, rows: Iterable[int], device: torch.device, numerics: Numerics
) -> Iterator[_Job]:
    """Launches of the shape for these numbers of rows, and tensors without a row that has an
    adapter.
    """
    from lorafold.ops.fold import fold_launch
    from lorafold.ops.group import group_launches
    from lorafold.ops.launch import prepare

    some = torch.zeros(64, dtype=torch.bfloat16, device=device)
    memory, slices = some.view(torch.uint8), len(shape.n_outs)
    outs = (some,) * slices

    def table(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (torch.zeros(shape.num_keys, dtype=dtype, device=device),) * slices

    addresses, ranks, scales = table(torch.int64), table(torch.int32), table(torch.float32)
    for num_rows in rows:
        plan = Plan.empty(num_rows, shape.num_keys, device)
        source = plan.keys if shape.has_source else None
        yield from group_launches(plan.keys, plan)
        is_beside = num_rows <= MOST_ROWS and not shape.has_source
        for folds in (True, False) if is_beside else (True,):
            call = prepare(
                num_rows, shape.k_in, shape.n_outs, shape.k_in, shape.n_outs, True,
                (True,) * slices, shape.max_rank, numerics, 1, shape.has_source,
                (plan.tile_key.shape[0], plan.block_rows), folds, device,
            )  # fmt: skip
            tables = addresses, addresses, scales, ranks
            operands = call.operands(
                some, memory, outs, tables, plan.tile_key, plan.tile_rows, source
            )
            yield from zip(call.launches, operands, strict=True)
        if is_beside:
            fold = fold_launch(
                num_rows, shape.num_keys, shape.n_outs, shape.n_outs, shape.n_outs,
                (True,) * 2 * slices,
            )  # fmt: skip
            yield fold, (outs, outs, addresses, scales, plan.keys)
