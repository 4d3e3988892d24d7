"""Block sizes: pure functions of the shape, no tuning at run time.

No size here enters the bits (the contract's section 3); they decide only how fast a call is. Those
of "mma" come from `data/tiles.json`, which `benchmarks/tune.py` measured on an H200: the entry
whose shape is nearest, made smaller where the device has less shared memory.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TypeVar

from lorafold.numerics import Numerics
from lorafold.ops.scratch import num_segments, num_sums

__all__ = [
    "SHARED_MEMORY",
    "ExpandTile",
    "ShrinkTile",
    "call_tiles",
    "cdiv",
    "expand_tile",
    "max_tiles",
    "next_power_of_2",
    "plan_rows",
    "shrink_tile",
]

SHARED_MEMORY = 220 * 1024
"""Bytes that one program may take on the device of the table."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def plan_rows(num_rows: int, num_keys: int) -> int:
    """Rows of one tile of a plan: 16, 32 or 64, by how many rows a key has on average.

    Example:
        >>> plan_rows(64, 8), plan_rows(8192, 1)
        (16, 64)
    """
    average = num_rows // max(1, min(num_rows, num_keys))
    return 16 if average <= 32 else 32 if average <= 128 else 64


def max_tiles(num_rows: int, num_keys: int, block_rows: int) -> int:
    """The most tiles that num_rows rows over num_keys keys can need.

    Example:
        >>> max_tiles(64, 8, 16)
        11
    """
    keys = min(num_rows, num_keys)
    return min(num_rows, (num_rows + keys * (block_rows - 1)) // block_rows)


def _lanes(k: int) -> int:
    """Lanes of "gemv" that can hold an element: 8 at least, for the tail of K, and 64 at most."""
    return max(8, min(64, next_power_of_2(cdiv(k, 8))))


@dataclass(frozen=True)
class ShrinkTile:
    """Block sizes of the shrink; `tile_rows` is the plan's."""

    tile_rows: int
    block_rows: int
    block_ranks: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def num_bytes(self) -> int:
        """Shared memory of a program."""
        return self.num_stages * (self.block_ranks + self.block_rows) * self.block_k * 2


@dataclass(frozen=True)
class ExpandTile:
    """Block sizes of the expand. One program works through `blocks` column blocks."""

    tile_rows: int
    block_rows: int
    block_cols: int
    blocks: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def num_bytes(self) -> int:
        """Shared memory of a program."""
        return self.num_stages * (self.block_cols + self.block_rows) * self.block_k * 2


@functools.cache
def shrink_tile(
    numerics: Numerics,
    num_tiles: int,
    tile_rows: int,
    num_slices: int,
    k_in: int,
    max_rank: int,
    shared_memory: int = SHARED_MEMORY,
) -> ShrinkTile:
    """The shrink's block sizes for `num_tiles` tiles of `tile_rows` rows."""
    if numerics == "gemv":
        return ShrinkTile(tile_rows, 4, 4, _lanes(k_in) * 8, 4, 2)
    ranks = num_slices * max_rank
    shape = (tile_rows, num_tiles, ranks, num_slices, num_segments(k_in))
    block_ranks, block_k, warps, stages = _nearest("shrink", shape)
    tile = ShrinkTile(
        tile_rows,
        tile_rows,
        min(block_ranks, max(16, next_power_of_2(ranks))),
        min(block_k, max(16, next_power_of_2(k_in))),
        warps,
        stages,
    )
    return _fitting(tile, shared_memory)


@functools.cache
def expand_tile(
    numerics: Numerics,
    num_tiles: int,
    tile_rows: int,
    columns: int,
    max_rank: int,
    segments: int,
    shared_memory: int = SHARED_MEMORY,
) -> ExpandTile:
    """The expand's block sizes for `num_tiles` tiles, `columns` output columns in all, and xa as
    that many `segments` sums (0: xa is ready).
    """
    if numerics == "gemv":
        lanes = _lanes(max_rank)
        return ExpandTile(tile_rows, 4, max(4, 256 // lanes), 1, lanes * 8, 4, 1)
    shape = (tile_rows, num_tiles, max_rank, columns, max(1, segments))
    block_cols, blocks, warps, stages = _nearest("expand", shape)
    block_k = max(16, min(256, next_power_of_2(max_rank)))
    if max_rank > block_k:
        block_cols, blocks, stages = min(block_cols, 128), 1, 1  # a run must hold all ranks at once
    tile = ExpandTile(tile_rows, tile_rows, block_cols, blocks, block_k, warps, stages)
    return _fitting(tile, shared_memory)


def call_tiles(
    numerics: Numerics,
    num_tiles: int,
    tile_rows: int,
    k_in: int,
    n_outs: tuple[int, ...],
    max_rank: int,
    shared_memory: int = SHARED_MEMORY,
) -> tuple[ShrinkTile, ExpandTile]:
    """The block sizes of both kernels of a call."""
    fixed = numerics, num_tiles, tile_rows
    segments = num_sums(k_in, numerics)
    return (
        shrink_tile(*fixed, len(n_outs), k_in, max_rank, shared_memory),
        expand_tile(*fixed, sum(n_outs), max_rank, segments, shared_memory),
    )


_Tile = TypeVar("_Tile", ShrinkTile, ExpandTile)

_WEIGHTS = {"shrink": (8.0, 1.0, 2.0, 1.0, 0.5), "expand": (8.0, 1.0, 2.0, 1.0, 0.25)}
"""How much a factor of two matters in each part of a shape: the height of a tile most."""


@functools.cache
def _table() -> dict[str, list[tuple[tuple[int, ...], tuple[int, int, int, int]]]]:
    """Per kernel the measured shapes, and the block sizes that were fastest."""
    text = files("lorafold").joinpath("data/tiles.json").read_text()
    table = json.loads(text)
    return {
        kernel: [(tuple(shape), (b[0], b[1], b[2], b[3])) for shape, b in table[kernel]]
        for kernel in _WEIGHTS
    }


def _nearest(kernel: str, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The block sizes of the measured shape that is the fewest factors of two away."""

    def distance(entry: tuple[tuple[int, ...], object]) -> float:
        pairs = zip(_WEIGHTS[kernel], entry[0], shape, strict=True)
        return sum(weight * abs(math.log2(one / other)) for weight, one, other in pairs)

    return min(_table()[kernel], key=distance)[1]


def _fitting(tile: _Tile, shared_memory: int) -> _Tile:
    """A tile as it is, or with fewer stages, then smaller blocks, until it fits the device."""
    while tile.num_bytes > shared_memory and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    smaller = "block_k" if isinstance(tile, ShrinkTile) else "block_cols"
    while tile.num_bytes > shared_memory and getattr(tile, smaller) > 16:
        tile = replace(tile, **{smaller: getattr(tile, smaller) // 2})
    return tile
