"""Block sizes: pure functions of the shape, no tuning at run time.

No size here enters the bits (the contract's section 3); they decide only how fast a call is. Those
of "mma" come from `data/tiles.json`, which `benchmarks/tune.py` measured on an H200: the entry
whose shape is nearest, made smaller where the device has less shared memory.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TypeVar

from lorafold.numerics import Numerics
from lorafold.ops.nearest import nearest
from lorafold.ops.scratch import num_segments, num_sums

__all__ = [
    "EARLY_PROGRAMS",
    "HEIGHTS",
    "SHARED_MEMORY",
    "AnyExpandTile",
    "AnyShrinkTile",
    "ExpandTile",
    "GemvExpandTile",
    "GemvShrinkTile",
    "ShrinkTile",
    "beside_tiles",
    "call_tiles",
    "cdiv",
    "expand_tile",
    "gemv_expand_tile",
    "gemv_shrink_tile",
    "max_tiles",
    "next_power_of_2",
    "plan_rows",
    "shrink_tile",
]

EARLY_PROGRAMS = 1024
"""Up to this many programs of "gemv" let the next kernel start at once; more fill the device."""

HEIGHTS = (8, 16, 32, 64)
"""Rows of a tile that a plan can have."""

SHARED_MEMORY = 220 * 1024
"""Bytes that one program may take on the device of the table."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def plan_rows(num_rows: int, num_keys: int) -> int:
    """Rows of one tile of a plan: 8, 16, 32 or 64, by how many rows a key has on average.

    Example:
        >>> plan_rows(64, 8), plan_rows(8192, 1)
        (16, 64)
    """
    average = num_rows // max(1, min(num_rows, num_keys))
    return 8 if average < 4 else 16 if average <= 32 else 32 if average <= 128 else 64


def max_tiles(num_rows: int, num_keys: int, block_rows: int) -> int:
    """The most tiles that num_rows rows over num_keys keys can need.

    Example:
        >>> max_tiles(64, 8, 16)
        11
    """
    keys = min(num_rows, num_keys)
    return min(num_rows, (num_rows + keys * (block_rows - 1)) // block_rows)


@dataclass(frozen=True)
class ShrinkTile:
    """Block sizes of the shrink; `tile_rows` is the plan's.

    An `early` one lets the expand start at once; a late one when all before it is complete.
    """

    tile_rows: int
    block_ranks: int
    block_k: int
    num_warps: int
    num_stages: int
    early: bool = False

    @property
    def num_bytes(self) -> int:
        """Shared memory of a program."""
        return self.num_stages * (self.block_ranks + self.tile_rows) * self.block_k * 2


@dataclass(frozen=True)
class ExpandTile:
    """Block sizes of the expand. One program works through `blocks` column blocks.

    With `ahead`, outs are read ahead of the wait for the shrink, as far as that is safe.
    """

    tile_rows: int
    block_cols: int
    blocks: int
    block_k: int
    num_warps: int
    num_stages: int
    ahead: bool = False

    @property
    def num_bytes(self) -> int:
        """Shared memory of a program."""
        return self.num_stages * (self.block_cols + self.tile_rows) * self.block_k * 2


@dataclass(frozen=True)
class GemvShrinkTile:
    """Block sizes of the shrink of "gemv".

    Of the plan's tiles of `tile_rows` rows, one of `parts` programs has every `parts`-th block of
    `block_rows`. A thread has `vectors` 16-byte vectors of each row and rank on their way at once.
    """

    tile_rows: int
    block_rows: int
    parts: int
    block_ranks: int
    vectors: int


@dataclass(frozen=True)
class GemvExpandTile:
    """Block sizes of the expand of "gemv"; rows as in the shrink."""

    tile_rows: int
    block_rows: int
    parts: int
    block_cols: int
    num_warps: int


AnyShrinkTile = ShrinkTile | GemvShrinkTile
AnyExpandTile = ExpandTile | GemvExpandTile


@functools.cache
def shrink_tile(
    num_tiles: int,
    tile_rows: int,
    num_slices: int,
    k_in: int,
    max_rank: int,
    shared_memory: int = SHARED_MEMORY,
) -> ShrinkTile:
    """The shrink's block sizes for `num_tiles` tiles of `tile_rows` rows."""
    ranks = num_slices * max_rank
    shape = (tile_rows, num_tiles, ranks, num_slices, num_segments(k_in))
    block_ranks, block_k, warps, stages, early = _nearest("shrink", shape)
    tile = ShrinkTile(
        tile_rows,
        min(block_ranks, max(16, next_power_of_2(ranks))),
        min(block_k, max(16, next_power_of_2(k_in))),
        warps,
        stages,
        bool(early),
    )
    return _fitting(tile, shared_memory)


@functools.cache
def expand_tile(
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
    shape = (tile_rows, num_tiles, max_rank, columns, max(1, segments))
    block_cols, blocks, warps, stages, ahead = _nearest("expand", shape)
    block_k = max(16, min(256, next_power_of_2(max_rank)))
    if max_rank > block_k:
        block_cols, blocks, stages = min(block_cols, 128), 1, 1  # a run must hold all ranks at once
    tile = ExpandTile(tile_rows, block_cols, blocks, block_k, warps, stages, bool(ahead))
    return _fitting(tile, shared_memory)


_BESIDE_ROWS = 128
"""Up to this many rows, calls beside a base layer have block sizes of their own."""


@functools.cache
def beside_tiles(
    tile_rows: int, k_in: int, max_rank: int, shared_memory: int = SHARED_MEMORY
) -> tuple[ShrinkTile, ExpandTile]:
    """The block sizes of a call beside a base layer, whose programs need whole multiprocessors.

    So nothing may stand on one and wait: the shrink is a short pipeline that starts the expand
    late, and the expand has many small programs.

    Example:
        >>> shrink, expand = beside_tiles(16, 4096, 16)
        >>> shrink.block_k, shrink.early, expand.block_cols, expand.blocks
        (128, False, 128, 1)
    """
    ranks = max(16, next_power_of_2(max_rank))
    block_k = min(128, max(16, next_power_of_2(k_in)))
    shrink = ShrinkTile(tile_rows, min(ranks, 64), block_k, num_warps=4, num_stages=4)
    blocks = 2 if 16 < ranks <= 256 else 1
    expand = ExpandTile(
        tile_rows, 128, blocks, min(ranks, 256), num_warps=4, num_stages=blocks, ahead=blocks > 1
    )
    return _fitting(shrink, shared_memory), _fitting(expand, shared_memory)


_FEW_PROGRAMS = 512
"""Fewer programs than this do not fill the device, so that they are made smaller."""


def _rows_of_key(num_rows: int, num_tiles: int, tile_rows: int) -> int:
    """Rows of a key in one tile, on average, as a power of two: `max_tiles` the other way round."""
    keys = max(1, cdiv(num_tiles * tile_rows - num_rows, tile_rows - 1))
    return min(tile_rows, next_power_of_2(num_rows // min(keys, num_rows)))


@functools.cache
def gemv_shrink_tile(
    num_rows: int, num_tiles: int, tile_rows: int, num_slices: int, k_in: int, max_rank: int
) -> GemvShrinkTile:
    """The block sizes of "gemv"'s shrink."""
    rows = _rows_of_key(num_rows, num_tiles, tile_rows)
    block_rows, block_ranks = min(4, rows), 4

    def is_few() -> bool:
        programs = num_tiles * (rows // block_rows) * num_slices * cdiv(max_rank, block_ranks)
        return programs < _FEW_PROGRAMS

    if is_few():
        block_rows = min(2, rows)
    while block_ranks > 1 and is_few():
        block_ranks //= 2
    # All of K at once if registers hold it, else groups, of which they hold two.
    loads, whole = block_rows + block_ranks, max(1, k_in // 512)
    most = 28 if loads == 2 else 16
    fitting = [n for n in range(1, whole) if whole % n == 0 and loads * n <= most]
    vectors = whole if loads * whole <= 24 else fitting[-1]
    return GemvShrinkTile(tile_rows, block_rows, rows // block_rows, block_ranks, vectors)


@functools.cache
def gemv_expand_tile(
    num_rows: int, num_tiles: int, tile_rows: int, columns: int, max_rank: int
) -> GemvExpandTile:
    """The block sizes of "gemv"'s expand."""
    rows = _rows_of_key(num_rows, num_tiles, tile_rows)
    block_rows, warps = min(8, rows), 4
    lanes = min(64, next_power_of_2(cdiv(max_rank, 8)))
    block_cols = 512 // lanes  # four vectors per thread

    def is_few() -> bool:
        return num_tiles * (rows // block_rows) * cdiv(columns, block_cols) < _FEW_PROGRAMS

    if is_few():
        block_rows = min(4, rows)
    while warps > 1 and is_few():
        block_cols, warps = block_cols // 2, warps // 2
    return GemvExpandTile(tile_rows, block_rows, rows // block_rows, block_cols, warps)


def call_tiles(
    numerics: Numerics,
    num_rows: int,
    num_tiles: int,
    tile_rows: int,
    k_in: int,
    n_outs: tuple[int, ...],
    max_rank: int,
    shared_memory: int = SHARED_MEMORY,
    *,
    is_beside: bool = False,
) -> tuple[ShrinkTile, ExpandTile] | tuple[GemvShrinkTile, GemvExpandTile]:
    """The block sizes of both kernels of a call, which may run beside a base layer."""
    fixed, slices, columns = (num_tiles, tile_rows), len(n_outs), sum(n_outs)
    if numerics == "gemv":
        return (
            gemv_shrink_tile(num_rows, *fixed, slices, k_in, max_rank),
            gemv_expand_tile(num_rows, *fixed, columns, max_rank),
        )
    if is_beside and num_rows <= _BESIDE_ROWS:
        return beside_tiles(tile_rows, k_in, max_rank, shared_memory)
    segments = num_sums(k_in, numerics)
    return (
        shrink_tile(*fixed, slices, k_in, max_rank, shared_memory),
        expand_tile(*fixed, columns, max_rank, segments, shared_memory),
    )


_Tile = TypeVar("_Tile", ShrinkTile, ExpandTile)

_WEIGHTS = {"shrink": (8.0, 1.0, 2.0, 1.0, 0.5), "expand": (8.0, 1.0, 2.0, 1.0, 0.25)}
"""How much a factor of two matters in each part of a shape: the height of a tile most."""


@functools.cache
def _table() -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Per kernel the measured shapes, and the block sizes that were fastest."""
    text = files("lorafold").joinpath("data/tiles.json").read_text()
    table = json.loads(text)
    return {kernel: [(tuple(shape), tuple(b)) for shape, b in table[kernel]] for kernel in _WEIGHTS}


def _nearest(kernel: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The block sizes of the nearest measured shape."""
    sizes = nearest(_table()[kernel], shape, _WEIGHTS[kernel])
    assert sizes is not None  # the table has entries
    return sizes


def _fitting(tile: _Tile, shared_memory: int) -> _Tile:
    """A tile as it is, or with fewer stages, then smaller blocks, until it fits the device."""
    while tile.num_bytes > shared_memory and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    smaller = "block_k" if isinstance(tile, ShrinkTile) else "block_cols"
    while tile.num_bytes > shared_memory and getattr(tile, smaller) > 16:
        tile = replace(tile, **{smaller: getattr(tile, smaller) // 2})
    return tile
