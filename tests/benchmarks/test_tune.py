"""The search for block sizes, as far as it goes without a GPU: what is tried, what is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from benchmarks import tune

from lorafold.numerics import SEGMENT
from lorafold.ops import tiles


@pytest.mark.parametrize("tile_rows", tiles.HEIGHTS)
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("num_slices", [1, 2, 3])
def test_candidates_fit_and_pair(tile_rows: int, rank: int, num_slices: int) -> None:
    shrinks = tune.shrink_candidates(tile_rows, rank, num_slices)
    expands = tune.expand_candidates(tile_rows, rank)
    for found in (shrinks, expands):
        assert len(set(found)) == len(found) > 3
        assert all(tile.num_bytes <= tiles.SHARED_MEMORY for tile in found)
        assert all(tile.tile_rows == tile_rows for tile in found)
    assert all(SEGMENT % tile.block_k == 0 for tile in shrinks)
    assert all(any(tune.may_pair(s, e) for e in expands) for s in shrinks)
    assert all(any(tune.may_pair(s, e) for s in shrinks) for e in expands)


@pytest.mark.parametrize("load", tune.LOADS + tune.EXPERT_LOADS)
def test_the_height_that_plans_have_is_tried(load: tuple[int, int]) -> None:
    rows, adapters = load
    assert tiles.plan_rows(rows, adapters) in tune.heights_of(rows, adapters)


def test_the_fastest_pair_is_what_the_table_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = (
        tiles.ShrinkTile(8, 64, 128, 4, 5, True),
        tiles.ExpandTile(8, 64, 4, 64, 4, 3, True),
    )
    other = (
        dataclasses.replace(best[0], block_ranks=16),
        dataclasses.replace(best[1], block_cols=128),
    )
    row = {"slices": 1, "rank": 64, "tile_rows": 8, "num_tiles": 64, "k_in": 4096, "columns": 512}
    row["pair"] = [[us, *map(dataclasses.astuple, p)] for us, p in ((5.0, best), (6.0, other))]
    record = {"device": "one", "date": "a day", "torch": "2", "triton": "3", "rows": [row]}
    monkeypatch.setattr(tune, "TABLE", tmp_path / "tiles.json")
    tune.TABLE.write_text(json.dumps({kernel: [] for kernel in ("shrink", "expand")}))
    tune.write_table([record])
    table = json.loads(tune.TABLE.read_text())
    entries = {
        kernel: [(tuple(shape), tuple(sizes)) for shape, sizes in table[kernel]]
        for kernel in ("shrink", "expand")
    }
    monkeypatch.setattr(tiles, "_table", lambda: entries)
    for cached in (tiles.shrink_tile, tiles.expand_tile):
        cached.cache_clear()
    try:
        assert tiles.call_tiles("mma", 64, 64, 8, 4096, (512,), 64) == best
    finally:
        for cached in (tiles.shrink_tile, tiles.expand_tile):
            cached.cache_clear()
