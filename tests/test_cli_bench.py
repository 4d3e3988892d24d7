"""`lorafold bench`: a table, JSON, a picture, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lorafold.bench import Site
from lorafold.cli.app import app
from lorafold.errors import LoraError
from tests.tiny_models import make_model

COMMAND = sys.modules["lorafold.cli.bench"]  # the name in the package is the function's
FEW = ["bench", "--device", "cpu", "--rows", "1", "--rows", "3", "--adapters", "2", "--rank", "4"]


@pytest.fixture(autouse=True)
def small_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = {"o": Site("o", 64, (32,), 5), "qkv": Site("qkv", 64, (32, 16), 5)}
    monkeypatch.setattr(COMMAND, "SITES", sites)


def ran(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_the_table_says_what_was_compared() -> None:
    result = ran(*FEW)
    assert result.exit_code == 0, result.output
    assert "numerics gemv" in result.stdout
    assert "240 outputs compared with the CPU reference first, none differs" in result.stdout


def test_json_for_programs() -> None:
    result = ran(*FEW, "--numerics", "mma", "--rank", "8", "--json")
    found = json.loads(result.stdout)
    assert found["numerics"] == "mma"
    assert found["copy_bytes_per_s"] > 0
    assert found["machine"]["versions"]["torch"] == torch.__version__
    sizes = [(row["rank"], row["site"], row["rows"], row["adapters"]) for row in found["rows"]]
    assert sizes == [
        (rank, site, rows, 2) for rank in (4, 8) for site in ("o", "qkv") for rows in (1, 3)
    ]
    assert all(row["over_floor"] > 0 for row in found["rows"])


def test_the_sites_of_a_model(tmp_path: Path) -> None:
    make_model().config.save_pretrained(tmp_path)
    found = json.loads(ran(*FEW, "--model", str(tmp_path), "--json").stdout)
    assert {(row["site"], row["layers"]) for row in found["rows"]} == {
        *(("qkv", 2), ("o", 2), ("gate_up", 2), ("down", 2))
    }


def test_a_picture(tmp_path: Path) -> None:
    assert ran(*FEW, "--plot", str(tmp_path / "b.svg")).exit_code == 0
    assert (tmp_path / "b.svg").read_text().startswith("<?xml")


def test_a_difference_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise LoraError("site o: row 0 differs")

    monkeypatch.setattr(COMMAND, "measure", broken)
    result = ran(*FEW)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "differs" in result.stderr
    assert json.loads(ran(*FEW, "--json").stdout)["message"] == "site o: row 0 differs"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--device", "gpu"], 2, "device `gpu` is not there; devices here: cpu"),
        (["--device", "cuda:99"], 2, "is not there"),
        (["--device", "meta"], 2, "is not there"),
        (["--rows", "0"], 2, "--rows"),
        (["--rank", "1000000000000"], 1, "hint: lower one of them"),
        (["--numerics", "fast"], 1, "gemv"),
        (["--model", "no/such/model"], 1, "no causal language model"),
        (["--plot", "nothing.xyz"], 1, "cannot be written"),
    ],
)
def test_refusals(
    arguments: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    result = ran(*FEW, *arguments)
    assert result.exit_code == code, result.output
    assert said in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", ["gemv", "mma"])
def test_on_a_gpu_kernels_are_timed(numerics: str) -> None:
    few = ["--rows", "1", "--rows", "70", "--adapters", "3", "--rank", "16"]
    result = ran("bench", "--device", "cuda", "--numerics", numerics, *few, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["machine"]["device"] == "cuda"
    assert found["copy_bytes_per_s"] > 1e11
    assert all(0.5 < row["us"] < 1000 for row in found["rows"])
