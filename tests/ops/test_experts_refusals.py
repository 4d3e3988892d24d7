"""Calls of the expert operators that do not fit: refused where the host can see it, and base_out
is as it was; where only the device can, the rows concerned are left alone.
"""

from __future__ import annotations

import pytest
import torch

from lorafold.errors import RouteError
from lorafold.ops import moe_lora_gather_bgmv, moe_lora_grouped_down, scratch_bytes
from tests.ops.cases import assert_same_bits
from tests.ops.expert_cases import (
    ExpertCase,
    gather_by_kernels,
    grouped_by_kernels,
    make_expert_case,
)

NUMERICS = ("gemv", "mma")


BAD_GROUPED = [
    ({"expert_offsets": [0, 4, 3, 8]}, "must ascend from 0 to the row count .8."),
    ({"expert_offsets": [1, 2, 3, 8]}, "must ascend"),
    ({"expert_offsets": [0, 2, 3, 7]}, "must ascend"),
    ({"expert_offsets": [0, 2, 3, 9]}, "must ascend"),
    ({"expert_offsets": [8]}, "`expert_offsets` must have 2 entries; given: 1"),
    ({"sorted_token_ids": [0, 0, 1, 1, 2, 2, 3, 4]}, "tokens 0 .. 3; given: 0 .. 4"),
    ({"sorted_token_ids": [0, 0, 1, 1, 2, 2, 3, -1]}, "given: -1 .. 3"),
    ({"moe_row_adapter": [0, 0, 0, 2]}, "slots below 2, or negative for base; given: 2"),
    ({"moe_row_adapter": [0, 0, 0]}, "must be tokens 0 .. 2; given: 0 .. 3"),
    ({"row_offset": 5, "row_end": 4}, "window must lie in 0 .. 8; given: 5 .. 4"),
    ({"row_end": 9}, "given: 0 .. 9"),
    ({"row_offset": -1}, "given: -1 .. 8"),
    ({"x_gather": 2}, "x_gather must be 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD_GROUPED, ids=str)
def test_bad_grouped_calls_are_refused_and_touch_nothing(
    change: dict[str, object], message: str
) -> None:
    case = make_expert_case(4, 2, 3, [5, 8], 24, 16, 8, device="cpu")
    ids = torch.int32
    operands: dict[str, object] = {
        "x": case.x,
        "expert_offsets": case.offsets,
        "sorted_token_ids": case.sorted_token_ids,
        "moe_row_adapter": case.row_adapter,
        "x_gather": 1,
    }
    for name, value in change.items():
        operands[name] = torch.tensor(value, dtype=ids) if isinstance(value, list) else value
    out, before = case.out, case.out_buffer.clone()
    moe_lora_grouped_down(case.route, base_out=out.clone(), **{**operands, **_kept(change, case)})
    with pytest.raises(RouteError, match=message):
        moe_lora_grouped_down(case.route, base_out=out, **operands)
    assert_same_bits(case.out_buffer, before)


def _kept(change: dict[str, object], case: ExpertCase) -> dict[str, object]:
    """The right values in the place of the changed ones: the control of every bad call."""
    right: dict[str, object] = {
        "expert_offsets": case.offsets,
        "sorted_token_ids": case.sorted_token_ids,
        "moe_row_adapter": case.row_adapter,
        "row_offset": 0,
        "row_end": None,
        "x_gather": 1,
        "top_k": 2,
        "indices": case.indices,
        "row_adapter": case.row_adapter,
    }
    return {name: right[name] for name in change}


BAD_GATHER = [
    ({"top_k": 0}, "top_k must be at least 1; given: 0"),
    ({"top_k": -1}, "top_k must be at least 1"),
    ({"top_k": 3}, "multiple of top_k .3. entries; given: .8."),
    ({"indices": [0, 1, 2, 0, 1, 2, 0, -1]}, "must not be negative; given: -1"),
    ({"indices": [0, 1, 2, 0, 1, 2]}, "must have 3 entries; given: 4"),
    ({"row_adapter": [0, 0, 0, 2]}, "slots below 2, or negative for base; given: 2"),
    ({"row_adapter": [0, 0, 0]}, "`row_adapter` must have 4 entries; given: 3"),
    ({"x_gather": -1}, "x_gather must be 0"),
    ({"x_gather": 0}, "`x` must be .8, 24.; given: .4, 24."),
]


@pytest.mark.parametrize(("change", "message"), BAD_GATHER, ids=str)
def test_bad_gather_calls_are_refused_and_touch_nothing(
    change: dict[str, object], message: str
) -> None:
    case = make_expert_case(4, 2, 3, [5, 8], 24, 16, 8, device="cpu")
    operands: dict[str, object] = {
        "x": case.x,
        "indices": case.indices,
        "row_adapter": case.row_adapter,
        "top_k": 2,
        "x_gather": 1,
    }
    for name, value in change.items():
        is_ids = isinstance(value, list)
        operands[name] = torch.tensor(value, dtype=torch.int32) if is_ids else value
    out, before = case.out, case.out_buffer.clone()
    moe_lora_gather_bgmv(case.route, base_out=out.clone(), **{**operands, **_kept(change, case)})
    with pytest.raises(RouteError, match=message):
        moe_lora_gather_bgmv(case.route, base_out=out, **operands)
    assert_same_bits(case.out_buffer, before)


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("x", lambda t: t.float(), "`x` must be bfloat16"),
        ("x", lambda t: t[:, :-1], "`x` must be"),
        ("base_out", lambda t: t[:, :-1], "`base_out` must be"),
        ("base_out", lambda t: t[:-1], "`base_out` must be"),
        ("base_out", lambda t: t.clone()[:, :1].expand(-1, 16), "inner stride 1"),
        ("indices", lambda t: t.float(), "int32 or int64 vector"),
        ("indices", lambda t: t.view(2, -1), "int32 or int64 vector"),
        ("row_adapter", lambda t: t.long(), "`row_adapter` must be a contiguous int32 vector"),
    ],
)
def test_operands_of_the_wrong_kind_are_refused(name: str, bad: object, message: str) -> None:
    case = make_expert_case(4, 2, 3, [5, 8], 24, 16, 8, device="cpu")
    operands = {
        "x": case.x,
        "base_out": case.out,
        "indices": case.indices,
        "row_adapter": case.row_adapter,
    }
    operands[name] = bad(operands[name])  # type: ignore[operator]
    before = case.out_buffer.clone()
    with pytest.raises(RouteError, match=message):
        moe_lora_gather_bgmv(case.route, **operands, top_k=2, x_gather=1)
    assert_same_bits(case.out_buffer, before)


def test_too_little_scratch_is_refused() -> None:
    case = make_expert_case(4, 2, 3, [5], 24, 16, 8, device="cpu")
    need = scratch_bytes(8, 1, 24, 8)
    scratch = torch.empty(need - 1, dtype=torch.uint8)
    with pytest.raises(RouteError, match=f"at least {need} bytes"):
        moe_lora_gather_bgmv(
            case.route, case.x, case.out, case.indices, top_k=2, x_gather=1, scratch=scratch
        )
    with pytest.raises(RouteError, match=f"at least {need} bytes"):
        moe_lora_grouped_down(
            case.route, case.x, case.out, case.offsets, case.sorted_token_ids, x_gather=1,
            scratch=scratch,
        )  # fmt: skip


@pytest.mark.parametrize("numerics", NUMERICS)
def test_what_only_the_device_can_see_leaves_its_row_alone(device: str, numerics: str) -> None:
    """Ids that point nowhere give key -1; the other rows of the call are as without them."""
    case = make_expert_case(6, 2, 3, [5, 8], 24, 16, 8, device=device)
    case.row_adapter.fill_(1)
    case.indices[3], case.indices[4] = 2**31 - 1, -5
    case.row_adapter[5] = 7
    before = case.out_buffer.clone()
    case_truth = make_expert_case(6, 2, 3, [5, 8], 24, 16, 8, device=device)
    case_truth.row_adapter.fill_(1)
    case_truth.row_adapter[5] = -1
    truth = case_truth.truth(numerics, 1)
    for row in (3, 4):
        truth[row] = before[row].cpu()
    gather_by_kernels(case, numerics, 1)
    assert_same_bits(case.out_buffer, truth)


def test_offsets_that_only_the_device_can_see_are_broken_touch_nothing(device: str) -> None:
    case = make_expert_case(6, 2, 3, [5, 8], 24, 16, 8, device=device)
    case.offsets[1], case.offsets[2] = int(case.offsets[2]) + 1, int(case.offsets[1])
    before = case.out_buffer.clone()
    grouped_by_kernels(case, case.out, "gemv", 1)
    assert_same_bits(case.out_buffer, before)
