"""The picture: a panel per rank and site, the same bytes every time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lorafold.bench.plot import OURS, Series, draw
from lorafold.errors import BackendError, LoraError

ROWS = [
    {"site": site, "rank": rank, "rows": rows, "adapters": 8, "floor_us": 1.0, "us": 2.0 * rows}
    for rank in (8, 16)
    for site in ("o", "down")
    for rows in (1, 8)
]
SERIES = [Series("us", "lorafold", OURS), Series("missing_us", "nobody")]


def test_panels_are_drawn_the_same_every_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "b.svg"
    draw(ROWS, SERIES, path, title="LoRA on something")
    first = path.read_bytes()
    assert first.startswith(b"<?xml")
    for text in (b"down, rank 16", b"LoRA on something: lower is better", b"1/8", b"8/8"):
        assert b"<!-- " + text + b" -->" in first
    draw(ROWS, SERIES, path, title="LoRA on something")
    assert path.read_bytes() == first


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoraError, match="cannot be written"):
        draw(ROWS, SERIES, tmp_path / "b.nothing", title="")


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: dict[str, Any] = sys.modules
    monkeypatch.setitem(modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r"hint: pip install 'lorafold\[plot\]'"):
        draw(ROWS, SERIES, tmp_path / "b.svg", title="")
