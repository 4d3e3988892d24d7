"""Fused linear layers: cut and joined adapters have the delta of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafold.adapter import Adapter, TargetShape
from lorafold.errors import AdapterFormatError
from lorafold.peft import load_adapter
from lorafold.peft.fused import common_scale
from lorafold.refusal import Decisions
from tests.peft.folders import CONFIG, HIDDEN, PREFIX, Targets, factor, pair, write

ATTENTION = "model.layers.0.self_attn"
SPLIT = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
LINEAR_ATTENTION = {"in_proj_q": 8, "in_proj_k": 8, "in_proj_v": 16}
GATED = {"gate_proj": 24, "up_proj": 24}
CASES = [("qkv_proj", SPLIT), ("in_proj_qkv", LINEAR_ATTENTION), ("gate_up_proj", GATED)]


def split_targets(parts: dict[str, int]) -> Targets:
    return {f"{ATTENTION}.{part}": TargetShape(HIDDEN, size) for part, size in parts.items()}


def fused_target(whole: str, parts: dict[str, int]) -> Targets:
    return {f"{ATTENTION}.{whole}": TargetShape(HIDDEN, sum(parts.values()))}


def split_tensors(parts: dict[str, int], ranks: dict[str, int] | None = None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for number, (part, size) in enumerate(parts.items()):
        rank = (ranks or {}).get(part, 4)
        tensors |= pair(f"{PREFIX}0.self_attn.{part}", (HIDDEN, size), rank, seed=2 * number)
    return tensors


def delta(adapter: Adapter, target: str) -> Tensor:
    weights = adapter.weights[f"{ATTENTION}.{target}"]
    return weights.scale * weights.b.double() @ weights.a.double()


@pytest.mark.parametrize(("whole", "parts"), CASES)
def test_a_fused_adapter_is_cut_for_a_split_model(
    tmp_path: Path, whole: str, parts: dict[str, int]
) -> None:
    tensors = pair(f"{PREFIX}0.self_attn.{whole}", (HIDDEN, sum(parts.values())))
    folder = write(tmp_path, tensors)
    fused = load_adapter(folder, fused_target(whole, parts))
    cut = load_adapter(folder, split_targets(parts))
    together = torch.cat([delta(cut, part) for part in parts])
    assert torch.equal(together, delta(fused, whole))
    assert cut.report.num_tensors == 2
    assert len(cut.report.bound) == len(parts)
    assert any("is cut into" in line for line in cut.report.decisions)


@pytest.mark.parametrize(("whole", "parts"), CASES)
def test_a_split_adapter_is_joined_for_a_fused_model(
    tmp_path: Path, whole: str, parts: dict[str, int]
) -> None:
    ranks = dict(zip(parts, (2, 4, 3), strict=False))
    config = CONFIG | {
        "rank_pattern": ranks,
        "alpha_pattern": {part: 1.5 * r for part, r in ranks.items()},
    }
    folder = write(tmp_path, split_tensors(parts, ranks), config)
    split = load_adapter(folder, split_targets(parts))
    joined = load_adapter(folder, fused_target(whole, parts))
    weights = joined.weights[f"{ATTENTION}.{whole}"]
    assert weights.rank == sum(ranks[part] for part in parts)
    together = torch.cat([delta(split, part) for part in parts])
    assert torch.equal(together, delta(joined, whole))
    assert joined.report.num_tensors == 2 * len(parts)


@pytest.mark.parametrize("absent", SPLIT)
def test_one_absent_slice_is_zero(tmp_path: Path, absent: str) -> None:
    present = {part: size for part, size in SPLIT.items() if part != absent}
    folder = write(tmp_path, split_tensors(present))
    split = load_adapter(folder, split_targets(SPLIT))
    joined = load_adapter(folder, fused_target("qkv_proj", SPLIT))
    zero = torch.zeros(SPLIT[absent], HIDDEN, dtype=torch.float64)
    rows = [delta(split, part) if part in present else zero for part in SPLIT]
    assert torch.equal(torch.cat(rows), delta(joined, "qkv_proj"))


@pytest.mark.parametrize("present", GATED)
def test_gate_or_up_alone_is_half(tmp_path: Path, present: str) -> None:
    folder = write(tmp_path, split_tensors({present: 24}))
    joined = load_adapter(folder, fused_target("gate_up_proj", GATED))
    halves = delta(joined, "gate_up_proj").chunk(2)
    assert [bool(half.any()) for half in halves] == [part == present for part in GATED]


@pytest.mark.parametrize(
    ("parts", "total"),
    [
        ({"q_proj": 16}, 32),  # two slices are absent
        ({"q_proj": 16, "v_proj": 8}, 31),  # keys and values differ
        ({"q_proj": 16, "k_proj": 8, "v_proj": 8}, 40),
    ],
)
def test_borders_that_do_not_follow_are_refused(
    tmp_path: Path, parts: dict[str, int], total: int
) -> None:
    folder = write(tmp_path, split_tensors(parts))
    with pytest.raises(AdapterFormatError) as caught:
        load_adapter(folder, {f"{ATTENTION}.qkv_proj": TargetShape(HIDDEN, total)})
    assert caught.value.code == "fused-slices"


@pytest.mark.parametrize(
    ("alphas", "code"),
    [
        ({"q_proj": 6, "k_proj": 12}, ""),
        ({"q_proj": 6, "k_proj": -3}, ""),
        ({"q_proj": 6, "k_proj": 0}, ""),
        ({"q_proj": 0, "k_proj": 6}, ""),
        ({"q_proj": 6, "k_proj": 9}, "fused-scales"),
        ({"q_proj": 1e30, "k_proj": 1e-30}, "fused-scales"),
    ],
)
def test_scales_are_joined_exactly_or_not_at_all(
    tmp_path: Path, alphas: dict[str, Any], code: str
) -> None:
    folder = write(tmp_path, split_tensors(SPLIT), CONFIG | {"alpha_pattern": alphas})
    split = load_adapter(folder, split_targets(SPLIT))
    if code:
        with pytest.raises(AdapterFormatError) as caught:
            load_adapter(folder, fused_target("qkv_proj", SPLIT))
        assert caught.value.code == code
    else:
        joined = load_adapter(folder, fused_target("qkv_proj", SPLIT))
        together = torch.cat([delta(split, part) for part in SPLIT])
        assert torch.equal(together, delta(joined, "qkv_proj"))


def test_a_power_of_two_that_leaves_bfloat16_is_refused() -> None:
    large = torch.full((2, 2), 2.0**127, dtype=torch.bfloat16)
    small = torch.full((2, 2), 2.0**-133, dtype=torch.bfloat16)
    for factors, scales in [([large, large], [1.0, 2.0]), ([small, small], [1.0, 0.5])]:
        with pytest.raises(AdapterFormatError) as caught:
            common_scale(scales, factors, "qkv_proj", Decisions("sql"))
        assert caught.value.code == "fused-scales"
    ones = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(AdapterFormatError):  # exact for these values only
        common_scale([1.0, 1.5], [ones, ones], "qkv_proj", Decisions("sql"))
    fine = factor(2, 2).to(torch.bfloat16)
    scale, (first, second) = common_scale([1.0, 0.25], [fine, fine], "qkv_proj", Decisions("sql"))
    assert (scale, first is fine) == (1.0, True)
    assert torch.equal(second.float(), fine.float() / 4)
