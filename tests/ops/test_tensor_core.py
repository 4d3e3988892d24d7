"""Numerics "mma" on the CPU against what an H200 computed, and against exact integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import pad

from lorafold.errors import BackendError, RouteError
from lorafold.numerics import HOPPER, TensorCoreModel
from lorafold.ops import tensor_core
from lorafold.ops.reference import mma_chain, mma_dot
from lorafold.verify.golden import RECORDINGS
from tests.ops import literal
from tests.ops.literal import SPECIAL, assert_same, from_patterns, random_bf16

GOLDEN = load_file(RECORDINGS)
CASES = sorted({name.rsplit("/", 1)[0] for name in GOLDEN})
AMPERE = TensorCoreModel(step=8, bits=24)
PATTERNS = st.integers(0, 0xFFFF) | st.sampled_from(SPECIAL)


def general(monkeypatch):
    monkeypatch.setattr(tensor_core, "_is_ordinary", lambda *_: False)


def test_the_recordings_are_there():
    assert len(CASES) == 17
    assert sum(name.startswith("step/") for name in CASES) == 13


@pytest.mark.parametrize("case", CASES)
def test_equals_the_recorded_hardware(case):
    x, w, out = (GOLDEN[f"{case}/{name}"] for name in ("x", "w", "out"))
    assert_same(mma_chain(x, w, GOLDEN.get(f"{case}/c")), out)


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("chain/")])
def test_the_general_way_equals_the_recorded_hardware(case, monkeypatch):
    general(monkeypatch)
    x, w, out = (GOLDEN[f"{case}/{name}"] for name in ("x", "w", "out"))
    assert_same(mma_chain(x, w), out)


@pytest.mark.parametrize("case", [c for c in CASES if c.startswith("step/")])
def test_the_literal_model_equals_the_recorded_hardware(case):
    x, w, c, out = (GOLDEN[f"{case}/{name}"] for name in ("x", "w", "c", "out"))
    assert_same(literal.table(literal.chain, x[:12], w, c[:12]), out[:12])


@pytest.mark.parametrize("other", [TensorCoreModel(16, 24), TensorCoreModel(16, 26), AMPERE])
def test_other_models_do_not(other):
    """Control: the recordings tell the models apart."""
    case = "chain/k4096_spread0"
    x, w, out = (GOLDEN[f"{case}/{name}"] for name in ("x", "w", "out"))
    assert not torch.equal(mma_chain(x, w, model=other), out)


@pytest.mark.parametrize("model", [HOPPER, AMPERE], ids=["16x25", "8x24"])
@pytest.mark.parametrize("spread", [0.0, 3.0, 12.0, 40.0, 60.0])
@pytest.mark.parametrize("k", [1, 7, 8, 15, 16, 17, 33, 300])
def test_equals_the_literal_model(k, spread, model):
    x, w = random_bf16(k, 3, k, spread=spread), random_bf16(k + 1, 4, k, spread=spread)
    c = random_bf16(k + 2, 3, 4, spread=spread).float() * 1.0000001

    def chain(x_row, w_row, start):
        return literal.chain(x_row, w_row, start, model.step, model.bits)

    assert_same(mma_chain(x, w, c, model=model), literal.table(chain, x, w, c))


@settings(deadline=None)
@given(st.data(), st.integers(1, 36), st.integers(0, 2**32 - 1))
def test_any_pattern(data, k, start):
    drawn = data.draw(st.lists(PATTERNS, min_size=2 * k, max_size=2 * k))
    x, w = from_patterns(drawn[:k], 1, k), from_patterns(drawn[k:], 1, k)
    c = torch.tensor([[start]]).to(torch.int32).view(torch.float32)
    assert_same(mma_chain(x, w, c), literal.table(literal.chain, x, w, c))


@settings(deadline=None)
@given(
    st.integers(-60, 60),
    st.lists(st.tuples(st.integers(-30, 30), st.integers(-255, 255)), min_size=16, max_size=48),
)
def test_cancellation_at_any_distance(top, terms):
    """Large terms that cancel over terms at every distance below them."""
    values = [m * 2.0 ** (e + top) for e, m in terms]
    values = [2.0 ** (top + 40), *values, -(2.0 ** (top + 40)), *values[:3]]
    x, w = torch.tensor([values]).bfloat16(), torch.ones(1, len(values)).bfloat16()
    assert_same(mma_chain(x, w), literal.table(literal.chain, x, w))


@pytest.mark.parametrize("spread", [0.0, 4.0, 14.0])
def test_the_fast_and_the_general_way_agree(spread, monkeypatch):
    x, w = random_bf16(1, 6, 530, spread=spread), random_bf16(2, 40, 530, spread=spread)
    x[:, ::3] = 0
    w[::2] = 0
    c = random_bf16(3, 6, 40).float()
    fast = mma_chain(x, w, c), mma_chain(x, w)
    assert tensor_core._is_ordinary(x, w, c, HOPPER)
    general(monkeypatch)
    assert_same(mma_chain(x, w, c), fast[0])
    assert_same(mma_chain(x, w), fast[1])


@pytest.mark.parametrize(
    ("power", "ordinary"), [(-50, True), (-51, False), (57, True), (62, False)]
)
def test_the_ends_of_the_fast_way(power, ordinary, monkeypatch):
    x = (random_bf16(4, 4, 64).float().clamp(-1.9, 1.9) * 2.0**power).bfloat16()
    x = torch.where(x.abs() < 2.0**power, torch.tensor(2.0**power).bfloat16(), x)
    assert tensor_core._is_ordinary(x, x, None, HOPPER) == ordinary
    expected = literal.table(literal.chain, x, x)
    assert_same(mma_chain(x, x), expected)
    general(monkeypatch)
    assert_same(mma_chain(x, x), expected)


@pytest.mark.parametrize(("power", "ordinary"), [(-102, True), (-103, False), (124, True)])
def test_accumulators_at_the_ends_of_the_fast_way(power, ordinary, monkeypatch):
    c = random_bf16(20, 4, 4).float() * 1.0000001
    c = torch.where(c.abs() < 1, 1.0000001, c.clamp(-1.9, 1.9)) * 2.0**power
    x = torch.full((4, 32), 2.0**-50, dtype=torch.bfloat16)
    w = torch.cat([torch.zeros(2, 32), torch.tensor([[1.0], [-1.5]]).expand(2, 32) * 2.0**-50])
    w[3, :16] = 0
    w = w.bfloat16()
    assert tensor_core._is_ordinary(x, w, c, HOPPER) == ordinary
    expected = literal.table(literal.chain, x, w, c)
    assert_same(mma_chain(x, w, c), expected)
    general(monkeypatch)
    assert_same(mma_chain(x, w, c), expected)


@pytest.mark.parametrize("k", [1023, 1024, 1025, 2047, 2048, 2049, 3000])
def test_segments(k):
    x, w = random_bf16(k, 1, k), random_bf16(k + 1, 2, k)
    assert_same(mma_dot(x, w), literal.table(literal.mma, x, w))


@pytest.mark.parametrize("k", [1023, 1024, 1025, 2048, 2049, 4096])
def test_segments_are_not_one_chain(k):
    """Control: beyond 1024 the bits differ from the plain chain, up to there they do not."""
    x, w = random_bf16(5, 16, k), random_bf16(6, 64, k)
    assert torch.equal(mma_dot(x, w), mma_chain(x, w)) == (k <= 1024)
    assert not torch.equal(mma_dot(x, w), mma_dot(x, w, segment=512))


@pytest.mark.parametrize("power", [-148, -149, -150, -157, -158, -159])
def test_what_truncates_to_zero_is_plus_zero(power):
    x = torch.tensor([[2.0**-70], [-(2.0**-70)]]).bfloat16()
    w = torch.tensor([[2.0 ** (power + 70)]]).bfloat16()
    value = 2.0**power if power >= -149 else 0.0
    assert_same(mma_chain(x, w), torch.tensor([[value], [-value if value else 0.0]]))
    assert_same(mma_dot(x, w), literal.table(literal.mma, x, w))


def test_a_sum_of_segments_is_never_minus_zero():
    tiny = torch.full((1, 2048), 2.0**-133, dtype=torch.bfloat16)
    assert_same(mma_dot(tiny, -tiny), torch.zeros(1, 1))


@pytest.mark.parametrize("k", [9, 100, 1030])
def test_a_row_does_not_see_the_others(k):
    x, w = random_bf16(7, 9, k), random_bf16(8, 6, k)
    whole = mma_dot(x, w)
    for i in range(9):
        assert_same(mma_dot(x[i : i + 1], w), whole[i : i + 1])
    for j in range(6):
        assert_same(mma_dot(x, w[j : j + 1]), whole[:, j : j + 1])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    assert_same(mma_dot(x[order], w), whole[order])
    for poison in (torch.nan, torch.inf, 3e38, 2.0**-133):
        dirty = x.clone()
        dirty[::2] = poison
        assert_same(mma_dot(dirty, w)[1::2], whole[1::2])


@pytest.mark.parametrize("k", [1, 7, 16, 1000])
def test_zeros_behind_the_last_element_change_nothing(k):
    x, w = random_bf16(9, 3, k), random_bf16(10, 5, k)
    for more in (1, 8, 16, 1500):
        assert_same(mma_dot(pad(x, (0, more)), pad(w, (0, more))), mma_dot(x, w))


def test_order_within_a_step_does_not_matter_and_across_steps_does():
    x, w = random_bf16(11, 8, 64), random_bf16(12, 64, 64)
    within = torch.cat([torch.arange(k, k + 16).flip(0) for k in range(0, 64, 16)])
    assert_same(mma_chain(x[:, within], w[:, within]), mma_chain(x, w))
    across = torch.arange(64).flip(0)
    assert not torch.equal(mma_chain(x[:, across], w[:, across]), mma_chain(x, w))


def test_blocks_do_not_change_bits(monkeypatch):
    x, w = random_bf16(13, 3, 7, 70), random_bf16(14, 33, 70)
    whole = mma_dot(x, w)
    for block, held in ((1, 1), (1 << 9, 1 << 10), (1 << 30, 1 << 30)):
        monkeypatch.setattr(tensor_core, "_BLOCK_PRODUCTS", block)
        monkeypatch.setattr(tensor_core, "_HELD_PRODUCTS", held)
        assert_same(mma_dot(x, w), whole)


def test_batches_broadcast():
    x, w = random_bf16(15, 4, 1, 3, 1040), random_bf16(16, 5, 2, 1040)
    result = mma_dot(x, w)
    assert result.shape == (4, 5, 3, 2)
    for i in range(4):
        for j in range(5):
            assert_same(result[i, j], mma_dot(x[i, 0], w[j]))


def test_empty():
    assert mma_dot(random_bf16(0, 0, 8), random_bf16(0, 3, 8)).shape == (0, 3)
    assert_same(mma_dot(random_bf16(0, 2, 0), random_bf16(0, 3, 0)), torch.zeros(2, 3))


def test_the_accumulator_is_left_as_it_was():
    x, w, c = random_bf16(17, 2, 16), random_bf16(18, 3, 16), torch.ones(2, 3)
    mma_chain(x, w, c)
    assert_same(c, torch.ones(2, 3))


def test_refuses_what_does_not_fit():
    x = random_bf16(19, 2, 16)
    with pytest.raises(RouteError, match="must have one K"):
        mma_dot(x, x[:, :8])
    with pytest.raises(RouteError, match="multiple of the step of 16; given: 24"):
        mma_dot(x, x, segment=24)
    for c in (torch.zeros(2, 3), torch.zeros(2, 2, dtype=torch.float64)):
        with pytest.raises(RouteError, match="`c` must be float32"):
            mma_chain(x, x, c)
    if torch.set_flush_denormal(True):
        try:
            with pytest.raises(BackendError):
                mma_dot(x, x)
        finally:
            torch.set_flush_denormal(False)
