"""The Triton kernels against the CPU reference, bit for bit.

Without a GPU the kernels run in Triton's interpreter, whose bf16 arithmetic `tests.interpreter`
puts right; on a GPU they run as compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from lorafold.ops import Plan, reference, scratch_bytes, tiles
from lorafold.ops.fold import fold_triton
from lorafold.ops.group import group_triton
from lorafold.ops.launch import routed_triton
from tests.ops.cases import Case, assert_same_bits, make_case, poisoned

NUMERICS = ("gemv", "mma")


def plan_of_height(case: Case, tile_rows: int | None) -> Plan:
    """A plan of the case's rows in tiles of that height, or of what its size gives."""
    num_rows, num_keys = case.x.shape[0], case.routes[0].max_loras
    plan = Plan.empty(num_rows, num_keys, case.x.device, block_rows=tile_rows)
    group_triton(case.slots, plan)
    return plan


def run(
    case: Case,
    numerics: str,
    *,
    planned: bool = True,
    shrink: tiles.AnyShrinkTile | None = None,
    expand: tiles.AnyExpandTile | None = None,
    plan: Plan | None = None,
    folds: bool = True,
) -> None:
    """One call of the kernels, with poisoned scratch."""
    first = case.routes[0]
    num_rows, device = case.x.shape[0], case.x.device
    if planned and plan is None:
        tile = shrink or expand
        plan = plan_of_height(case, tile.tile_rows if tile else None)
    size = scratch_bytes(num_rows, len(case.routes), first.k_in, first.max_rank)
    scratch = poisoned((size // 2,), device).view(torch.uint8)
    tables = tuple(
        tuple(getattr(r, name) for r in case.routes)
        for name in ("a_table", "b_table", "scale_table", "rank_table")
    )
    routed_triton(
        case.x,
        tuple(case.outs),
        tables,
        first.max_rank,
        numerics,
        None,
        1,
        plan.tile_key if plan else None,
        plan.tile_rows if plan else None,
        scratch,
        shrink,
        expand,
        folds=folds,
    )


def check(case: Case, numerics: str, **kwargs) -> None:
    expected = case.truth(numerics)
    run(case, numerics, **kwargs)
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth, numerics)


SHAPES = [
    # rows, ranks per slot, k_in, n_outs, max_rank
    pytest.param(1, [3], 16, [16], 8, id="one-row"),
    pytest.param(5, [1, None, 7], 24, [40], 8, id="odd-ranks"),
    pytest.param(19, [5, 16, None, 2], 100, [33], 16, id="k-not-a-multiple-of-8"),
    pytest.param(7, [4, 2], 7, [9], 4, id="k-below-8"),
    pytest.param(6, [12, 3], 64, [16, 8, 24], 12, id="three-routes"),
    pytest.param(4, [17, 24], 1040, [20], 24, id="two-segments"),
    pytest.param(3, [2], 2056, [1, 5], 16, id="three-segments-two-routes"),
]


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("rows", "ranks", "k_in", "n_outs", "max_rank"), SHAPES)
def test_equal_to_the_reference(device, numerics, rows, ranks, k_in, n_outs, max_rank):
    case = make_case(rows, ranks, k_in, n_outs, max_rank, device=device, x_pad=8, out_pad=8)
    check(case, numerics)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_strided_views_leave_their_neighbours_alone(device, numerics):
    case = make_case(9, [4, None, 6], 40, [24], 8, device=device, x_pad=3, out_pad=5, seed=1)
    check(case, numerics)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_one_adapter_for_all_rows_needs_no_plan(device, numerics):
    case = make_case(21, [6], 48, [20], 8, device=device, slots=[0] * 21)
    check(case, numerics, planned=False)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_special_values(device, numerics):
    case = make_case(8, [4, 8], 32, [16], 8, device=device, seed=2)
    tiny, huge = 2.0**-133, 3e38
    case.x[0, :4] = torch.tensor([float("nan"), 1, 2, 3])
    case.x[1, :4] = torch.tensor([float("inf"), -1, 0.0, -0.0])
    case.x[2] = tiny
    case.x[3] = huge
    case.outs[0][4] = -0.0
    case.x[4] = 0.0
    case.slots[:] = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    check(case, numerics)


def shrink_variants(numerics: str) -> Sequence[tiles.AnyShrinkTile]:
    if numerics == "gemv":
        sizes = [(4, 1, 4, 1), (1, 16, 1, 4), (2, 3, 2, 3), (8, 2, 1, 2)]
        return [tiles.GemvShrinkTile(16, *each) for each in sizes]
    sizes = [(16, 16, 4, 3, False), (32, 64, 4, 3, True), (16, 1024, 4, 1, True)]
    sizes.append((16, 1024, 4, 1, False))
    return [tiles.ShrinkTile(height, *each) for height in (8, 16) for each in sizes]


def expand_variants(numerics: str) -> Sequence[tiles.AnyExpandTile]:
    if numerics == "gemv":
        sizes = [(4, 1, 64, 4), (1, 16, 16, 1), (2, 3, 32, 2), (8, 2, 16, 4)]
        return [tiles.GemvExpandTile(16, *each) for each in sizes]
    sizes = [(16, 1, 16, True), (64, 1, 32, False), (16, 2, 32, True), (32, 4, 32, False)]
    return [
        tiles.ExpandTile(height, *each[:3], 4, 3, each[3]) for height in (8, 16) for each in sizes
    ]


@pytest.mark.parametrize("numerics", NUMERICS)
def test_tile_sizes_do_not_change_bits(device, numerics):
    shape = (6, [20, None, 24], 2100, [40], 24)
    expected = make_case(*shape, device=device).truth(numerics)
    for shrink, expand in product(shrink_variants(numerics), expand_variants(numerics)):
        if shrink.tile_rows == expand.tile_rows:
            case = make_case(*shape, device=device)
            run(case, numerics, shrink=shrink, expand=expand)
            assert_same_bits(case.out_buffers[0], expected[0], f"{shrink} {expand}")


@pytest.mark.parametrize(("max_rank", "block_ranks"), [(8, 32), (8, 16), (12, 16), (24, 64)])
def test_a_block_of_ranks_may_hold_several_slices(device, max_rank, block_ranks):
    shape = (7, [max_rank, None, 3], 1040, [16, 8, 24], max_rank)
    expected = make_case(*shape, device=device).truth("mma")
    case = make_case(*shape, device=device)
    run(case, "mma", shrink=tiles.ShrinkTile(16, block_ranks, 64, 4, 2))
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth, "mma")


@pytest.mark.parametrize(
    ("k_in", "max_rank", "x_pad"),
    [
        (4096, 16, 0),  # all vectors of a lane at once, or in equal groups
        (3000, 8, 8),  # groups, whole vectors beyond them, and a lane in some of the lanes
        (2307, 12, 0),  # and a tail; no row but the first starts at a multiple of 16 bytes
        (640, 64, 3),  # x does not either
        (520, 600, 8),  # more vectors of ranks than lanes
        (511, 520, 8),
    ],
)
def test_gemv_in_vectors_lanes_and_tails(device, k_in, max_rank, x_pad):
    is_large = max_rank > 500  # takes long in the interpreter
    for tile in (2,) if is_large else (0, 2):
        ranks, n_outs = [max_rank, None, max_rank - 3, 1], [9] if is_large else [24, 9]
        case = make_case(6, ranks, k_in, n_outs, max_rank, device=device, x_pad=x_pad, out_pad=3)
        sizes = {"shrink": shrink_variants("gemv")[tile], "expand": expand_variants("gemv")[tile]}
        expected = case.truth("gemv", by_slot=True)
        run(case, "gemv", **sizes)
        for buffer, truth in zip(case.out_buffers, expected, strict=True):
            assert_same_bits(buffer, truth, str(sizes))


def test_gemv_keeps_a_minus_zero(device):
    """Products that underflow leave -0 in lanes, which a further +0 would turn into +0."""
    for k_in, rank in ((512, 1), (520, 8), (1024, 5), (4096, 16)):
        case = make_case(3, [rank], k_in, [16], 16, device=device, slots=[0] * 3)
        pair = case.pairs[0][0]
        assert pair is not None
        case.x[:] = 2.0**-133
        pair.a[:rank] = -(2.0**-133)
        pair.b[:, :rank] = 1.0
        case.outs[0][:] = -0.0
        check(case, "gemv")


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("n_outs", [[40], [16, 8, 520]])
def test_deltas_first_then_the_fold(device, numerics, n_outs):
    case = make_case(9, [5, None, 8], 1040, n_outs, 8, device=device, out_pad=5)
    expected = case.truth(numerics)
    buffer = poisoned((9, sum(n_outs) + 3), device)
    deltas = buffer[:, : sum(n_outs)].split(n_outs, dim=1)
    outs = case.outs
    run(dataclasses.replace(case, outs=deltas), numerics, folds=False)
    b_tables, scale_tables = (
        tuple(getattr(route, name) for route in case.routes) for name in ("b_table", "scale_table")
    )
    fold_triton(deltas, tuple(outs), b_tables, scale_tables, case.slots)
    for out, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(out, truth, numerics)
    base = case.slots.cpu() == 1  # has no adapter
    untouched = poisoned(tuple(buffer.shape), device)[base]
    assert_same_bits(buffer[base], untouched, "rows without an adapter have no delta")


def test_segments_are_added_apart(device):
    """Control: a chain without segments gives other bits, so the fp32 adds cannot be missing."""
    case = make_case(4, [16], 4096, [64], 16, device=device, slots=[0] * 4)
    pair = case.pairs[0][0]
    assert pair is not None
    x, a = case.x.cpu(), pair.a.cpu()
    segmented = reference.mma_dot(x, a)
    assert not torch.equal(segmented, reference.mma_chain(x, a))
    check(case, "mma")


def test_numerics_differ(device):
    """Control: the two numerics are different functions of the same operands."""
    case = make_case(8, [16], 4096, [256], 16, device=device, slots=[0] * 8)
    gemv, mma = case.truth("gemv")[0], case.truth("mma")[0]
    assert not torch.equal(gemv, mma)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 100, 256, 257, 1000])
@pytest.mark.parametrize("num_keys", [1, 5, 70, 5000])
def test_plan_groups_every_row_once(device, num_rows, num_keys):
    generator = torch.Generator().manual_seed(num_rows)
    plan = Plan.empty(num_rows, num_keys, device)
    for spread in (num_keys, 1):  # the second filling must leave nothing of the first
        keys = torch.randint(-1, spread, (num_rows,), generator=generator, dtype=torch.int32)
        keys[0] = num_keys if num_rows > 1 else 0  # beyond the table: in no tile
        group_triton(keys.to(device), plan)
        rows_of = plan.tile_rows.cpu().reshape(-1, plan.block_rows)
        seen: list[int] = []
        for key, rows in zip(plan.tile_key.tolist(), rows_of, strict=True):
            used = rows[rows >= 0].tolist()
            assert rows[: len(used)].tolist() == used, "rows of a tile stand at its front"
            assert bool(used) == (key >= 0)
            assert all(int(keys[r]) == key for r in used)
            seen += used
        valid = (keys >= 0) & (keys < num_keys)
        assert sorted(seen) == valid.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("numerics", NUMERICS)
def test_slots_beyond_the_table_touch_nothing(device, numerics):
    case = make_case(5, [4, 2], 32, [16], 8, device=device)
    case.slots[:] = torch.tensor([2, 7, 2**31 - 1, -(2**31), -1])
    before = [b.clone() for b in case.out_buffers]
    run(case, numerics)
    for buffer, old in zip(case.out_buffers, before, strict=True):
        assert_same_bits(buffer, old)


def test_tile_is_frozen():
    tile = tiles.expand_tile(8, 16, 4096, 64, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tile.block_cols = 1  # type: ignore[misc]
