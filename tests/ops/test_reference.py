"""Rounding, the fold and whole deltas of the CPU reference, against the literal contract."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorafold.errors import BackendError, RouteError
from lorafold.numerics import TensorCoreModel
from lorafold.ops import gemv
from lorafold.ops.operands import blocks, exponents
from lorafold.ops.reference import (
    apply_rows,
    delta_gathered,
    delta_rows,
    dot,
    fold,
    matrix_at,
    mma_dot,
    round_bf16,
    tile_dots,
)
from tests.ops import literal
from tests.ops.literal import assert_same, from_patterns, random_bf16

NUMERICS = ("gemv", "mma")
FP32 = st.integers(0, 2**32 - 1)


def fp32(pattern: int) -> Tensor:
    return torch.tensor([pattern]).to(torch.int32).view(torch.float32)


def literal_delta(x: Tensor, a: Tensor, b: Tensor, numerics: str) -> Tensor:
    """The two dot products and the two roundings, one number at a time."""
    row_dot = {"gemv": literal.gemv, "mma": literal.mma}[numerics]
    a_rows, b_rows = a.double().tolist(), b.double().tolist()
    result = []
    for row in x.double().tolist():
        shrunk = [to_bf16(row_dot(row, a_row)) for a_row in a_rows]
        result.append([to_bf16(row_dot(shrunk, b_row)) for b_row in b_rows])
    return torch.tensor(result, dtype=torch.float64).bfloat16()


def to_bf16(value: float) -> float:
    if not math.isfinite(value):
        return value
    return literal.nearest(literal.Fraction(value), 7, value)


@settings(deadline=None)
@given(FP32 | st.sampled_from([0x00000001, 0x80008000, 0x3F808000, 0x3F818000, 0x7F7F8000]))
def test_rounding_to_bf16(pattern):
    value = fp32(pattern)
    expected = torch.tensor([to_bf16(float(value))], dtype=torch.float64).float()
    assert_same(round_bf16(value).float(), expected)


def test_bf16_to_fp32_is_exact():
    patterns = torch.arange(1 << 16, dtype=torch.int32)
    values = patterns.to(torch.int16).view(torch.bfloat16)
    assert_same(values.float(), (patterns << 16).view(torch.float32))


@settings(deadline=None)
@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF), FP32)
def test_fold_of_any_pattern(out, delta, scale):
    o, d = from_patterns([out], 1), from_patterns([delta], 1)
    expected = literal.fold(float(o), float(d), float(fp32(scale)))
    assert_same(fold(o, d, fp32(scale)), torch.tensor([expected], dtype=torch.float64).bfloat16())


@pytest.mark.parametrize("scale", [4 / 3, 0.1, -32 / math.sqrt(12), 2.0, 1e-40])
def test_fold_of_many(scale):
    out, delta = random_bf16(0, 2000), random_bf16(1, 2000)
    rounded = float(torch.tensor(scale, dtype=torch.float32))
    expected = [
        literal.fold(o, d, rounded) for o, d in zip(out.tolist(), delta.tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64).bfloat16()
    assert_same(fold(out, delta, scale), expected)
    assert_same(fold(out, delta, torch.tensor(scale, dtype=torch.float32)), expected)


@pytest.mark.parametrize(("scale", "differs"), [(4 / 3, True), (2.0, False), (0.5, False)])
def test_the_fold_is_not_fused(scale, differs):
    """Control: a fused multiply-add changes bits at 4/3, so these tests would notice it."""
    out, delta = random_bf16(2, 100_000), random_bf16(3, 100_000)
    factor = torch.tensor(scale, dtype=torch.float32)
    fused = (out.double() + delta.double() * factor.double()).float().bfloat16()
    assert torch.equal(fold(out, delta, scale), fused) != differs


def test_scale_is_rounded_to_fp32_before_the_product():
    """Control: a product in float64 would keep the bits that fp32 has not."""
    scale = 1 / 3
    out, delta = torch.zeros(100_000, dtype=torch.bfloat16), random_bf16(4, 100_000)
    assert_same(fold(out, delta, scale), fold(out, delta, float(torch.tensor(scale))))
    single, double = (delta.float() * torch.tensor(scale), (delta.double() * scale).float())
    assert not torch.equal(single, double)


def test_fold_takes_one_scale_per_row_and_turns_minus_zero():
    out, delta = random_bf16(5, 3, 8), random_bf16(6, 3, 8)
    scales = torch.tensor([[4 / 3], [0.7], [-0.0]])
    whole = fold(out, delta, scales)
    for i in range(3):
        assert_same(whole[i], fold(out[i], delta[i], float(scales[i])))
    minus_zero = torch.tensor([-0.0]).bfloat16()
    assert not torch.signbit(fold(minus_zero, minus_zero.abs(), 1.0)).item()
    assert torch.signbit(fold(minus_zero, minus_zero.abs(), -1.0)).item()


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("k_in", "rank"), [(1, 1), (7, 1), (12, 3), (40, 9), (100, 8), (1030, 2)])
def test_delta_of_rows(k_in, rank, numerics):
    x, a, b = (random_bf16(7, 2, k_in), random_bf16(8, rank, k_in), random_bf16(9, 5, rank))
    delta = delta_rows(x, a, b, numerics)
    assert_same(delta, literal_delta(x, a, b, numerics))
    single = torch.cat([delta_rows(x[i : i + 1], a, b, numerics) for i in range(2)])
    assert_same(single, delta)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_both_rounding_points_are_there(numerics):
    """Control: leaving the first one out gives other bits."""
    x, a, b = random_bf16(10, 16, 64), random_bf16(11, 16, 64), random_bf16(12, 64, 16)
    once = dot(x, a, numerics).double() @ b.double().T
    assert not torch.equal(delta_rows(x, a, b, numerics), once.float().bfloat16())


@pytest.mark.parametrize("numerics", NUMERICS)
def test_special_values(numerics):
    x = random_bf16(13, 6, 24)
    x[0, 3], x[1, 5], x[2, :], x[3, :], x[4, :] = (torch.nan, torch.inf, 2.0**-133, 3e38, -0.0)
    a, b = random_bf16(14, 5, 24), random_bf16(15, 7, 5)
    a[1, 5] = 0
    delta = delta_rows(x, a, b, numerics)
    assert_same(delta, literal_delta(x, a, b, numerics))
    assert delta[0].isnan().all()
    assert delta[1].isnan().all()
    assert delta[5].isfinite().all()


@pytest.mark.parametrize("numerics", NUMERICS)
def test_gathered_rows_equal_rows_one_by_one(numerics):
    n, k_in, n_out = 6, 100, 33
    x, ranks = (random_bf16(16, n, k_in), torch.tensor([1, 16, 9, 3, 8, 9], dtype=torch.int32))
    a, b = random_bf16(17, n, 16, k_in), random_bf16(18, n, n_out, 16)
    full = torch.cat([delta_rows(x[i : i + 1], a[i], b[i], numerics) for i in range(n)])
    assert_same(delta_gathered(x, a, b, numerics), full)
    own = [
        delta_rows(x[i : i + 1], a[i, :r], b[i, :, :r], numerics)
        for i, r in enumerate(ranks.tolist())
    ]
    x[0, 0] = torch.inf  # what lies beyond the rank takes no part, whatever it would become
    own[0] = delta_rows(x[:1], a[0, :1], b[0, :, :1], numerics)
    a[0, 1:], b[2, :, 9:] = torch.nan, torch.nan
    assert_same(delta_gathered(x, a, b, numerics, ranks=ranks), torch.cat(own))


@pytest.mark.parametrize("numerics", NUMERICS)
def test_rank_padding_in_whole_vectors_changes_nothing(numerics):
    x, a, b = random_bf16(19, 5, 64), random_bf16(20, 8, 64), random_bf16(21, 40, 8)
    expected = delta_rows(x, a, b, numerics)
    for rank in (16, 64, 512):
        a_padded, b_padded = (torch.zeros(rank, 64).bfloat16(), torch.zeros(40, rank).bfloat16())
        a_padded[:8], b_padded[:, :8] = a, b
        assert_same(delta_rows(x, a_padded, b_padded, numerics), expected)


def test_model_is_handed_on():
    old = TensorCoreModel(step=8, bits=24)
    x, a, b = random_bf16(22, 8, 512), random_bf16(23, 8, 512), random_bf16(24, 64, 8)
    assert_same(dot(x, a, "mma", model=old), mma_dot(x, a, model=old))
    assert not torch.equal(dot(x, a, "mma", model=old), dot(x, a, "mma"))
    gathered = delta_gathered(x, a.expand(8, 8, 512), b.expand(8, 64, 8), "mma", model=old)
    assert_same(delta_rows(x, a, b, "mma", model=old), gathered)


def test_another_word_for_the_numerics_is_refused():
    x = random_bf16(33, 1, 8)
    with pytest.raises(BackendError, match="'fp32'"):
        dot(x, x, "fp32")


def test_apply_rows_changes_a_strided_view_in_place():
    x, a, b = random_bf16(25, 4, 24), random_bf16(26, 3, 24), random_bf16(27, 10, 3)
    memory = random_bf16(28, 4, 20)
    before, view = memory.clone(), memory[:, 5:15]
    apply_rows(view, x, a, b, 4 / 3, "gemv")
    assert_same(view, fold(before[:, 5:15], delta_rows(x, a, b, "gemv"), 4 / 3))
    assert_same(memory[:, :5], before[:, :5])
    assert_same(memory[:, 15:], before[:, 15:])
    with pytest.raises(RouteError):
        apply_rows(view, x[:, :8], a, b, 1.0, "gemv")


def test_matrix_at_is_a_view():
    held = random_bf16(29, 6, 8)
    table = torch.tensor([held.data_ptr(), held[2].data_ptr()])
    view = matrix_at(int(table[1]), 3, 8)
    assert_same(view, held[2:5])
    held[3, 0] = 7
    assert view[1, 0] == 7
    view[0, 0] = -2
    assert held[2, 0] == -2


@pytest.mark.parametrize(("address", "rows", "cols"), [(0, 1, 1), (64, 0, 1), (64, 1, -1)])
def test_matrix_at_refuses(address, rows, cols):
    with pytest.raises(RouteError, match="given: address"):
        matrix_at(address, rows, cols)


def test_gathered_refuses_what_does_not_fit():
    x, a, b = random_bf16(30, 2, 8), random_bf16(31, 2, 3, 8), random_bf16(32, 2, 4, 3)
    with pytest.raises(RouteError, match="must have one n"):
        delta_gathered(x, a[:1], b, "gemv")
    with pytest.raises(RouteError, match="must have one n"):
        delta_gathered(x, a[0], b, "gemv")


def test_fold_refuses_to_flush_subnormals():
    one = torch.ones(1, dtype=torch.bfloat16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(BackendError, match="set_flush_denormal"):
            fold(one, one, 1.0)
    finally:
        torch.set_flush_denormal(False)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 40))
def test_blocks_cover_a_shape_once(shape, limit):
    seen = torch.zeros(shape, dtype=torch.int32)
    for block in blocks(tuple(shape), limit):
        seen[block] += 1
        assert seen[block].numel() <= max(limit, shape[-1])
    assert (seen == 1).all()


def test_exponents():
    assert exponents(torch.zeros(3)) == (0, 0)
    assert exponents(torch.zeros(0)) == (0, 0)
    assert exponents(torch.tensor([0.0, -3.0, 0.25])) == (-2, 1)
    assert exponents(torch.tensor([2.0**-130, 1.0]).bfloat16()) == (-127, 0)
    assert exponents(torch.tensor([-0.0, 1.0, -torch.inf])) == (0, 128)
    assert exponents(torch.tensor([torch.nan])) == (128, 128)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("spread", [0.0, 60.0])
@pytest.mark.parametrize("k", [1, 7, 8, 12, 64, 520, 576, 1030])
def test_tiles_side_by_side_are_each_alone(k, spread, numerics):
    """Groups of equal and other widths, with x of their own and with one for all."""
    widths, num_rows, tiles = [3, 3, 70, 3], 2, 2
    x = random_bf16(k, len(widths), num_rows, tiles, k, spread=spread)
    w = random_bf16(k + 1, tiles * sum(widths), k + 3, spread=spread)[:, :k]
    for each in (x, x[:1]):
        found = tile_dots(each, w, widths, numerics)
        groups = zip(
            each.expand(len(widths), -1, -1, -1),
            w.split([tiles * n for n in widths]),
            found.split([tiles * n for n in widths], 1),
            strict=True,
        )
        for own, columns, dots in groups:
            for tile in range(tiles):
                matrix = columns.reshape(tiles, -1, k)[tile]
                expected = dot(own[:, tile], matrix, numerics)
                assert_same(dots.reshape(num_rows, tiles, -1)[:, tile], expected)


def some_tiles(seed: int) -> tuple[Tensor, Tensor, list[int]]:
    """Operands of `tile_dots`, of another shape for every seed."""
    k, widths = (8, 520, 72, 1030, 9)[seed % 5], [3 + seed, 40]
    return random_bf16(seed, 1, 2, 2, k), random_bf16(seed + 1, 2 * sum(widths), k), widths


def test_tiles_of_one_shape_do_not_see_those_of_another(monkeypatch):
    """All shapes of a thread work in the same memory, and only some are remembered."""
    alone = [tile_dots(*some_tiles(seed), "gemv") for seed in range(5)]
    monkeypatch.setattr(gemv, "_REMEMBERED", 3)
    for seed in (3, 0, 1, 4, 2, 2, 1, 0, 3, 4):
        assert_same(tile_dots(*some_tiles(seed), "gemv"), alone[seed])
    for result, (x, w, widths) in zip(alone, map(some_tiles, range(5)), strict=True):
        columns = w.split([2 * n for n in widths])
        first = dot(x[0, :, 0], columns[0][: widths[0]], "gemv")
        assert_same(result[:, : widths[0]], first)  # what was returned stays as it was


def test_threads_do_not_share_the_memory_of_tiles():
    alone = [tile_dots(*some_tiles(seed), "gemv") for seed in range(5)]

    def run(first: int) -> None:
        for i in range(40):
            seed = (first + i) % 5
            assert_same(tile_dots(*some_tiles(seed), "gemv"), alone[seed])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))


def test_blocks_of_tiles_do_not_change_bits(monkeypatch):
    x, w = random_bf16(1, 1, 7, 3, 584), random_bf16(2, 3 * 20, 584)
    whole = tile_dots(x, w, [16, 4], "gemv")
    for lanes in (1, 1 << 13):
        monkeypatch.setattr(gemv, "_TILE_LANES", lanes)
        assert_same(tile_dots(x, w, [16, 4], "gemv"), whole)
