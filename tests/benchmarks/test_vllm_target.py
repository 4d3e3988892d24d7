"""The plugin beside vLLM's kernels on small shapes: both are called, gated and timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from benchmarks import vllm_target
from benchmarks.peers import contest, imports, vllm, vllm_experts
from benchmarks.peers.fetch import FETCHED
from benchmarks.vllm_target import Batch, Dense, Experts

LINEARS = {"qkv": (64, (48, 32, 32)), "o": (64, (48,))}
SMALL_EXPERTS = {"hidden": 64, "inner": 32, "num_experts": 4, "top_k": 2}


@pytest.fixture(autouse=True)
def forget_peers() -> Iterator[None]:
    """Stand-ins named like real packages must not be found by other tests."""
    yield
    vllm.kernels.cache_clear()
    imports.forget("vllm")


def call_all(calls: Sequence[Callable[[], None]], replays: int = 9) -> float:
    """In place of a clock that needs CUDA graphs."""
    for call in calls:
        call()
    return 2.0


def small_batch(device: str = "cpu") -> Batch:
    return Batch(4, 6, num_adapters=2, rank=16, device=device)


def test_rows_are_the_base_the_adapters_and_padding() -> None:
    batch = small_batch()
    assert batch.slots.tolist() == [-1, 0, 1, -1, -1, -1]
    assert batch.punica.tokens.slots.tolist() == batch.slots.tolist()
    assert sorted(batch.samples) == [0, 1, 3, 5]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_wrong_bits_and_forgotten_rows_stop_the_run(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = small_batch()
    site = (
        Dense("qkv", *LINEARS["qkv"], batch, 1)
        if kind == "dense"
        else Experts(batch, 1, **SMALL_EXPERTS)
    )
    assert vllm_target.check(site, batch)[0] > 0
    call = site.ours()[0]

    def spoiled() -> None:
        call()
        site.outputs[0][5] += 1  # a padded row

    monkeypatch.setattr(site, "ours", lambda: [spoiled])
    with pytest.raises(SystemExit, match="row 5: bits differ"):
        vllm_target.check(site, batch)
    monkeypatch.setattr(site, "ours", lambda: [lambda: None])
    with pytest.raises(SystemExit, match="row 1: bits differ"):
        vllm_target.check(site, batch)


def test_every_layer_has_a_time_of_both(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not (FETCHED / "vllm").is_dir():
        pytest.skip("vllm is not fetched")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(vllm_experts, "tile_rows", lambda *_: 16)
    monkeypatch.setattr(vllm_target, "LINEARS", LINEARS)
    monkeypatch.setattr(vllm_target, "Batch", lambda *sizes: Batch(*sizes, device=device))
    monkeypatch.setattr(
        vllm_target, "Experts", lambda batch, layers: Experts(batch, layers, **SMALL_EXPERTS)
    )
    for module in (vllm_target, contest):
        monkeypatch.setattr(module, "graph_us", call_all)
    path = tmp_path / "target.json"
    sizes = ["--rows", "4/6", "--adapters", "2", "--layers", "1", "--expert-layers", "1"]
    vllm_target.main([*sizes, "--json", str(path)])
    saved = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == saved
    assert [row["layer"] for row in saved["rows"]] == ["qkv", "o", "experts"]
    for row in saved["rows"]:
        assert (row["ours_us"], row["vllm_us"], row["vllm_bi_us"]) == (2.0, 2.0, 2.0)
    assert saved["geomean"] == {"vllm": 1.0, "vllm_bi": 1.0}
