"""Which calls take the cluster kernel, and how it is cut: pure functions of the shape, as `tiles`.

No choice here enters the bits. Shapes that were measured stand in `data/clusters.json`, which
`benchmarks/tune_clusters.py` writes, with what was best there, or with null where the two Triton
kernels were. A call takes the entry whose shape is nearest; where none is near, the Triton kernels.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

from lorafold.numerics import SEGMENT
from lorafold.ops.nearest import nearest
from lorafold.ops.scratch import num_segments
from lorafold.ops.tiles import cdiv

__all__ = ["Choice", "Shape", "candidates", "cluster_choice", "shape_of_call"]

_PITCH = 2 * SEGMENT + 16
_MOST_SHARED, _OF_SM, _RESERVED = 227 * 1024, 228 * 1024, 1024
"""Bytes of shared memory: of a CTA, of a multiprocessor, what the system takes of each CTA's."""


@dataclass(frozen=True)
class Choice:
    """What is free to tune.

    Args:
        cluster: CTAs of a cluster: 1 to 16 (more than 8 are not portable).
        groups: clusters that share a tile's columns; each does the shrink for itself.
        warpgroups: of a CTA; with one there are more registers, and more CTAs per multiprocessor.
        wgmma: the faster tensor-core instruction for the shrink, or mma.sync.
        x_parts: in which x is waited for: 1, 2 or 4.

    Example:
        >>> print(Choice(8), "|", Choice(4, groups=2, wgmma=False))
        C8 G1 W1 X1 | C4 G2 W1 X1 mma
    """

    cluster: int
    groups: int = 1
    warpgroups: int = 1
    wgmma: bool = True
    x_parts: int = 1

    def __str__(self) -> str:
        text = f"C{self.cluster} G{self.groups} W{self.warpgroups} X{self.x_parts}"
        return text if self.wgmma else text + " mma"


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for, and what follows from it; the constants of `cuda/shape.cuh`.

    Args:
        tile_rows: rows of a tile.
        k_in: input features.
        n_outs: output features per slice.
        max_rank: padded rank.
        choice: how the work is cut.

    Example:
        >>> shape = Shape(8, 4096, (4096,), 16, Choice(8))
        >>> shape.fits, shape.unit_ranks, shape.shared_bytes
        (True, 16, 77384)
    """

    tile_rows: int
    k_in: int
    n_outs: tuple[int, ...]
    max_rank: int
    choice: Choice

    @property
    def blocks(self) -> int:
        """Blocks of 16 ranks, of all slices."""
        return len(self.n_outs) * cdiv(self.max_rank, 16)

    @property
    def unit_ranks(self) -> int:
        """As few as give each warpgroup of a cluster at most one unit; 0 if there are too many."""
        most, segments = self.choice.cluster * self.choice.warpgroups, num_segments(self.k_in)
        fitting = (n for n in (1, 2, 3, 4) if segments * cdiv(self.blocks, n) <= most)
        return 16 * next(fitting, 0)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        c, segments, halves = self.choice, num_segments(self.k_in), self.tile_rows // 8
        units = segments * cdiv(self.blocks, self.unit_ranks // 16)
        chunks = cdiv(sum(cdiv(n, 64) for n in self.n_outs), c.cluster * c.groups)
        x_a = cdiv(units, c.cluster) * (16 * self.tile_rows * 128 + self.unit_ranks * _PITCH)
        b_out = chunks * (8 * (16 * self.max_rank + 16) + halves * 1024)
        sums = segments * self.blocks * halves * 512 + self.blocks * halves * 256
        return x_a + b_out + sums + (8 * c.warpgroups + 1) * 8

    @property
    def fits(self) -> bool:
        """Whether there is a kernel for it."""
        return (
            self.tile_rows in (8, 16)
            and self.k_in % 128 == 0
            and self.max_rank % 8 == 0
            and len(self.n_outs) <= 3
            and all(n % 8 == 0 for n in self.n_outs)
            and self.unit_ranks > 0
            and self.shared_bytes <= _MOST_SHARED
        )

    @property
    def min_ctas(self) -> int:
        """CTAs of a multiprocessor, by shared memory, and few enough to leave registers."""
        by_registers = 3 if self.choice.warpgroups == 1 else 2
        return max(1, min(by_registers, _OF_SM // (self.shared_bytes + _RESERVED)))

    @property
    def defines(self) -> dict[str, str]:
        """The compile-time constants."""
        c = self.choice
        values = {
            "CLUSTER": c.cluster, "GROUPS": c.groups, "WARPGROUPS": c.warpgroups,
            "MIN_CTAS": self.min_ctas, "TILE": self.tile_rows, "K_IN": self.k_in,
            "N_OUTS": ",".join(map(str, self.n_outs)), "MAX_RANK": self.max_rank,
            "UNIT_RANKS": self.unit_ranks, "WGMMA": int(c.wgmma), "X_PARTS": c.x_parts,
            "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip
        return {name: str(value) for name, value in values.items()}


@functools.lru_cache(65536)
def cluster_choice(
    num_tiles: int, tile_rows: int, k_in: int, n_outs: tuple[int, ...], max_rank: int
) -> Choice | None:
    """How the cluster kernel is cut for a plan's `num_tiles` tiles, None where the Triton kernels
    are faster, where nobody has measured anything near, or where there is no such kernel.

    Example:
        >>> cluster_choice(num_tiles=64, tile_rows=64, k_in=4096, n_outs=(4096,), max_rank=16)
    """
    shape = shape_of_call(num_tiles, tile_rows, k_in, n_outs, max_rank)
    choice = nearest(_table(), shape, _WEIGHTS, larger=2.0, farthest=_FARTHEST)
    if choice is None or not Shape(tile_rows, k_in, n_outs, max_rank, choice).fits:
        return None
    return choice


def shape_of_call(
    num_tiles: int, tile_rows: int, k_in: int, n_outs: tuple[int, ...], max_rank: int
) -> tuple[int, ...]:
    """What the table has entries for.

    Example:
        >>> shape_of_call(8, 16, 4096, (4096, 1024, 1024), 64)
        (16, 8, 64, 3, 6144, 4)
    """
    return tile_rows, num_tiles, max_rank, len(n_outs), sum(n_outs), num_segments(k_in)


_WEIGHTS = (8.0, 1.0, 2.0, 2.0, 1.0, 1.0)
"""How much a factor of two matters in each part of a shape: the height of a tile most. Where a call
is larger than what was measured it matters twice as much: larger calls are those that lose.
"""

_FARTHEST = 3.0
"""Beyond this distance, in weighted factors of two, a measurement says nothing."""


@functools.cache
def _table() -> list[tuple[tuple[int, ...], Choice | None]]:
    """The measured shapes, and what was fastest."""
    text = files("lorafold").joinpath("data/clusters.json").read_text()
    entries = json.loads(text)["clusters"]
    return [(tuple(shape), sizes and Choice(*sizes)) for shape, sizes in entries]


def candidates(
    tile_rows: int, k_in: int, n_outs: tuple[int, ...], max_rank: int
) -> Iterator[Choice]:
    """What is worth timing.

    Example:
        >>> print(*candidates(8, 4096, (4096,), 64), sep=", ")
        C8 G1 W1 X1, C8 G1 W2 X1, C16 G1 W1 X1, C16 G1 W2 X1
    """
    columns = sum(cdiv(n, 64) for n in n_outs)
    for cluster in (2, 4, 8, 16):
        for groups in (1, 2, 4) if sum(n_outs) > 16384 else (1,):
            for warpgroups in (1, 2):
                choice = Choice(cluster, groups, warpgroups)
                chunks = cdiv(columns, cluster * groups)
                has_work = 4 * (warpgroups - 1) <= chunks <= 32 * warpgroups
                if has_work and Shape(tile_rows, k_in, n_outs, max_rank, choice).fits:
                    yield choice
