"""The table of the cluster kernel, as it is written from what was measured."""

from __future__ import annotations

import dataclasses
import json

import pytest
from benchmarks import tune_clusters

from lorafold.ops import cluster_choice, tiles
from lorafold.ops.cluster_choice import Choice

HEAD = {"benchmark": "clusters", "device": "one", "date": "a day", "torch": "2"}
SLOW, FAST = {"t8 C4 G1 W1 X1": 3.5}, {"t8 C8 G1 W1 X4 mma": 3.0}
ROWS = [
    {"row": ["o", 16, 8, 8], "triton": 4.0, "times": FAST | SLOW},
    {"row": ["o", 16, 64, 8], "triton": 5.0, "times": {"t16 C8 G1 W1 X1": 4.9} | FAST},
    {"row": ["qkv", 32, 64, 64], "triton": 9.0, "times": {"t8 C16 G1 W2 X1": 8.0}},
    {"row": ["down", 16, 2048, 8], "triton": 9.0, "times": {"t8 C16 G1 W2 X1": 8.0}},
    {"trying": "something"},
]  # fmt: skip


@pytest.mark.parametrize(
    "choice", [Choice(8), Choice(4, 2, 2, False, 4), Choice(16, 1, 1, True, 2)]
)
def test_names_are_read_back(choice: Choice) -> None:
    assert tune_clusters.parse(f"t16 {choice}") == (16, choice)
    with pytest.raises(SystemExit, match="not a choice"):
        tune_clusters.parse("t16 C8")


def test_calls_find_what_was_fastest_in_the_tiles_of_their_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = json.loads(tune_clusters.table([HEAD, *ROWS]))
    assert {k: written[k] for k in ("device", "date", "torch")} == {
        k: HEAD[k] for k in ("device", "date", "torch")
    }
    entries = [(tuple(shape), s and Choice(*s)) for shape, s in written["clusters"]]
    assert len(entries) == 3  # of the last row no time is for tiles of 32 rows or more
    monkeypatch.setattr(cluster_choice, "_table", lambda: entries)
    cluster_choice.cluster_choice.cache_clear()

    def choice(rows: int, adapters: int, n_outs: tuple[int, ...], rank: int) -> Choice | None:
        height = tiles.plan_rows(rows, adapters)
        num_tiles = tiles.max_tiles(rows, adapters, height)
        return cluster_choice.cluster_choice(num_tiles, height, 4096, n_outs, rank)

    assert choice(8, 8, (4096,), 16) == Choice(8, wgmma=False, x_parts=4)
    assert choice(64, 8, (4096,), 16) is None  # 2 % is noise
    assert choice(64, 64, (4096, 1024, 1024), 32) == Choice(16, 1, 2)
    cluster_choice.cluster_choice.cache_clear()


def test_an_empty_table_is_one() -> None:
    assert json.loads(tune_clusters.table([]))["clusters"] == []


def test_details_are_fields_of_a_choice() -> None:
    for details in tune_clusters.DETAILS:
        dataclasses.replace(Choice(8), **details)
