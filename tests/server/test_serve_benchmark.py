"""The serving benchmark: whose requests a mix is made of, and that it stops on wrong answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from benchmarks import serve
from benchmarks.serve import MIXES, main, pick

from tests.server.conftest import KEY
from tests.server.process import Process

NAMES = [f"a{at}" for at in range(10)]


def test_mixes_are_what_they_say() -> None:
    picked = {mix: Counter(pick(mix, "base", NAMES, 2000)) for mix in MIXES}
    assert picked["base"] == {"base": 2000}
    assert picked["identical"] == {"a0": 2000}
    assert picked["distinct"] == dict.fromkeys(NAMES, 200)
    assert set(picked["uniform"]) == set(picked["zipf"]) == set(NAMES)
    assert max(picked["uniform"].values()) < 270
    assert 1.5 < picked["zipf"]["a0"] / picked["zipf"]["a1"] < 2.7
    assert pick("zipf", "base", NAMES, 9) == pick("zipf", "base", NAMES, 9)


def arguments(server: Process, *more: str) -> list[str]:
    few = ["--requests", "12", "--clients", "4", "--max-tokens", "4"]
    return ["--url", server.url, "--api-key", KEY, *few, *more]


def test_figures_are_printed_and_recorded(server: Process, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "serve.json"
    rows = main(arguments(server, "--mixes", "base,zipf", "--json", str(path)))
    assert [row["mix"] for row in rows] == ["base", "zipf"]
    assert all(row["equal_alone"] == 1 and row["tokens_per_s"] > 0 for row in rows)
    assert json.loads(path.read_text())["rows"] == rows
    assert "100.0% of base" in capsys.readouterr().out


def test_wrong_answers_stop_it(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    real, number = serve._ask, iter(range(1000))

    async def noisy(*asked: Any) -> Any:
        timed = await real(*asked)
        return serve.Timed(f"{timed.text}{next(number)}", timed.times)

    monkeypatch.setattr(serve, "_ask", noisy)
    with pytest.raises(SystemExit, match=r"base: 0.0% of the answers are those alone"):
        main(arguments(server, "--mixes", "base"))
