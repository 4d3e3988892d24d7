"""The dense operators on the CPU: what they compute, what they refuse, and that refusals change
nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafold.errors import BackendError, RouteError
from lorafold.ops import (
    LoraPair,
    LoraRoute,
    apply_lora_bgmv,
    apply_lora_delta,
    make_plan,
    reference,
    routed_cpu,
    scratch_bytes,
)
from tests.ops.cases import assert_same_bits, bits, make_case

NUMERICS = ("gemv", "mma")


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("plan", [False, True], ids=["no-plan", "plan"])
def test_equal_to_rows_alone(numerics, plan):
    case = make_case(11, [3, None, 8, 5], 72, [40, 16], 8, device="cpu", x_pad=3, out_pad=5)
    expected = case.truth(numerics)
    given_plan = make_plan(case.slots, 4) if plan else None
    apply_lora_bgmv(case.routes, case.x, case.outs, case.slots, plan=given_plan, numerics=numerics)
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_delta_equals_bgmv_of_one_slot(numerics):
    case = make_case(5, [6], 48, [24], 8, device="cpu", slots=[0] * 5)
    pair = case.pairs[0][0]
    assert pair is not None
    out = case.outs[0].clone()
    apply_lora_delta(pair, case.x, out, numerics=numerics)
    apply_lora_bgmv(case.routes[0], case.x, case.outs[0], case.slots, numerics=numerics)
    assert_same_bits(out, case.outs[0])


@given(
    slots=st.lists(st.integers(-2, 2), min_size=1, max_size=12),
    seed=st.integers(0, 5),
    numerics=st.sampled_from(NUMERICS),
)
@settings(max_examples=30, deadline=None)
def test_a_row_does_not_see_the_others(slots, seed, numerics):
    """Any batch equals its rows one at a time, in every bit, and base rows keep theirs."""
    case = make_case(len(slots), [3, 8, None], 40, [24], 8, device="cpu", seed=seed, slots=slots)
    before = case.outs[0].clone()
    one_by_one = before.clone()
    for i in range(len(slots)):
        row = slice(i, i + 1)
        apply_lora_bgmv(
            case.routes[0], case.x[row], one_by_one[row], case.slots[row], numerics=numerics
        )
    apply_lora_bgmv(case.routes[0], case.x, case.outs[0], case.slots, numerics=numerics)
    assert_same_bits(case.outs[0], one_by_one)
    base = (case.slots < 0) | (case.slots == 2)
    assert torch.equal(bits(case.outs[0][base]), bits(before[base]))
    if (~base).any():  # control: adapted rows do change
        assert not torch.equal(bits(case.outs[0][~base]), bits(before[~base]))


def changed(case, change: str) -> None:
    """Change in place what the tables or the matrices of all routes hold."""
    for pairs, route in zip(case.pairs, case.routes, strict=True):
        if change == "factors":
            for pair in pairs:
                pair.a.mul_(-0.75)
        elif change == "scale":
            route.scale_table.fill_(0.3)
        elif change == "rank":
            route.rank_table[1] = 5
        elif change == "slot cleared":
            route.a_table[0] = 0


def truth_by_tables(case, i: int, start: torch.Tensor) -> torch.Tensor:
    """Output i row by row, with the scales and ranks that its tables hold."""
    route, expected = case.routes[i], start.clone()
    for row, slot in enumerate(case.slots.tolist()):
        if route.a_table[slot]:
            pair, rank = case.pairs[i][slot], int(route.rank_table[slot])
            a, b = pair.a[:rank], pair.b[:, :rank]
            delta = reference.delta_rows(case.x[row : row + 1], a, b, "gemv")
            own = expected[row : row + 1]
            own.copy_(reference.fold(own, delta, route.scale_table[slot]))
    return expected


@pytest.mark.parametrize("held", [1, 1 << 22])
def test_tables_and_factors_may_change_between_calls(held, monkeypatch):
    """What the CPU remembers of a call is where things are, not what is there."""
    monkeypatch.setattr(routed_cpu, "_HELD_WEIGHTS", held)
    routed_cpu._tiles.cache_clear()
    case = make_case(10, [3, 8, 8], 72, [40, 16], 8, device="cpu", slots=[0] * 7 + [1, 2, 1])
    start = [out.clone() for out in case.outs]
    seen = set()
    for change in ("nothing", "factors", "scale", "rank", "slot cleared"):
        changed(case, change)
        for out, before in zip(case.outs, start, strict=True):
            out.copy_(before)
        apply_lora_bgmv(case.routes, case.x, case.outs, case.slots, numerics="gemv")
        for i, out in enumerate(case.outs):
            assert_same_bits(out, truth_by_tables(case, i, start[i]), change)
        seen.add(tuple(bits(case.outs[0]).flatten().tolist()))
    assert len(seen) == 5


def test_x_inside_the_same_buffer_beside_the_output():
    """x and base_out may be columns of one buffer, as long as no element is in both."""
    buffer = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    case = make_case(4, [4], 16, [24], 8, device="cpu", slots=[0] * 4)
    x, out = buffer[:, :16], buffer[:, 16:]
    expected = out.clone()
    apply_lora_bgmv(case.routes[0], x.clone(), expected, case.slots)
    apply_lora_bgmv(case.routes[0], x, out, case.slots)
    assert_same_bits(out.contiguous(), expected)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def slots_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BUFFER = bf16(3, 64)
BAD_CALLS = {
    "x dtype": ({"x": torch.zeros(3, 32)}, "`x` must be bfloat16; given: torch.float32"),
    "out dtype": ({"out": torch.zeros(3, 16)}, "`base_out` must be bfloat16"),
    "x width": ({"x": bf16(3, 31)}, r"`x` must be \[3, 32\]; given: \[3, 31\]"),
    "x rows": ({"x": bf16(2, 32)}, r"`x` must be \[3, 32\]"),
    "out width": ({"out": bf16(3, 15)}, r"`base_out` must be \[3, 16\]"),
    "x three-dimensional": ({"x": bf16(1, 3, 32)}, r"given: \[1, 3, 32\]"),
    "x columns apart": ({"x": bf16(3, 64)[:, ::2]}, "inner stride 1"),
    "out columns apart": ({"out": bf16(3, 32)[:, ::2]}, "inner stride 1"),
    "out rows overlap": ({"out": bf16(1, 16).expand(3, 16)}, "rows of base_out must not overlap"),
    "x and out overlap": ({"x": BUFFER[:, :32], "out": BUFFER[:, 20:36]}, "overlap in memory"),
    "slot dtype": ({"slots": torch.tensor([0, 1, 0])}, "contiguous int32 vector"),
    "slot count": ({"slots": slots_of(0, 1)}, "must have 3 entries; given: 2"),
    "slot beyond": ({"slots": slots_of(0, 2, 1)}, "below 2, or negative for no adapter; given: 2"),
    "device": (
        {"x": bf16(3, 32).to("meta")},
        "`x` must be on cpu, where the route is; given: meta",
    ),
    "scratch": ({"scratch": torch.zeros(3, dtype=torch.uint8)}, "at least 96 bytes"),
    "plan": ({"plan": make_plan(slots_of(0, 1), 2)}, "the plan is for 2 rows and 2 keys"),
    "no route": ({"route": [], "out": []}, "one base_out per route"),
    "gradient": ({"out": bf16(3, 16).requires_grad_()}, "has no gradient"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls_are_refused_and_change_nothing(case):
    change, message = BAD_CALLS[case]
    pairs = [LoraPair(bf16(8, 32) + 1, bf16(16, 8) + 1, 1.0)] * 2
    out = change.get("out", bf16(3, 16))
    before = out.detach().clone() if isinstance(out, torch.Tensor) else None
    with pytest.raises(RouteError, match=message):
        apply_lora_bgmv(
            change.get("route", LoraRoute.from_pairs(pairs)),
            change.get("x", bf16(3, 32)),
            out,
            change.get("slots", slots_of(0, -1, 1)),
            plan=change.get("plan"),
            scratch=change.get("scratch"),
        )
    if before is not None:
        assert torch.equal(out.detach(), before)


def test_two_outputs_that_overlap():
    pair = LoraPair(bf16(8, 32), bf16(16, 8), 1.0)
    out = bf16(3, 20)
    with pytest.raises(RouteError, match="two base_out of one call overlap"):
        apply_lora_bgmv(
            [pair.route, pair.route], bf16(3, 32), [out[:, :16], out[:, 4:]], slots_of(0, 0, 0)
        )


def test_routes_of_one_call_must_agree():
    routes = [LoraPair(bf16(8, k), bf16(16, 8), 1.0).route for k in (32, 40)]
    with pytest.raises(RouteError, match="must share k_in, max_rank, max_loras and device"):
        apply_lora_bgmv(routes, bf16(3, 32), [bf16(3, 16)] * 2, slots_of(0, 0, 0))


def test_unknown_numerics():
    pair = LoraPair(bf16(8, 32), bf16(16, 8), 1.0)
    with pytest.raises(BackendError, match='"gemv" or "mma"'):
        apply_lora_delta(pair, bf16(1, 32), bf16(1, 16), numerics="fast")


def test_no_rows():
    pair = LoraPair(bf16(8, 32), bf16(16, 8), 1.0)
    apply_lora_delta(pair, bf16(0, 32), bf16(0, 16))
    apply_lora_bgmv(pair.route, bf16(0, 32), bf16(0, 16), slots_of())


def test_scratch_of_the_size_that_is_named_is_enough():
    pair = LoraPair(bf16(8, 32) + 1, bf16(16, 8) + 1, 1.0)
    out = bf16(3, 16)
    scratch = torch.empty(scratch_bytes(3, 1, 32, 8), dtype=torch.uint8)
    apply_lora_delta(pair, bf16(3, 32) + 1, out, scratch=scratch)
    assert out.min() == 256


def in_a_process_with(**levers: str) -> list[float]:
    """What one call of the operators gives in a process with these environment variables."""
    code = (
        "import torch\n"
        "from lorafold.ops import LoraPair, apply_lora_delta, apply_lora_bgmv\n"
        "from tests.ops.cases import make_case\n"
        "case = make_case(4, [16], 4096, [8], 16, device='cpu', slots=[0] * 4)\n"
        "out = case.outs[0].clone()\n"
        "apply_lora_delta(case.pairs[0][0], case.x, out)\n"
        "apply_lora_bgmv(case.routes[0], case.x, case.outs[0], case.slots)\n"
        "print(*torch.cat([out, case.outs[0]]).view(torch.int16).flatten().tolist())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **levers},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in result.stdout.split()]


def test_levers():
    """Read once per process: no operator, or other numerics for large calls of one adapter."""
    case = make_case(4, [16], 4096, [8], 16, device="cpu", slots=[0] * 4)
    untouched = case.outs[0].clone().view(torch.int16).flatten().tolist()
    gemv, mma = (case.truth(n)[0].view(torch.int16).flatten().tolist() for n in NUMERICS)
    assert gemv != mma
    assert in_a_process_with() == gemv + gemv
    assert in_a_process_with(LORAFOLD_NO_APPLY="1") == untouched + untouched
    assert in_a_process_with(LORAFOLD_GEMV_MAX_M="3") == mma + gemv
    assert in_a_process_with(LORAFOLD_GEMV_MAX_M="4") == gemv + gemv
    assert in_a_process_with(LORAFOLD_NUMERICS="mma") == mma + mma


def test_the_compiler_sees_one_operator():
    case = make_case(5, [4, 8], 32, [16, 8], 8, device="cpu")

    def forward(x, first, second, slots):
        first, second = first * 2, second + 1
        apply_lora_bgmv(case.routes, x, [first, second], slots)
        return first + 1, second

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    expected = forward(case.x, *case.outs, case.slots)
    for actual, truth in zip(compiled(case.x, *case.outs, case.slots), expected, strict=True):
        assert_same_bits(actual, truth)


def test_the_operator_keeps_the_rules_of_torch_library():
    case = make_case(4, [4, 8], 32, [16], 8, device="cpu")
    route = case.routes[0]
    tables = [[route.a_table], [route.b_table], [route.scale_table], [route.rank_table]]
    arguments = (case.x, case.outs, case.slots, *tables, 8, "gemv", None, 1, None, None, None)
    results = torch.library.opcheck(torch.ops.lorafold.routed_delta, arguments)
    assert set(results.values()) == {"SUCCESS"}
