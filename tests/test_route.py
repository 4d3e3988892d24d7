"""Pairs and routes: what fits together, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lorafold.errors import RouteError
from lorafold.ops import LoraAttnWeights, LoraFfnWeights, LoraPair, LoraRoute


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def test_sizes_come_from_the_matrices():
    pair = LoraPair(bf16(8, 32), bf16(16, 8), scale=4 / 3, rank=5)
    assert (pair.rank, pair.max_rank, pair.k_in, pair.n_out) == (5, 8, 32, 16)
    assert LoraPair(bf16(8, 32), bf16(16, 8), 1.0).rank == 8


@pytest.mark.parametrize(
    ("a", "b", "rank", "message"),
    [
        (torch.ones(8, 32), bf16(16, 8), None, "`a` must be a contiguous 2-D bfloat16"),
        (bf16(8, 32), bf16(8, 16).T, None, "`b` must be a contiguous"),
        (bf16(8, 32), bf16(16, 9), None, r"given: \(8, 32\) and \(16, 9\)"),
        (bf16(8, 0), bf16(16, 8), None, "none of them 0"),
        (bf16(8, 32), bf16(16, 8), 9, r"rank must be 1 .. 8 \(max_rank\); given: 9"),
        (bf16(8, 32), bf16(16, 8), 0, "given: 0"),
        (bf16(8 * 32 + 1)[1:].view(8, 32), bf16(16, 8), None, "multiple of 16 bytes"),
        (bf16(8, 32), bf16(16, 8).to("meta"), None, "one device"),
    ],
)
def test_a_pair_that_does_not_fit(a, b, rank, message):
    with pytest.raises(RouteError, match=message):
        LoraPair(a, b, 1.0, rank=rank)


def test_tables_of_a_route():
    first, second = (
        LoraPair(bf16(8, 32), bf16(16, 8), 0.5, rank=3),
        LoraPair(bf16(8, 32), bf16(16, 8), 2.0),
    )
    route = LoraRoute.from_pairs([None, first, second])
    assert route.a_table.tolist() == [0, first.a.data_ptr(), second.a.data_ptr()]
    assert route.b_table.tolist() == [0, first.b.data_ptr(), second.b.data_ptr()]
    assert route.scale_table.tolist() == [0.0, 0.5, 2.0]
    assert route.rank_table.tolist() == [0, 3, 8]
    assert (route.max_loras, route.device.type) == (3, "cpu")


def test_a_route_keeps_its_matrices_alive():
    route = LoraRoute.from_pairs([LoraPair(bf16(8, 32), bf16(16, 8), 1.0)])
    assert {t.data_ptr() for t in route.storage} == {int(route.a_table[0]), int(route.b_table[0])}


def test_pairs_of_a_route_must_agree():
    with pytest.raises(RouteError, match="must share device, k_in, n_out and max_rank"):
        LoraRoute.from_pairs(
            [LoraPair(bf16(8, 32), bf16(16, 8), 1.0), LoraPair(bf16(8, 40), bf16(16, 8), 1.0)]
        )
    with pytest.raises(RouteError, match="at least one pair"):
        LoraRoute.from_pairs([None, None])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "a_table",
            torch.zeros(2, dtype=torch.int32),
            "`a_table` must be a contiguous torch.int64",
        ),
        ("b_table", torch.zeros(3, dtype=torch.int64), "`b_table`.*as long as a_table"),
        ("scale_table", torch.zeros(2, dtype=torch.float64), "`scale_table`"),
        ("rank_table", torch.zeros(4, dtype=torch.int32)[::2], "`rank_table`"),
        ("k_in", 0, "must be at least 1; given: 0, 16, 8"),
    ],
)
def test_tables_that_do_not_fit(field, value, message):
    fields = {
        "a_table": torch.zeros(2, dtype=torch.int64),
        "b_table": torch.zeros(2, dtype=torch.int64),
        "scale_table": torch.zeros(2),
        "rank_table": torch.zeros(2, dtype=torch.int32),
        "k_in": 32,
        "n_out": 16,
        "max_rank": 8,
    }
    with pytest.raises(RouteError, match=message):
        LoraRoute(**{**fields, field: value})


def test_layers_start_without_adapters():
    attention, ffn = LoraAttnWeights(layer_idx=3), LoraFfnWeights()
    assert attention.layer_idx == 3
    assert {attention.q, attention.o_route, ffn.gate, ffn.down_route} == {None}
