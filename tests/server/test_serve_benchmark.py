"""The serving benchmark: whose requests a mix is made of, and that it stops on wrong answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks import serve
from benchmarks.serve import MIXES, main, pick
from benchmarks.serve_models import SHAPES, write_apart
from benchmarks.serve_target import metrics_clock

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
    rows = main(arguments(server, "--mixes", "base,zipf", "--repeats", "2", "--json", str(path)))
    assert [row["mix"] for row in rows] == ["base", "zipf"]
    assert all(row["equal_alone"] == 1 and row["tokens_per_s"] > 0 for row in rows)
    record = json.loads(path.read_text())
    assert record["rows"] == rows
    assert record["warm_up_s"] > 0
    assert "100.0% of base" in capsys.readouterr().out


def test_wrong_answers_stop_it(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    real, number = serve._ask, iter(range(1000))

    async def noisy(*asked: Any) -> Any:
        timed = await real(*asked)
        return serve.Timed(f"{timed.text}{next(number)}", timed.times)

    monkeypatch.setattr(serve, "_ask", noisy)
    with pytest.raises(SystemExit, match=r"base: 0.0% of the answers are those alone"):
        main(arguments(server, "--mixes", "base"))


def test_a_model_of_given_shapes_is_written_once_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(SHAPES, "small", {"vocab_size": 300, **sizes, **heads})
    own = ["--model-shapes", "small", "--work", str(tmp_path), "--adapters", "2", "--rank", "4"]
    few = ["--requests", "4", "--clients", "2", "--max-tokens", "3", "--checked", "0"]
    (row,) = main([*own, *few, "--mixes", "distinct"])
    assert (row["adapters"], row["equal_alone"]) == (2, None)
    (folder,) = tmp_path.iterdir()

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}

    before = written()
    assert len(before) == 3
    write_apart(folder, SHAPES["small"], num_adapters=2, rank=4, device="cpu")
    assert written() == before


def test_the_servers_own_clocks_are_read_from_call_to_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = iter([(10, 2.0, 1.5), (10, 2.0, 1.5), (30, 4.0, 3.0)])

    def get(url: str, headers: Any) -> httpx.Response:
        names = ("steps", "step_seconds", "forward_seconds")
        lines = zip(names, next(pages), strict=True)
        text = "\n".join(f"lorafold_{name}_total {value}" for name, value in lines)
        return httpx.Response(200, text=text, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    clock = metrics_clock("http://x", "key")
    assert clock is not None
    assert clock() is None  # no step since
    assert clock() == pytest.approx(25.0)
