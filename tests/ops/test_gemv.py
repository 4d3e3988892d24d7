"""Numerics "gemv" on the CPU against the five rules of the contract, written as plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from lorafold.errors import BackendError, RouteError
from lorafold.ops import gemv
from lorafold.ops.reference import gemv_dot
from tests.ops import literal
from tests.ops.literal import SPECIAL, assert_same, from_patterns, random_bf16

LENGTHS = (1, 7, 8, 9, 15, 16, 17, 255, 256, 257, 511, 512, 513, 520, 1000, 1030)
PATTERNS = st.integers(0, 0xFFFF) | st.sampled_from(SPECIAL)


@pytest.mark.parametrize("spread", [0.0, 12.0, 60.0])
@pytest.mark.parametrize("k", LENGTHS)
def test_equals_the_literal_loops(k, spread):
    x, w = random_bf16(k, 2, k, spread=spread), random_bf16(k + 1, 3, k, spread=spread)
    assert_same(gemv_dot(x, w), literal.table(literal.gemv, x, w))


@settings(deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 3))
def test_any_pattern(data, k, columns):
    size = (2 + columns) * k
    drawn = data.draw(st.lists(PATTERNS, min_size=size, max_size=size))
    x, w = (from_patterns(drawn[: 2 * k], 2, k), from_patterns(drawn[2 * k :], columns, k))
    assert_same(gemv_dot(x, w), literal.table(literal.gemv, x, w).view(2, columns))


@pytest.mark.parametrize("k", LENGTHS)
def test_the_fast_and_the_general_way_agree(k, monkeypatch):
    x, w = random_bf16(1, 5, k), random_bf16(2, 70, k)
    fast = gemv_dot(x, w)
    assert gemv._products_are_exact(x, w)
    monkeypatch.setattr(gemv, "_products_are_exact", lambda *_: False)
    assert_same(gemv_dot(x, w), fast)


@pytest.mark.parametrize(("power", "exact"), [(-67, True), (-68, False), (63, True), (64, False)])
def test_the_ends_of_the_fast_way(power, exact):
    x = (torch.tensor([[1 + 2.0**-7, 1.0, -1.5]]) * 2.0**power).bfloat16()
    assert gemv._products_are_exact(x, x) == exact
    assert_same(gemv_dot(x, x), literal.table(literal.gemv, x, x))


def test_products_that_underflow_need_a_fused_add():
    """Control: there are inputs for which the fast way would give other bits."""
    x = torch.zeros(1, 8).bfloat16()
    x[0, :2] = torch.tensor([2.0**-74, 2.0**-75])
    w = torch.full_like(x, 2.0**-75)
    unfused = x[:, :1].float() * w[:, :1].float() + x[:, 1:2].float() * w[:, 1:2].float()
    assert unfused.item() == 2.0**-149
    assert gemv_dot(x, w).item() == 2.0**-148  # 1.5 units of the last place, a tie


def test_a_lane_without_an_element_keeps_its_minus_zero():
    """-2**-266 rounds to -0 in every lane; a further product of +0 would make it +0."""
    tiny = torch.full((1, 512), 2.0**-133, dtype=torch.bfloat16)
    assert torch.signbit(gemv_dot(tiny, -tiny)).all()
    longer = torch.cat([tiny, tiny[:, :8]], 1)
    assert torch.signbit(gemv_dot(longer, -longer)).all()
    # With fewer than 64 lanes in use, the others hold +0, and so does the sum.
    for k in (1, 7, 8, 16, 256, 504, 511):
        assert_same(gemv_dot(tiny[:, :k], -tiny[:, :k]), torch.zeros(1, 1))
    # A product of +0 in lane 0 alone turns its -0, and so the sum, into +0.
    zeros = torch.zeros(1, 8, dtype=torch.bfloat16)
    a, b = torch.cat([tiny, zeros], 1), torch.cat([-tiny, zeros], 1)
    assert not torch.signbit(gemv_dot(a, b)).any()


@pytest.mark.parametrize("k", [9, 100, 576, 1030])
def test_a_row_does_not_see_the_others(k):
    x, w = random_bf16(3, 9, k), random_bf16(4, 6, k)
    whole = gemv_dot(x, w)
    for i in range(9):
        assert_same(gemv_dot(x[i : i + 1], w), whole[i : i + 1])
    for j in range(6):
        assert_same(gemv_dot(x, w[j : j + 1]), whole[:, j : j + 1])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    assert_same(gemv_dot(x[order], w), whole[order])
    for poison in (torch.nan, torch.inf, 3e38, 2.0**-133):
        dirty = x.clone()
        dirty[::2] = poison
        assert_same(gemv_dot(dirty, w)[1::2], whole[1::2])


def test_blocks_do_not_change_bits(monkeypatch):
    x, w = random_bf16(6, 7, 584), random_bf16(7, 33, 584)
    whole = gemv_dot(x, w)
    for lanes in (1, 1 << 8, 1 << 12):
        monkeypatch.setattr(gemv, "_BLOCK_LANES", lanes)
        assert_same(gemv_dot(x, w), whole)


@pytest.mark.parametrize("k", [8, 64, 504, 520])
def test_whole_vectors_of_zeros_change_nothing(k):
    x, w = random_bf16(8, 3, k), random_bf16(9, 5, k)
    for more in (8, 64, 1024):
        assert_same(gemv_dot(pad(x, (0, more)), pad(w, (0, more))), gemv_dot(x, w))


def test_zeros_within_a_vector_do():
    """Control: the tail is spread over lanes and a vector is not, so K itself enters the bits."""
    x, w = random_bf16(10, 64, 15), random_bf16(11, 64, 15)
    assert not torch.equal(gemv_dot(x, w), gemv_dot(pad(x, (0, 1)), pad(w, (0, 1))))


def test_batches_broadcast_and_views_are_taken_as_they_are():
    x, w = random_bf16(12, 4, 1, 3, 40), random_bf16(13, 5, 2, 40)
    result = gemv_dot(x, w)
    assert result.shape == (4, 5, 3, 2)
    for i in range(4):
        for j in range(5):
            assert_same(result[i, j], gemv_dot(x[i, 0], w[j]))
    wide = random_bf16(14, 40, 6)
    assert_same(gemv_dot(wide.T, w[0]), gemv_dot(wide.T.contiguous(), w[0]))


def test_empty():
    assert gemv_dot(random_bf16(0, 0, 8), random_bf16(0, 3, 8)).shape == (0, 3)
    assert_same(gemv_dot(random_bf16(0, 2, 0), random_bf16(0, 3, 0)), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16)),
        (torch.zeros(8, dtype=torch.bfloat16), torch.zeros(2, 8, dtype=torch.bfloat16)),
        (torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2, 7, dtype=torch.bfloat16)),
        (torch.zeros(2, 1, 8).bfloat16(), torch.zeros(3, 1, 8).bfloat16()),
    ],
)
def test_refuses_what_does_not_fit(x, w):
    with pytest.raises(RouteError, match="given"):
        gemv_dot(x, w)


def test_refuses_to_flush_subnormals():
    x = random_bf16(15, 1, 8)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(BackendError, match="set_flush_denormal"):
            gemv_dot(x, x)
    finally:
        torch.set_flush_denormal(False)
    gemv_dot(x, x)
