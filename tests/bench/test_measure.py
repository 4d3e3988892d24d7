"""Workloads, their check and their clocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lorafold.adapter import TargetShape
from lorafold.bench import SITES, Site, Workload, check, copy_bytes_per_us, measure, sites_of
from lorafold.bench import measure as package_measure
from lorafold.errors import LoraError
from tests.benchmarks.small_loads import small_load

SITE = Site("qkv", 96, (48, 16))
BOTH = pytest.mark.parametrize("numerics", ["gemv", "mma"])


def load(
    num_rows: int = 5, num_adapters: int = 3, device: str = "cpu", **settings: Any
) -> Workload:
    return Workload(SITE, 8, num_rows, num_adapters, device=device, **settings)


def test_sites_are_those_of_llama() -> None:
    """193 of 218 million parameters of a layer are in its linear layers, whose sizes are known."""
    features = {name: (site.k_in, sum(site.n_outs)) for name, site in SITES.items()}
    assert sum(k * n for k, n in features.values()) == 218_103_808
    assert {site.layers for site in SITES.values()} == {32}


def test_layers_that_share_x_are_one_site() -> None:
    shapes = {}
    for layer in range(3):
        path = f"model.layers.{layer}"
        for name, n_out in (("q", 16), ("k", 8), ("v", 8), ("o", 16)):
            shapes[f"{path}.self_attn.{name}_proj"] = TargetShape(16, n_out)
        width = 24 if layer < 2 else 32
        for name in ("gate_proj", "up_proj"):
            shapes[f"{path}.mlp.{name}"] = TargetShape(16, width)
        shapes[f"{path}.mlp.down_proj"] = TargetShape(width, 16)
    found = [(site.name, site.k_in, site.n_outs, site.layers) for site in sites_of(shapes)]
    assert found == [
        ("qkv", 16, (16, 8, 8), 3),
        ("o", 16, (16,), 3),
        ("gate_up", 16, (24, 24), 2),
        ("down", 24, (16,), 2),
        ("gate_up", 16, (32, 32), 1),
        ("down", 32, (16,), 1),
    ]


@pytest.mark.parametrize(("num_rows", "num_adapters", "used"), [(2, 3, 2), (5, 3, 3)])
def test_floor_counts_what_is_used_once(num_rows: int, num_adapters: int, used: int) -> None:
    one = load(num_rows, num_adapters, copy_bytes_per_us=100.0)
    adapters = used * 2 * 8 * (96 + 48 + 96 + 16)
    rows = num_rows * 2 * (96 + 2 * 64)
    assert one.floor_bytes == adapters + rows
    assert one.floor_us == one.floor_bytes / 100


@BOTH
def test_check_compares_all_outputs_of_sampled_rows(numerics: Any) -> None:
    assert check(load(), numerics) == 2 * 64
    assert check(load(num_rows=1), numerics) == 64
    assert check(small_load((48, 32)), numerics, rows=5) == 5 * 80  # rows and slots out of order


@BOTH
@pytest.mark.parametrize("column", [0, 47])
def test_one_wrong_bit_has_no_time(
    numerics: Any, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = load()
    call_site = package_measure.__globals__["call_site"]

    def broken(*given: Any) -> None:
        call_site(*given)
        one.calls[0].outs[0][4].view(torch.int16)[column] ^= 1

    monkeypatch.setitem(package_measure.__globals__, "call_site", broken)
    with pytest.raises(LoraError, match=r"site qkv, rank 8, 5 rows: row 4 differs"):
        measure(one, numerics)


def test_nothing_done_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(package_measure.__globals__, "call_site", lambda *_: None)
    with pytest.raises(LoraError, match="differs"):
        check(load(), "gemv")


def test_a_row_of_results() -> None:
    row = measure(load(copy_bytes_per_us=1000.0), "gemv")
    assert row.keys() == {
        *("site", "layers", "rank", "rows", "adapters", "elements", "us", "floor_us", "over_floor")
    }
    assert (row["site"], row["rank"], row["rows"], row["adapters"]) == ("qkv", 8, 5, 3)
    assert row["over_floor"] == pytest.approx(row["us"] / row["floor_us"], rel=1e-3)


def test_memory_copies_at_some_rate() -> None:
    rate = copy_bytes_per_us(torch.device("cpu"))
    assert 10 < rate < 1e7  # 10 MB/s to 10 TB/s


@pytest.mark.gpu
@BOTH
def test_operands_on_a_gpu_are_cold_and_timed(numerics: Any) -> None:
    one = load(device="cuda")
    assert len(one.calls) == 512
    first = {call.routes[0].a_table[0].item() for call in one.calls}
    assert len(first) > 400
    row = measure(one, numerics)
    assert 0.5 < row["us"] < 500


@pytest.mark.gpu
def test_a_large_copy_on_a_gpu() -> None:
    assert 1e5 < copy_bytes_per_us(torch.device("cuda")) < 2e7
