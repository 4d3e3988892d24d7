"""What can be known about the benchmarks without a GPU: that they run, gate, count and draw."""

from __future__ import annotations

import doctest
import importlib
import json
import pkgutil
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import benchmarks
import pytest
import torch
from benchmarks import __main__ as first_look
from benchmarks import expert_sites, experts, ops, plot, record, reference, step, tables
from benchmarks.expert_sites import PROJECTIONS, ExpertLoad, Projection
from benchmarks.peers import contest, fetch, imports
from benchmarks.peers.agreement import worst_error

from lorafold.bench import H200_COPY_BYTES_PER_US
from tests.benchmarks.small_loads import small_load

MODULES = [m.name for m in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


def call_all(calls: Sequence[Callable[[], None]], replays: int = 9) -> float:
    """In place of a clock that needs CUDA graphs."""
    for call in calls:
        call()
    return 2.0


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_and_their_examples_hold(name: str) -> None:
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
    assert module.__doc__


@pytest.mark.parametrize("module", [ops, experts, step])
def test_results_go_to_a_dated_file_unless_told(module: Any, tmp_path: Path) -> None:
    assert module.parse([]).json is None
    dated = module.parse(["--json"]).json
    assert dated.parent == record.RESULTS
    assert dated.name.startswith(module.__name__.rpartition(".")[2])
    assert module.parse(["--json", str(tmp_path / "x.json")]).json == tmp_path / "x.json"


def test_ops_writes_its_record_after_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []

    def workload(site: Any, rank: int, rows: int, adapters: int) -> Any:
        loads.append((site.name, rank, rows, adapters))
        return small_load((48, 32), rank=rank, num_rows=rows, num_adapters=adapters)

    monkeypatch.setattr(ops, "Workload", workload)
    monkeypatch.setattr(ops, "LOADS", ((1, 2), (5, 3)))
    monkeypatch.setattr(ops, "graph_us", call_all)
    path = tmp_path / "ops.json"
    ops.main(["--sites", "o", "--ranks", "8,16", "--processes", "0", "--json", str(path)])
    assert loads == [("o", 8, 1, 2), ("o", 8, 5, 3), ("o", 16, 1, 2), ("o", 16, 5, 3)]
    (line,) = path.read_text().splitlines()
    saved = json.loads(line)
    assert saved["benchmark"] == "ops"
    assert {"date", "device", "torch", "triton", "lorafold"} <= saved.keys()
    assert [row["mma_us"] for row in saved["rows"]] == [2.0] * 4
    assert saved["geomean"]["floor"] == 4.0


def test_peers_that_are_wrong_or_break_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    load = small_load((48,))

    def right(operands: Any) -> list[Callable[[], None]]:
        def call() -> None:
            operands.outs[0].copy_(contest.our_result(load, operands.outs[0], "mma"))

        return [call]

    def broken(operands: Any) -> list[Callable[[], None]]:
        raise RuntimeError("out of registers\nand more")

    def contestant(name: str, column: str, prepare: Any) -> contest.Contestant:
        return contest.Contestant(name, column, prepare)

    monkeypatch.setattr(contest, "graph_us", call_all)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        contest,
        "CONTESTANTS",
        (
            contestant("right", "vllm_us", right),
            contestant("idle", "vllm_bi_us", lambda _: [lambda: None]),
            contestant("broken", "sglang_us", broken),
        ),
    )
    result = contest.measure_peers(load, "mma")
    assert (result["vllm_us"], result["vllm_bi_us"], result["sglang_us"]) == (2.0, None, None)
    assert result["peers"]["idle"].startswith("wrong: off by ")
    assert result["peers"]["broken"] == "failed: RuntimeError: out of registers"


@pytest.mark.parametrize(
    ("spoil", "fine"),
    [
        (lambda t: t, True),
        (lambda t: t * (1 + 2**-8), True),
        (lambda t: t * 1.1, False),
        (lambda t: t.roll(1, 0), False),
        (lambda t: t.index_fill(1, torch.tensor([3]), float("nan")), False),
    ],
)
def test_agreement_tells_rounding_from_error(spoil: Callable[..., Any], fine: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    before, delta = (torch.randn(600, 64, generator=generator) for _ in range(2))
    ours = (before + 8 * delta).bfloat16()
    assert (worst_error(before, ours, before + spoil(8 * delta)) <= 1) == fine


@pytest.mark.parametrize(
    ("rank", "tokens", "pairs", "gate_and_up", "down"),
    [(16, 1, 8, 0.3, 0.2), (16, 64, 428, 18.7, 10.1), (64, 2048, 1024, 197.0, 122.9)],
)
def test_floor_of_experts(
    rank: int, tokens: int, pairs: int, gate_and_up: float, down: float
) -> None:
    """Against floors that were computed independently."""
    by_name = {p.name: p for p in PROJECTIONS}
    for name, expected in (("gate+up", gate_and_up), ("down", down)):
        projection = by_name[name]
        moved = pairs * projection.pair_bytes(rank) + projection.row_bytes(tokens, 8)
        assert round(moved / H200_COPY_BYTES_PER_US, 1) == expected


SMALL = (
    Projection("gate_up", 32, (48,), False),
    Projection("gate+up", 32, (24, 24), False),
    Projection("down", 24, (32,), True),
)


def small_experts(projection: Projection, rank: int, tokens: int, adapters: int) -> ExpertLoad:
    return ExpertLoad(
        projection, rank, tokens, adapters, device="cpu", num_experts=6, top_k=2, pool_bytes=1,
        max_repetitions=5,
    )  # fmt: skip


def test_experts_measures_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "ExpertLoad", small_experts)
    monkeypatch.setattr(experts, "PROJECTIONS", SMALL)
    monkeypatch.setattr(experts, "graph_us", call_all)
    path = tmp_path / "experts.json"
    experts.main(["--ranks", "8", "--adapters", "1,2", "--tokens", "1,5", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["adapters"], row["tokens"]) for row in rows] == [(1, 1), (1, 5), (2, 1), (2, 5)]
    for row in rows:
        assert row["elements"] == 2 * (48 + 48 + 32)
        assert row["layer us"] == row["plan_us"] == 2.0
        assert 0 < row["gate_up floor_us"] < row["gate+up floor_us"]


def test_experts_stops_where_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    load = small_experts(SMALL[1], 8, 5, 2)
    assert experts.check(load) == 2 * 48
    monkeypatch.setattr(ExpertLoad, "run", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="bits differ"):
        experts.check(load)


def test_expert_repetitions_differ_in_adapters_or_experts() -> None:
    load = small_experts(SMALL[0], 8, 5, 2)
    seen = {(call.first, tuple(call.experts.tolist())) for call in load.calls}
    assert len(seen) == load.repetitions == 5


def test_layer_runs_both_projections_on_one_choice() -> None:
    gate_up, down = (small_experts(p, 8, 5, 2) for p in (SMALL[0], SMALL[2]))
    plan = gate_up.make_plan(gate_up.calls[0].routes[0], gate_up.calls[0].experts)
    expected = []
    for load in (gate_up, down):
        load.calls[3].out.fill_(0)
        out = load.calls[3].out.clone()
        experts_of_layer = gate_up.calls[3].experts
        load.run(3, out=out, choice=(experts_of_layer, load.make_plan(
            load.calls[3].routes[0], experts_of_layer
        )))  # fmt: skip
        expected.append(out)
    experts.layer(gate_up, down, plan, 3)
    for load, out in zip((gate_up, down), expected, strict=True):
        assert torch.equal(load.calls[3].out, out)
        assert out.any()


LINEARS = {
    "qkv": (32, (32, 8, 8)),
    "o": (32, (32,)),
    "gate_up": (32, (48, 48)),
    "down": (48, (32,)),
}


def test_step_runs_gates_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(step.Step, device="cpu", linears=LINEARS)
    monkeypatch.setattr(step, "Step", small)
    monkeypatch.setattr(step, "graph_us", call_all)
    path = tmp_path / "step.json"
    step.main(
        ["--rows", "5", "--adapters", "2", "--rank", "8", "--layers", "2", "--json", str(path)]
    )
    (row,) = json.loads(path.read_text())["rows"]
    assert row["elements"] == 48 + 32 + 96 + 32
    assert {row[f"{name}_us"] for name in ("base", "add", "after", "beside")} == {2.0}
    assert {row[f"{name}_percent"] for name in ("add", "after", "beside")} == {0.0}
    weights = 2 * 2 * (32 * 48 + 32 * 32 + 32 * 96 + 48 * 32)
    adapters = 2 * 2 * 2 * 8 * (3 * 32 + 48 + 32 + 32 + 2 * 32 + 96 + 48 + 32)
    run = small(5, 2, 8, 2)
    assert (run.base_bytes, run.adapter_bytes) == (weights, adapters)


def test_step_stops_where_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step.Step(5, 2, 8, 1, device="cpu", linears=LINEARS)
    assert step.check(run, row=4) == 48 + 32 + 96 + 32
    monkeypatch.setattr(step.Step, "fold", lambda *_: None)
    with pytest.raises(SystemExit, match="bits differ"):
        step.check(run)


def test_step_stops_where_the_streams_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "Step", partial(step.Step, device="cpu", linears=LINEARS))
    monkeypatch.setattr(step, "graph_us", call_all)
    monkeypatch.setattr(step, "apply_lora_beside", lambda routes, x, base, slots, plan: base())
    with pytest.raises(SystemExit, match="differ in bits"):
        step.main(["--rows", "5", "--adapters", "2", "--rank", "8", "--layers", "2"])


def test_lora_step_differs_from_base_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = step.Step(5, 2, 8, 1, device="cpu", linears=LINEARS)
    outputs: list[list[torch.Tensor]] = []
    linear = torch.nn.functional.linear

    def kept(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        outputs[-1].append(linear(x, weight))
        return outputs[-1][-1]

    monkeypatch.setattr(torch.nn.functional, "linear", kept)
    for run_step in (run.base, run.after, run.beside):
        outputs.append([])
        run_step()
    base, after, beside = outputs
    assert len(base) == len(after) == len(beside) == 4
    for without, first, second in zip(base, after, beside, strict=True):
        assert not torch.equal(without, first)
        assert torch.equal(first, second)


def fake_record(date: str, site: str, **more: Any) -> dict[str, Any]:
    row = {"site": site, "rank": 16, "rows": 1, "adapters": 8, "floor_us": 0.5}
    times = {"mma_us": 4.0, "vllm_us": 8.0, "vllm_bi_us": None, "sglang_us": 9.0}
    versions = {"vllm": "1.2", "sglang": "3.4"}
    return {
        "benchmark": "ops", "date": date, "device": "a device", "peer_versions": versions,
        "rows": [row | times], **more,
    }  # fmt: skip


def test_plot_draws_the_newest_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "ops-1": fake_record("2025-01-01", "old"),
        "ops-2": fake_record("2025-01-02", "o"),
        "ops-3": fake_record("2025-01-02", "down"),
        "step": {"benchmark": "step", "date": "2025-01-03", "rows": []},
    }
    for name, content in files.items():
        record.save(content, tmp_path / "results" / f"{name}.json")
    monkeypatch.setattr(plot, "RESULTS", tmp_path / "results")
    picture = tmp_path / "docs" / "picture.svg"
    plot.main(["--out", str(picture)])
    first = picture.read_bytes()
    assert first.startswith(b"<?xml")
    plot.main(["--out", str(picture)])
    assert picture.read_bytes() == first
    assert [r["rows"][0]["site"] for r in plot.newest(tmp_path / "results")] == ["o", "down"]


def test_plot_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"hint: python -m benchmarks\.ops --peers --json"):
        plot.newest(tmp_path)
    records = [fake_record("2025-01-02", "o"), fake_record("2025-01-02", "o", device="another")]
    with pytest.raises(SystemExit, match="one picture shows one device"):
        plot.draw(records, tmp_path / "x.svg")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU has its own benchmark")
@pytest.mark.parametrize("given", [[], ["--repeats", "2"]])
def test_first_look_without_gpu_times_the_reference(
    given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(reference, "main", lambda: seen.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["benchmarks", *given])
    first_look.main()
    assert seen == [given or ["--repeats", "5"]]


def test_unpack_takes_what_is_listed_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as members:
        for name in ("p/a.py", "p/b.py", "p/configs/c.json", "p/large.so"):
            members.writestr(name, "1234")
    monkeypatch.setitem(fetch.FILES, "p", ("p/a.py", "p/configs/*"))
    target = tmp_path / "p"
    (target / "stale").mkdir(parents=True)
    assert fetch.unpack(wheel, "p", target) == 8
    found = {str(f.relative_to(target)) for f in target.rglob("*") if f.is_file()}
    assert found == {"p/a.py", "p/configs/c.json"}
    monkeypatch.setitem(fetch.FILES, "p", ("p/missing.py",))
    with pytest.raises(FileNotFoundError, match=r"no member p/missing\.py"):
        fetch.unpack(wheel, "p", target)


def test_files_are_imported_without_their_package(tmp_path: Path) -> None:
    inner = tmp_path / "some_engine" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "some_engine" / "__init__.py").write_text("raise RuntimeError('ran')\n")
    (inner / "part.py").write_text(
        "import json\nfrom some_engine.flags import FLAG\n"
        "def late():\n    from some_engine.flags import FLAG\n    return FLAG\n"
    )
    real = sys.modules["json"]
    for flag in (1, 2):
        stand_ins = [imports.stand_in("some_engine.flags", FLAG=flag)]
        shadows = [imports.stand_in("json", shadow=True)]
        (part,) = imports.import_files(tmp_path, ["some_engine.inner.part"], stand_ins, shadows)
        assert (part.FLAG, part.late(), part.json.shadow) == (flag, flag, True)
        assert sys.modules["json"] is real
    imports.forget("some_engine")
    assert not [name for name in sys.modules if name.startswith("some_engine")]
    with pytest.raises(FileNotFoundError, match=r"hint: python -m benchmarks\.peers\.fetch"):
        imports.import_files(tmp_path, ["other_engine.part"], [])


def test_experts_and_linears_are_those_of_the_models() -> None:
    assert (expert_sites.HIDDEN, expert_sites.INNER) == (2048, 768)
    assert (expert_sites.NUM_EXPERTS, expert_sites.TOP_K) == (128, 8)
    assert sum(k * sum(ns) for k, ns in step.LINEARS.values()) == 192_937_984


def test_the_performance_page_has_the_newest_tables() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    for name, table in (("ops", tables.ops_table), ("experts", tables.experts_table)):
        lines = list(table(tables.newest(name)))
        assert len(lines) > 10
        assert "\n".join(lines) in page, f"run `python -m benchmarks.tables {name}`"


@pytest.mark.parametrize(
    ("ours", "floor", "peer", "site", "missed"),
    [
        (4.0, 1.0, 9.0, "o", ""),
        (5.0, 1.0, 9.0, "o", "ac"),
        (5.0, 1.0, 9.0, "down", "a"),
        (13.0, 10.0, 14.0, "o", ""),  # near the floor
        (14.0, 10.0, 30.0, "o", "b"),
        (14.0, 10.0, 20.0, "o", "ab"),
        (14.0, 3.0, 20.0, "o", "a"),  # less than 16 MB
    ],
)
def test_missed_targets(ours: float, floor: float, peer: float, site: str, missed: str) -> None:
    row = {"site": site, "mma_us": ours, "floor_us": floor, "vllm_us": peer}
    assert tables.misses(row | {"vllm_bi_us": None, "sglang_us": peer + 1}) == missed
