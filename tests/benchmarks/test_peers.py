"""The peers' kernels through our loaders, on small shapes: their results must be ours, rounded.

Their files are no part of this repository; without them (`python -m benchmarks.peers.fetch`) these
tests are skipped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks import experts as expert_benchmark
from benchmarks import ops
from benchmarks.expert_sites import ExpertLoad, Projection
from benchmarks.peers import contest, imports, sglang, sglang_v2, vllm, vllm_experts
from benchmarks.peers.agreement import worst_error
from benchmarks.peers.fetch import FETCHED
from benchmarks.peers.operands import stack

from tests import interpreter
from tests.benchmarks.small_loads import small_load

DENSE = [
    (contestant, n_outs)
    for contestant in contest.CONTESTANTS
    for n_outs in ((48,), (48, 32, 32), (32, 32))
    if contestant.column == "sglang_us" or n_outs == (48, 32, 32)
]
"""vLLM has one path for any slices; SGLang has up to three."""


@pytest.fixture(autouse=True)
def sums_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers use `tl.sum`, whose order ours must not depend on."""
    monkeypatch.setattr(interpreter, "any_sum", True)


@pytest.fixture(autouse=True)
def forget_peers() -> Iterator[None]:
    """Stand-ins named like real packages must not be found by other tests."""
    yield
    for loaded in (vllm.kernels, sglang.kernels):
        loaded.cache_clear()
    for package in ("vllm", "sglang"):
        imports.forget(package)


def fetched(name: str) -> None:
    if not (FETCHED / name).is_dir():
        pytest.skip(f"{name} is not fetched")


@pytest.mark.parametrize(("contestant", "n_outs"), DENSE, ids=lambda v: getattr(v, "name", str(v)))
def test_dense_peers_agree_with_us(
    contestant: contest.Contestant,
    n_outs: tuple[int, ...],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched("sglang" if contestant.column == "sglang_us" else "vllm")
    if contestant.name == "triton_v2":
        without_cuda(monkeypatch)
    # The 64 splits of vLLM's shrink take long in the interpreter.
    load = small_load(n_outs, device=device, repetitions=1 if contestant.name == "vllm" else 2)
    operands = stack(load)
    for i, call in enumerate(contestant.prepare(operands)):
        before = operands.outs[i].clone()
        ours = contest.our_result(load, before, "mma", repetition=i)
        call()
        assert worst_error(before, ours, operands.outs[i]) <= 1
        # A gate that cannot fail would prove nothing.
        assert worst_error(before, before, operands.outs[i]) > 1


FAMILIES = {
    "grouped": {},
    "split": {"a_tiles": {"SPLIT_K": 4}},
    "planes": {"a_tiles": {"SPLIT_K": 4, "SPLIT_MODE": "planes"}},
    "per row": {"a_family": "per_row", "b_family": "per_row"},
    "all slots": {"a_family": "all_slots", "b_family": "per_row"},
}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_plan_of_triton_v2_agrees_with_us(
    family: str, large: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan table would choose among these by rows and widths."""
    fetched("sglang")
    without_cuda(monkeypatch)
    plan = sglang.kernels().plan
    options = dict(FAMILIES[family])
    options["a_tiles"] = {**plan._a_tiles(), **options.get("a_tiles", {})}
    for name, kind in (("a_family", plan.AFamily), ("b_family", plan.BFamily)):
        options[name] = kind(options.get(name, "grouped"))
    forced = plan.DensePlan(**options)
    monkeypatch.setattr(plan.DensePlanTable, "plan_for", lambda *_, **__: forced)
    monkeypatch.setattr(sglang_v2, "_SMALL_ROUTE_ROWS", 0 if large else 512)
    load = small_load((48, 32, 32), device=device, repetitions=1)
    operands = stack(load)
    before = operands.outs[0].clone()
    ours = contest.our_result(load, before, "mma")
    sglang_v2.v2_calls(operands)[0]()
    assert worst_error(before, ours, operands.outs[0]) <= 1


def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton_v2 refuses to lay out its expand on a CPU; nothing else in it minds."""
    if torch.cuda.is_available():
        return
    code = sglang.kernels()
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        code.runner,
        "slice_geometry",
        lambda offsets, block, device: code.lora_b._build_geometry(
            offsets, block, device, offsets[:-1]
        ),
    )


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "rank"),
    [(1, 16, 16), (9, 48, 64), (12, 16, 16)],
    ids=["GEMV", "unsorted", "sorted"],
)
@pytest.mark.parametrize(
    "projection",
    [
        Projection("fused", 128, (64,), False),
        Projection("split", 128, (32, 32), False),
        Projection("down", 32, (48,), True),
    ],
    ids=lambda p: p.name,
)
def test_vllm_experts_agree_with_us(
    projection: Projection,
    num_tokens: int,
    num_experts: int,
    rank: int,
    invariant: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched("vllm")
    monkeypatch.setattr(vllm_experts, "tile_rows", lambda *_: 64 if invariant else 16)
    load = ExpertLoad(
        projection, rank, num_tokens, 3, device=device, num_experts=num_experts, top_k=2,
        pool_bytes=1, max_repetitions=2,
    )  # fmt: skip
    calls = vllm_experts.expert_calls(
        expert_benchmark.vllm_operands(load), inner=32, invariant=invariant
    )
    for i, call in enumerate(calls):
        out = load.calls[i].out
        before, ours = out.clone(), out.clone()
        load.run(i, out=ours)
        call()
        assert worst_error(before, ours, out) <= 1
        assert worst_error(before, before, ours) > 1


def call_all(calls: list[Callable[[], None]], replays: int = 9) -> float:
    """In place of a clock that needs CUDA graphs."""
    for call in calls:
        call()
    return 2.0


def test_a_site_has_a_time_of_every_peer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "sglang"):
        fetched(name)
    without_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for module in (ops, contest):
        monkeypatch.setattr(module, "graph_us", call_all)
    load = small_load((48,), device=device, num_adapters=2, repetitions=1)
    row = ops.measure(load, ["mma"], peers=True)
    assert row["peers"] == dict.fromkeys((c.name for c in contest.CONTESTANTS), 2.0)
    assert (row["vllm_us"], row["vllm_bi_us"], row["sglang_us"]) == (2.0, 2.0, 2.0)
    assert (row["of_best_peer"], row["sglang"]) == (1.0, "triton")


def test_experts_have_a_time_of_vllm(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched("vllm")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(vllm_experts, "tile_rows", lambda *_: 16)
    for module in (expert_benchmark, contest):
        monkeypatch.setattr(module, "graph_us", call_all)
    small = [Projection("gate_up", 32, (48,), False), Projection("down", 24, (32,), True)]
    monkeypatch.setattr(expert_benchmark, "PROJECTIONS", small)
    monkeypatch.setattr(
        expert_benchmark,
        "ExpertLoad",
        partial(ExpertLoad, device=device, num_experts=6, top_k=2, pool_bytes=1, max_repetitions=3),
    )
    row = expert_benchmark.measure(16, 5, 2, peers=True)
    assert (row["gate_up vllm_us"], row["down vllm_bi_us"]) == (2.0, 2.0)
    assert (row["layer vllm_us"], row["layer vllm_bi_us"]) == (4.0, 4.0)


def test_sorted_pairs_hold_every_pair_once() -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand((30, 7), generator=generator).topk(2).indices.int()
    slots = torch.randint(-1, 3, (30,), generator=generator, dtype=torch.int32)
    tiles = vllm_experts.sort_pairs(experts, slots, rows=16, num_experts=7, max_loras=3)
    found = {}
    for slot in range(3):
        for place in range(int(tiles.padded[slot])):
            pair = int(tiles.pairs[slot, place])
            if pair < experts.numel():
                found[pair] = slot, int(tiles.tile_expert[slot, place // 16])
    expected = {
        pair: (int(slots[pair // 2]), int(experts.flatten()[pair]))
        for pair in range(experts.numel())
        if slots[pair // 2] >= 0
    }
    assert found == expected


def test_config_of_the_measured_experts_is_found() -> None:
    fetched("vllm")
    sizes = [vllm_experts.tile_rows(128, 768, tokens, False) for tokens in (1, 64, 256, 2048)]
    assert sizes == [16, 16, 32, 128]
    assert vllm_experts.tile_rows(128, 768, 1, True) == 64


def test_plan_table_of_sglang_is_read_as_pydantic_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched("sglang")
    pytest.importorskip("pydantic")
    ours = sglang.kernels().plan
    theirs = imports.stand_in("plan_read_by_pydantic", __file__=ours.__file__)
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    exec(compile(Path(ours.__file__).read_text(), ours.__file__, "exec"), vars(theirs))
    pairs = list(zip(ours.load_plans("sm90").rows, theirs.load_plans("sm90").rows, strict=True))
    assert len(pairs) > 100
    for one, other in pairs:
        for name in set(type(other).model_fields) - {"spec"}:
            assert str(getattr(one, name)) == str(getattr(other, name)), name
        assert str(one.spec.model_dump()) == str(other.spec.model_dump())
