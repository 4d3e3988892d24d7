"""The expert operators: one truth per row, whatever form, window, order and neighbours it has.

On a GPU the operators run the kernels. On the CPU the operators run the reference, and the same
kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.ops import (
    MLG_M_TILE,
    ExpertTables,
    LoraPair,
    MoeExpertRoute,
    Plan,
    apply_lora_bgmv,
    gather_bgmv_grids,
    gather_row_token,
    grouped_down_wc,
    grouped_down_windows,
    moe_lora_gather_bgmv,
    moe_lora_grouped_down,
    pack_expert_tables,
    plan_gather,
    plan_grouped,
    scratch_bytes,
)
from tests.ops.cases import assert_same_bits, bits, poisoned
from tests.ops.expert_cases import (
    Choose,
    ExpertCase,
    anywhere,
    dense_route,
    gather_by_kernels,
    grouped_by_kernels,
    make_expert_case,
    skewed,
)

NUMERICS = ("gemv", "mma")


# Pure functions


@given(begin=st.integers(0, 5000), rows=st.integers(0, 5000))
def test_wc_tiles_cover_the_window(begin: int, rows: int) -> None:
    tiles = grouped_down_wc(begin, begin + rows)
    assert tiles >= 1
    assert (tiles - 1) * MLG_M_TILE < max(rows, 1) <= tiles * MLG_M_TILE


def test_wc_by_hand() -> None:
    assert MLG_M_TILE == 64
    assert [grouped_down_wc(5, 5 + n) for n in (0, 1, 64, 65, 128, 129)] == [1, 1, 1, 2, 2, 3]
    assert grouped_down_wc(9, 2) == 1


@given(total=st.integers(0, 300), cap=st.integers(1, 70))
def test_windows_partition_the_rows(total: int, cap: int) -> None:
    windows = list(grouped_down_windows(total, cap))
    assert [r for begin, end in windows for r in range(begin, end)] == list(range(total))
    assert all(0 < end - begin <= cap for begin, end in windows)
    assert len(windows) == -(-total // cap)


@pytest.mark.parametrize(("total", "cap"), [(4, 0), (4, -1), (-1, 4)])
def test_windows_without_room_are_refused(total: int, cap: int) -> None:
    with pytest.raises(RouteError, match=f"cap {cap}, total_rows {total}"):
        grouped_down_windows(total, cap)


@given(rank=st.integers(1, 300), n_out=st.integers(1, 6000), slots=st.integers(1, 99))
def test_gather_grids_have_one_program_per_four_outputs(rank: int, n_out: int, slots: int) -> None:
    shrink, expand = gather_bgmv_grids(rank, n_out, slots)
    assert shrink == ((rank + 3) // 4, slots, 1)
    assert expand == ((n_out + 3) // 4, slots, 1)


def test_the_token_of_a_gathered_row() -> None:
    assert [gather_row_token(r, 4) for r in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert gather_row_token(7, 1) == 7
    for top_k in (0, -2):
        with pytest.raises(RouteError, match=f"top_k must be at least 1; given: {top_k}"):
            gather_row_token(3, top_k)


def test_packed_tables_are_indexed_by_expert_id() -> None:
    tables = pack_expert_tables([(5, 512, 528, 0.25), (1, 64, 80, 2.0)])
    assert tables == ExpertTables(
        a=(0, 64, 0, 0, 0, 512),
        b=(0, 80, 0, 0, 0, 528),
        scale=(0.0, 2.0, 0.0, 0.0, 0.0, 0.25),
        num_experts=6,
    )


def test_packing_nothing_gives_no_tables() -> None:
    assert pack_expert_tables([]) is None
    assert pack_expert_tables(iter(())) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2**62), st.integers(1, 2**62),
                          st.floats(-8, 8)), min_size=1))  # fmt: skip
def test_of_a_repeated_expert_the_last_entry_wins(
    entries: list[tuple[int, int, int, float]],
) -> None:
    tables = pack_expert_tables(entries)
    assert tables is not None
    last = {}
    for expert, a, b, scale in entries:
        last[expert] = (a, b, scale)
    assert tables.num_experts == max(last) + 1
    for expert in range(tables.num_experts):
        row = tables.a[expert], tables.b[expert], tables.scale[expert]
        assert row == last.get(expert, (0, 0, 0.0))


def test_negative_expert_ids_cannot_be_packed() -> None:
    with pytest.raises(RouteError, match="must not be negative; given: -3"):
        pack_expert_tables([(0, 1, 1, 1.0), (-3, 1, 1, 1.0)])


def test_a_route_knows_its_sizes_and_refuses_half_a_slot() -> None:
    route = make_expert_case(1, 1, 3, [4, 4], 16, 16, 8, device="cpu").route
    assert (route.num_keys, route.num_experts, route.max_loras) == (6, 3, 2)
    assert (route.k_in, route.n_out, route.max_rank) == (16, 16, 8)
    tables = (route.a_table, route.b_table, route.scale_table, route.rank_table)
    for num_experts in (4, 0, -1):
        with pytest.raises(RouteError, match=f"6 entries, num_experts {num_experts}"):
            MoeExpertRoute(*tables, num_experts, 16, 16, 8)
    with pytest.raises(RouteError, match="`b_table`"):
        MoeExpertRoute(tables[0], tables[1].int(), *tables[2:], 3, 16, 16, 8)
    pair = LoraPair(*(torch.zeros(8, 8, dtype=torch.bfloat16) for _ in "ab"), scale=1.0)
    for key in ((2, 0), (0, 3), (-1, 0)):
        with pytest.raises(RouteError, match="slot below 2, expert below 3"):
            MoeExpertRoute.from_pairs({key: pair}, max_loras=2, num_experts=3)


# The same bits in every form


def gather(case: ExpertCase, numerics: str, x_gather: int, **more: object) -> None:
    moe_lora_gather_bgmv(
        case.route, case.x if x_gather else case.x_rows, case.out, case.indices, case.row_adapter,
        top_k=case.top_k, x_gather=x_gather, numerics=numerics, **more,
    )  # fmt: skip


def grouped(
    case: ExpertCase, sorted_out: Tensor, numerics: str, x_gather: int, **more: object
) -> None:
    moe_lora_grouped_down(
        case.route, case.x if x_gather else case.x_rows[case.order], sorted_out, case.offsets,
        case.sorted_token_ids, case.row_adapter, x_gather=x_gather, numerics=numerics, **more,
    )  # fmt: skip


def dense(case: ExpertCase, numerics: str, x_gather: int) -> None:
    keys = case.keys().to(case.x.device)
    apply_lora_bgmv(
        dense_route(case.route), case.input_rows(x_gather), case.out, keys, numerics=numerics
    )


SHAPES = [
    # tokens, top_k, experts, ranks per slot, k_in, n_out, max_rank, rows at experts
    pytest.param(1, 1, 1, [3], 16, 16, 8, anywhere, id="one-row"),
    pytest.param(7, 2, 4, [5, 8, 2], 40, 33, 8, anywhere, id="many-adapters"),
    pytest.param(9, 3, 6, [12, 16], 100, 20, 16, skewed, id="skewed-and-empty-experts"),
    pytest.param(3, 2, 3, [20], 1032, 24, 24, anywhere, id="two-segments"),
]
Shape = tuple[int, int, int, list[int], int, int, int]


@pytest.mark.parametrize("x_gather", [0, 1])
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("t", "k", "e", "ranks", "k_in", "n_out", "max_rank", "choose"), SHAPES)
def test_all_forms_equal_every_row_alone(
    device: str, numerics: str, x_gather: int, t: int, k: int, e: int, ranks: list[int],
    k_in: int, n_out: int, max_rank: int, choose: Choose,
) -> None:  # fmt: skip
    def case() -> ExpertCase:
        return make_expert_case(t, k, e, ranks, k_in, n_out, max_rank, device=device, choose=choose)

    truth = case().truth(numerics, x_gather)
    for run in (gather, dense, gather_by_kernels):
        at = case()
        run(at, numerics, x_gather)
        assert_same_bits(at.out_buffer, truth, run.__name__)
    for run in (grouped, grouped_by_kernels):
        at = case()
        sorted_out = at.out[at.order]
        run(at, sorted_out, numerics, x_gather)
        at.out[at.order] = sorted_out
        assert_same_bits(at.out_buffer, truth, run.__name__)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_case_can_tell_right_from_wrong(numerics: str) -> None:
    """Control: another expert, another slot, the wrong input row or base rows that are touched
    would all show."""
    case = make_expert_case(7, 2, 4, [5, 8, 2], 40, 33, 8, device="cpu")
    truth = case.truth(numerics, 1)
    before = case.out_buffer.clone()
    changed = (bits(truth) != bits(before)).any(dim=1)
    assert changed.any()
    assert not changed.all()
    assert not torch.equal(bits(case.truth(numerics, 0)), bits(truth))
    for vector in (case.indices, case.row_adapter):
        kept = vector.clone()
        vector.copy_(vector.roll(1))
        assert not torch.equal(bits(case.truth(numerics, 1)), bits(truth))
        vector.copy_(kept)


@pytest.mark.parametrize("x_gather", [0, 1])
@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("cap", [1, 4, 5, 1000])
def test_any_split_into_windows_gives_the_same_bits(
    device: str, numerics: str, x_gather: int, cap: int
) -> None:
    case = make_expert_case(5, 3, 4, [5, 8], 40, 24, 8, device=device)
    sorted_out = case.out[case.order]
    for begin, end in grouped_down_windows(case.num_rows, cap):
        grouped(case, sorted_out, numerics, x_gather, row_offset=begin, row_end=end)
    truth = case.truth(numerics, x_gather)
    case.out[case.order] = sorted_out
    assert_same_bits(case.out_buffer, truth)


def test_rows_outside_the_window_are_not_touched(device: str) -> None:
    case = make_expert_case(5, 2, 4, [5, 8], 24, 16, 8, device=device)
    case.row_adapter.fill_(0)
    sorted_out = case.out[case.order]
    before = sorted_out.clone()
    grouped(case, sorted_out, "gemv", 1, row_offset=3, row_end=6)
    assert_same_bits(sorted_out[:3], before[:3])
    assert_same_bits(sorted_out[6:], before[6:])
    assert not torch.equal(bits(sorted_out[3:6]), bits(before[3:6]))
    grouped(case, sorted_out, "gemv", 1, row_offset=7, row_end=7)  # an empty window
    assert_same_bits(sorted_out[6:], before[6:])


@pytest.mark.parametrize("numerics", NUMERICS)
def test_a_row_does_not_see_its_neighbours(device: str, numerics: str) -> None:
    case = make_expert_case(6, 2, 3, [5, 8, 2], 40, 24, 8, device=device, seed=3)
    before = case.out.clone()
    gather(case, numerics, 1)
    for token in range(case.num_tokens):
        rows = slice(token * case.top_k, (token + 1) * case.top_k)
        alone = before[rows].clone()
        moe_lora_gather_bgmv(
            case.route, case.x[token : token + 1], alone, case.indices[rows].contiguous(),
            case.row_adapter[token : token + 1], top_k=case.top_k, x_gather=1, numerics=numerics,
        )  # fmt: skip
        assert_same_bits(alone, case.out[rows])


@pytest.mark.parametrize("numerics", NUMERICS)
def test_experts_beyond_the_table_are_not_adapted(device: str, numerics: str) -> None:
    """Seven experts in the layer, of which the adapters know four."""
    for run, is_sorted in ((gather, False), (gather_by_kernels, False), (grouped, True),
                           (grouped_by_kernels, True)):  # fmt: skip
        case = make_expert_case(8, 2, 4, [5, 8], 24, 16, 8, device=device, layer_experts=7, seed=5)
        assert int(case.indices.max()) > 3 > int(case.indices.min())
        truth = case.truth(numerics, 0)
        if is_sorted:
            sorted_out = case.out[case.order]
            run(case, sorted_out, numerics, 0)
            case.out[case.order] = sorted_out
        else:
            run(case, numerics, 0)
        assert_same_bits(case.out_buffer, truth, run.__name__)


def test_without_a_row_map_every_token_has_slot_0(device: str) -> None:
    case = make_expert_case(4, 2, 3, [5], 24, 16, 8, device=device)
    case.row_adapter.zero_()
    truth = case.truth("gemv", 1)
    sorted_out = case.out[case.order]
    moe_lora_gather_bgmv(
        case.route, case.x, case.out, case.indices.long(), top_k=2, x_gather=1, numerics="gemv"
    )
    assert_same_bits(case.out_buffer, truth)
    for x_gather, x in ((0, case.x.repeat_interleave(2, dim=0)[case.order]), (1, case.x)):
        at = sorted_out.clone()
        moe_lora_grouped_down(
            case.route, x, at, case.offsets, case.sorted_token_ids, x_gather=x_gather,
            numerics="gemv",
        )  # fmt: skip
        assert_same_bits(at, case.out[case.order])


@pytest.mark.parametrize("numerics", NUMERICS)
def test_one_plan_and_one_scratch_serve_all_projections(device: str, numerics: str) -> None:
    up = make_expert_case(5, 2, 3, [5, 8], 40, 24, 8, device=device)
    down = make_expert_case(5, 2, 3, [5, 8], 24, 40, 8, device=device)
    down.indices, down.row_adapter, down.order = up.indices, up.row_adapter, up.order
    size = max(scratch_bytes(up.num_rows, 1, k_in, 8) for k_in in (40, 24))
    scratch = poisoned((size // 2,), device).view(torch.uint8)
    plan = Plan.empty(up.num_rows, up.route.num_keys, device)
    addresses = [t.data_ptr() for t in (plan.keys, plan.tile_key, plan.tile_rows)]
    for indices in (up.indices, up.indices.roll(1)):
        up.indices.copy_(indices.clone())
        assert plan_gather(up.route, up.indices, up.row_adapter, 2, plan=plan) is plan
        for case, x_gather in ((up, 1), (down, 0)):
            truth = case.truth(numerics, x_gather)
            gather(case, numerics, x_gather, plan=plan, scratch=scratch)
            assert_same_bits(case.out_buffer, truth)
    assert addresses == [t.data_ptr() for t in (plan.keys, plan.tile_key, plan.tile_rows)]


def test_a_plan_of_a_window_serves_that_window(device: str) -> None:
    case = make_expert_case(5, 2, 3, [5, 8], 24, 16, 8, device=device)
    truth = case.truth("mma", 1)
    sorted_out = case.out[case.order]
    for begin, end in ((0, 4), (4, 10)):
        plan = plan_grouped(
            case.route, case.offsets, case.sorted_token_ids, case.row_adapter, case.num_tokens,
            row_offset=begin, row_end=end,
        )  # fmt: skip
        grouped(case, sorted_out, "mma", 1, row_offset=begin, row_end=end, plan=plan)
    case.out[case.order] = sorted_out
    assert_same_bits(case.out_buffer, truth)
    with pytest.raises(
        RouteError, match="the plan is for 6 rows and 6 keys on cpu; given: 10 rows"
    ):
        grouped(case, sorted_out, "mma", 1, plan=plan)
