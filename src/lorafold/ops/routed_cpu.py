"""The routed operator on the CPU: rows of one key in tiles, tiles of equal ranks side by side.

A decode step has few rows per key, and small matrices. What takes time there is the number of
tensor operations, so one call does as much as it can in each: all routes in one shrink, all of one
rank in one expand. And which rows and matrices those are is the same in every step of a batch, so
it is worked out once. Rows, tiles and routes never meet in a sum.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafold.numerics import Numerics, resolve
from lorafold.ops import reference
from lorafold.ops.check import check_contents

__all__ = ["routed_cpu"]

_HELD_WEIGHTS = 1 << 22  # elements of A and B worked on at a time: 16 MiB as fp32
_SMALL_TABLE = 256  # keys of a table that is faster read as a whole
_REMEMBERED = 4096  # sets of tiles: a few per layer, and as many batches at a time as a model has

_Entries = tuple[tuple[int | float, ...], ...]


@dataclass(frozen=True, eq=False)
class _Expand:
    """Routes of one rank, side by side: B of each route and tile, and the scale of each tile."""

    rank: int
    routes: list[int]
    widths: list[int]
    b: list[Tensor]
    scales: list[Tensor]


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Tiles that are worked on at once, each of `num_rows` rows.

    Args:
        rows: [num_rows * tiles], where a tile that is not full has a row several times.
        num_rows: of each tile.
        ranks: of the adapted routes, equal ones side by side.
        a: A of each adapted route and tile.
        expands: by rank, in the same order.
    """

    rows: Tensor
    num_rows: int
    ranks: list[int]
    a: list[Tensor]
    expands: list[_Expand]


def routed_cpu(
    x: Tensor,
    outs: Sequence[Tensor],
    keys: Tensor | None,
    a_tables: Sequence[Tensor],
    b_tables: Sequence[Tensor],
    scale_tables: Sequence[Tensor],
    rank_tables: Sequence[Tensor],
    max_rank: int,
    numerics: str,
    source: Tensor | None,
    top_k: int,
    tile_key: Tensor | None,
    tile_rows: Tensor | None,
    scratch: Tensor | None,
) -> None:
    """`lorafold::routed_delta` for CPU tensors; tiles and scratch of the caller are not used."""
    num_keys = a_tables[0].shape[0]
    check_contents(x, outs, keys, num_keys)
    chosen = resolve(numerics, x.device)
    row_keys = [0] * outs[0].shape[0] if keys is None else keys.tolist()
    present = sorted({key for key in row_keys if 0 <= key < num_keys})
    if not present:
        return
    by_route = zip(a_tables, b_tables, scale_tables, rank_tables, strict=True)
    entries = tuple([tuple([_entries(table, present) for table in route]) for route in by_route])
    widths = tuple([out.shape[1] for out in outs])
    k_in = x.shape[1]
    with torch.inference_mode():  # views and small operations cost less there
        for tiles in _tiles(tuple(row_keys), tuple(present), entries, widths, k_in, max_rank):
            rows = tiles.rows if top_k == 1 else tiles.rows // top_k
            own = x.index_select(0, rows if source is None else source[tiles.rows])
            _fold_tiles(own.view(1, tiles.num_rows, -1, k_in), outs, tiles, chosen)


def _entries(table: Tensor, keys: list[int]) -> tuple[int | float, ...]:
    """What a table holds for some keys."""
    if table.shape[0] > _SMALL_TABLE:
        return tuple(table[torch.tensor(keys)].tolist())
    every = table.tolist()
    return tuple([every[key] for key in keys])


@functools.lru_cache(_REMEMBERED)
def _tiles(
    row_keys: tuple[int, ...],
    present: tuple[int, ...],
    entries: tuple[_Entries, ...],
    widths: tuple[int, ...],
    k_in: int,
    max_rank: int,
) -> tuple[_Tiles, ...]:
    """The tiles of a call; matrices are views, whose contents are read when they are used.

    Args:
        row_keys: per row.
        present: the keys that exist among them.
        entries: per route: A addresses, B addresses, scales and ranks of the keys that exist.
        widths: per route, its output features.
        k_in: input features.
        max_rank: columns of every B.
    """
    rows_of: dict[int, list[int]] = {key: [] for key in present}
    for row, key in enumerate(row_keys):
        if key in rows_of:
            rows_of[key].append(row)
    places_of: dict[tuple[int, ...], list[int]] = {}
    for place in range(len(present)):
        ranks = tuple(int(r[place]) if a[place] and b[place] else 0 for a, b, _, r in entries)
        if any(ranks):
            places_of.setdefault(ranks, []).append(place)
    found = []
    for ranks, places in places_of.items():
        rows = [rows_of[present[place]] for place in places]
        size = -(-sum(map(len, rows)) // len(rows))
        tiles = [
            (place, own[start : start + size])
            for place, own in zip(places, rows, strict=True)
            for start in range(0, len(own), size)
        ]
        weights = sum(r * (k_in + n_out) for r, n_out in zip(ranks, widths, strict=True))
        held = max(1, _HELD_WEIGHTS // weights)
        for start in range(0, len(tiles), held):
            some = tiles[start : start + held]
            padded = [own + own[:1] * (size - len(own)) for _, own in some]
            of_tiles = [place for place, _ in some]
            found.append(_side_by_side(padded, of_tiles, ranks, entries, widths, k_in, max_rank))
    return tuple(found)


def _side_by_side(
    rows: list[list[int]],
    places: list[int],
    ranks: tuple[int, ...],
    entries: tuple[_Entries, ...],
    widths: tuple[int, ...],
    k_in: int,
    max_rank: int,
) -> _Tiles:
    adapted = sorted((route for route, rank in enumerate(ranks) if rank), key=ranks.__getitem__)
    a = [
        reference.matrix_at(int(entries[route][0][place]), ranks[route], k_in)
        for route in adapted
        for place in places
    ]
    expands = []
    for rank, equal in itertools.groupby(adapted, key=ranks.__getitem__):
        routes = list(equal)
        b = [
            reference.matrix_at(int(entries[route][1][place]), widths[route], max_rank)
            for route in routes
            for place in places
        ]
        scales = [
            torch.tensor([[entries[route][2][place]] for place in places], dtype=torch.float32)
            for route in routes
        ]
        expands.append(_Expand(rank, routes, [widths[r] for r in routes], b, scales))
    of_tiles = torch.tensor(rows).t().flatten()
    return _Tiles(of_tiles, len(rows[0]), [ranks[route] for route in adapted], a, expands)


def _fold_tiles(x: Tensor, outs: Sequence[Tensor], tiles: _Tiles, numerics: Numerics) -> None:
    """x [1, num_rows, tiles, k_in]: fold the deltas of all adapted routes into the outputs."""
    _, num_rows, count, _ = x.shape
    shrunk = reference.tile_dots(x, torch.cat(tiles.a), tiles.ranks, numerics)
    xa, column = reference.round_bf16(shrunk), 0
    for expand in tiles.expands:
        size = len(expand.routes) * count * expand.rank
        own = xa.narrow(1, column, size).view(num_rows, -1, count, expand.rank).transpose(0, 1)
        column += size
        b = torch.cat(expand.b)[:, : expand.rank]
        deltas = reference.round_bf16(reference.tile_dots(own, b, expand.widths, numerics))
        of_routes = deltas.split_with_sizes([count * width for width in expand.widths], 1)
        for route, part, scale in zip(expand.routes, of_routes, expand.scales, strict=True):
            delta = part.view(num_rows, count, -1)
            base = outs[route].index_select(0, tiles.rows).view(delta.shape)
            folded = reference.fold(base, delta, scale)
            # A row that a tile has several times is written as often, with the same bits.
            outs[route].index_copy_(0, tiles.rows, folded.flatten(0, 1))
