"""Adapters as values: their checks, and the sizes they report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lorafold.adapter import (
    Adapter,
    ExpertLora,
    ExpertShape,
    ExpertWeights,
    LoadReport,
    LoraWeights,
)
from lorafold.errors import AdapterFormatError
from tests.peft.folders import factor


def half(*shape: int, seed: int = 0) -> Tensor:
    return factor(*shape, seed=seed).to(torch.bfloat16)


def test_sizes_are_those_of_the_factors() -> None:
    weights = LoraWeights(half(4, 16), half(8, 4), scale=1.5)
    assert (weights.rank, weights.in_features, weights.out_features) == (4, 16, 8)
    experts = ExpertWeights(half(3, 4, 16), half(3, 8, 4), scale=1.5)
    assert (experts.num_experts, experts.rank) == (3, 4)
    assert (experts.in_features, experts.out_features) == (16, 8)


def test_delta_norm_is_that_of_the_product() -> None:
    a, b = half(4, 16), half(8, 4)
    product = 1.5 * b.double() @ a.double()
    assert LoraWeights(a, b, scale=-1.5).delta_norm == pytest.approx(float(product.norm()))
    a, b = half(3, 4, 16), half(3, 8, 4)
    product = 1.5 * b.double() @ a.double()
    assert ExpertWeights(a, b, scale=1.5).delta_norm == pytest.approx(float(product.norm()))
    assert ExpertWeights(a, b, scale=3.0).delta_norm != pytest.approx(float(product.norm()))


@pytest.mark.parametrize(
    ("a", "b", "scale", "code"),
    [
        (half(4, 16).float(), half(8, 4), 1.0, "shape"),
        (half(16, 4).T, half(8, 4), 1.0, "shape"),
        (half(4, 32)[:, :16], half(8, 4), 1.0, "shape"),
        (half(4, 16), half(4, 8).T, 1.0, "shape"),
        (half(4, 16), half(8, 5), 1.0, "shape"),
        (half(4, 16), half(2, 8, 4), 1.0, "shape"),
        (half(0, 16), half(8, 0), 1.0, "empty-factor"),
        (half(4, 16), half(8, 4), float("inf"), "bad-config"),
    ],
)
def test_factors_that_do_not_fit_are_refused(a: Any, b: Any, scale: float, code: str) -> None:
    with pytest.raises(AdapterFormatError) as caught:
        LoraWeights(a, b, scale)
    assert caught.value.code == code


def test_rows_of_b_may_be_apart() -> None:
    b = half(8, 6)[:, :4]
    assert LoraWeights(half(4, 16), b, 1.0).b is b
    with pytest.raises(AdapterFormatError):
        ExpertWeights(half(3, 4, 16), half(3, 8, 6)[:, :, :4], 1.0)


def test_an_adapter_needs_a_name_and_a_target() -> None:
    weights = {"lm_head": LoraWeights(half(4, 16), half(8, 4), scale=1.0)}
    with pytest.raises(AdapterFormatError, match="needs a name"):
        Adapter("", weights)
    with pytest.raises(AdapterFormatError, match="at least one target"):
        Adapter("sql", {})


def test_an_adapter_keeps_its_own_mapping_and_knows_its_rank() -> None:
    weights = {"lm_head": LoraWeights(half(4, 16), half(8, 4), scale=1.0)}
    down = ExpertWeights(half(3, 6, 16), half(3, 8, 6), scale=1.0)
    adapter = Adapter("sql", weights, {"mlp.experts": ExpertLora(down=down)})
    weights.clear()
    assert list(adapter.weights) == ["lm_head"]
    assert adapter.rank == 6
    assert adapter.expert_bytes == 2 * 3 * (6 * 16 + 8 * 6)
    assert adapter.nbytes == adapter.expert_bytes + 2 * (4 * 16 + 8 * 4)
    assert adapter.report == LoadReport()
    with pytest.raises(TypeError):
        adapter.weights["other"] = adapter.weights["lm_head"]  # type: ignore[index]


def test_expert_features_name_both_products() -> None:
    shape = ExpertShape(num_experts=4, hidden=16, inner=12)
    assert shape.features("experts.gate_up") == (16, 24)
    assert shape.features("experts.down") == (12, 16)
