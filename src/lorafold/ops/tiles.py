"""Block sizes: pure functions of the shape, no tuning at run time.

No size here enters the bits (the contract's section 3); they decide only how fast a call is. Each
function has few answers, all of which the tests run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import Tensor

from lorafold.numerics import SEGMENT, Numerics

__all__ = [
    "ExpandTile",
    "ShrinkTile",
    "cdiv",
    "expand_tile",
    "max_tiles",
    "next_power_of_2",
    "plan_rows",
    "shrink_tile",
]

NUM_SMS = 132
"""Multiprocessors of the device that the rules were fitted on; others run the same bits."""

SHARED_MEMORY = 200 * 1024
"""Bytes that the pipelined blocks of one program may take."""


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

    def programs(self, num_rows: int, tile_key: Tensor | None) -> int:
        """Programs along the rows."""
        return _row_programs(self.tile_rows, self.block_rows, num_rows, tile_key)


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

    def programs(self, num_rows: int, tile_key: Tensor | None) -> int:
        """Programs along the rows."""
        return _row_programs(self.tile_rows, self.block_rows, num_rows, tile_key)


def _row_programs(tile_rows: int, block_rows: int, num_rows: int, tile_key: Tensor | None) -> int:
    if tile_key is None:
        return cdiv(num_rows, block_rows)
    return int(tile_key.shape[0]) * (tile_rows // block_rows)


@functools.cache
def shrink_tile(
    numerics: Numerics, num_tiles: int, tile_rows: int, num_slices: int, k_in: int, max_rank: int
) -> ShrinkTile:
    """The shrink's block sizes for `num_tiles` tiles of `tile_rows` rows."""
    if numerics == "gemv":
        lanes = _lanes(k_in)
        return ShrinkTile(tile_rows, 4, 4, lanes * 8, 4, 2)
    ranks = max(16, min(64, next_power_of_2(max_rank)))
    segments = cdiv(k_in, SEGMENT)
    if k_in < SEGMENT:
        block_k = min(128, max(16, next_power_of_2(k_in)))
        return ShrinkTile(tile_rows, tile_rows, ranks, block_k, 4, 4)
    programs = num_tiles * num_slices * segments
    if tile_rows > 16:
        block_k, stages = (128, 5) if programs < 256 else (128, 3) if programs < 400 else (64, 3)
        return ShrinkTile(tile_rows, tile_rows, ranks, block_k, 4, stages)
    # Few programs: a whole segment at once, in narrow rank blocks that fill the device.
    if programs * cdiv(max_rank, 16) <= (3 if ranks == 16 else 2) * NUM_SMS:
        return ShrinkTile(tile_rows, tile_rows, 16, SEGMENT, 2, 1)
    if ranks == 16:
        return ShrinkTile(tile_rows, tile_rows, 16, 128 if programs <= 600 else 64, 2, 4)
    if programs <= 200:
        return ShrinkTile(tile_rows, tile_rows, ranks, 256, 4, 3)
    return ShrinkTile(tile_rows, tile_rows, ranks, 64, 4, 5 if programs <= 264 else 3)


@functools.cache
def expand_tile(
    numerics: Numerics, num_tiles: int, tile_rows: int, columns: int, max_rank: int, segments: int
) -> ExpandTile:
    """The expand's block sizes for `num_tiles` tiles, `columns` output columns in all, and xa as
    that many `segments` sums (0: xa is ready).
    """
    if numerics == "gemv":
        lanes = _lanes(max_rank)
        return ExpandTile(tile_rows, 4, max(4, 256 // lanes), 1, lanes * 8, 4, 1)
    block_k = max(16, min(256, next_power_of_2(max_rank)))
    total = num_tiles * cdiv(columns, 128)
    if total <= 6 * NUM_SMS or max_rank > block_k:
        cols = 64 if total <= NUM_SMS else 128
        return ExpandTile(tile_rows, tile_rows, cols, 1, block_k, 4, 1)
    if tile_rows > 16:
        # The more segment sums an xa has, the more columns should share the adding.
        least = 8 if segments * max_rank > 512 else 4
        blocks, warps, stages = max(least, min(16, next_power_of_2(total // 512))), 8, 3
    elif total <= 24 * NUM_SMS:
        blocks, warps, stages = 2, 4, 2
    else:
        blocks, warps, stages = 8, 4, 3
    while stages > 1 and stages * 128 * 2 * (block_k + tile_rows) > SHARED_MEMORY:
        stages -= 1
    return ExpandTile(tile_rows, tile_rows, 128, blocks, block_k, warps, stages)
