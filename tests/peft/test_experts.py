"""Expert factors one by one or stacked: one A and B for all experts, with the delta of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.errors import AdapterError, AdapterFormatError
from lorafold.peft import load_adapter, parse
from tests.peft.expert_folders import (
    BOTH,
    EXPERTS,
    FILE,
    GPT_OSS,
    HIDDEN,
    INNER,
    NUM_EXPERTS,
    PLAIN,
    assert_same_deltas,
    deltas_of,
    expert_config,
    folded,
)
from tests.peft.folders import PREFIX, Targets, factor, pair, write


def singles(names: tuple[str, str, str], rank: int = 3) -> dict[str, Tensor]:
    """gate, up and down of every expert, one by one."""
    gate, up, down = names
    tensors: dict[str, Tensor] = {}
    for expert in range(NUM_EXPERTS):
        for name, sizes in (
            (gate, (HIDDEN, INNER)),
            (up, (HIDDEN, INNER)),
            (down, (INNER, HIDDEN)),
        ):
            seed = 10 * expert + len(tensors)
            tensors |= pair(f"{FILE}.{expert}.{name}", sizes, rank, seed=seed)
    return tensors


def literal_deltas(
    tensors: dict[str, Tensor], names: tuple[str, str, str], scale: float
) -> dict[str, Tensor]:
    """The deltas of one-by-one tensors, by their definition."""

    def delta(expert: int, name: str) -> Tensor:
        path = f"{FILE}.{expert}.{name}"
        return scale * tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]

    gate, up, down = names
    experts = range(NUM_EXPERTS)
    return {
        f"{EXPERTS}.gate_up_proj": torch.stack(
            [torch.cat([delta(e, gate), delta(e, up)]) for e in experts]
        ),
        f"{EXPERTS}.down_proj": torch.stack([delta(e, down) for e in experts]),
    }


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize(
    "names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")], ids=["qwen", "mixtral"]
)
def test_experts_one_by_one_become_one_target(
    tmp_path: Path, names: tuple[str, str, str], use_rslora: bool
) -> None:
    tensors = singles(names)
    config = expert_config(target_parameters=None, use_rslora=use_rslora)
    config["target_modules"] = list(names)
    scale = 3**0.5 if use_rslora else 1.0
    expected = literal_deltas(tensors, names, scale)
    shapes: Targets = {EXPERTS: PLAIN}
    old = {n.replace("mlp", "block_sparse_moe"): t for n, t in tensors.items()}
    for number, stored in enumerate((tensors, old)):
        folder = write(tmp_path / str(number), stored, config)
        adapter = load_adapter(folder, shapes)
        assert_same_deltas(deltas_of(adapter, shapes), expected)
        gate_up = adapter.experts[EXPERTS].gate_up
        assert gate_up is not None
        assert gate_up.rank == 6
        assert adapter.report.num_tensors == len(tensors)
    # Where the base alternates gate and up, so do the rows of B.
    shapes = {EXPERTS: ExpertShape(NUM_EXPERTS, HIDDEN, INNER, interleaved=True)}
    found = deltas_of(load_adapter(folder, shapes), shapes)[f"{EXPERTS}.gate_up_proj"]
    gates, ups = expected[f"{EXPERTS}.gate_up_proj"].chunk(2, dim=1)
    torch.testing.assert_close(found[:, 0::2], gates)
    torch.testing.assert_close(found[:, 1::2], ups)


def test_experts_one_by_one_may_be_linear_targets(tmp_path: Path) -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    folder = write(tmp_path, singles(names), expert_config(target_parameters=None))
    shapes: Targets = {
        f"{EXPERTS}.{e}.{name}": TargetShape(*sizes)
        for e in range(NUM_EXPERTS)
        for name, sizes in zip(names, [(HIDDEN, INNER)] * 2 + [(INNER, HIDDEN)], strict=True)
    }
    adapter = load_adapter(folder, shapes)
    assert adapter.weights.keys() == shapes.keys()
    assert not adapter.experts


def test_ranks_and_scales_of_single_experts(tmp_path: Path) -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = singles(names) | pair(f"{FILE}.1.down_proj", (INNER, HIDDEN), 2)
    shapes: Targets = {EXPERTS: PLAIN}
    fields = {"rank_pattern": {"experts.1.down_proj": 2}, "target_parameters": None}
    # alpha 3 at rank 2 is a scale of 1.5, at rank 3 of 1: no power of two.
    with pytest.raises(AdapterFormatError) as caught:
        load_adapter(write(tmp_path / "0", tensors, expert_config(**fields)), shapes)
    assert caught.value.code == "fused-scales"
    fields["alpha_pattern"] = {"experts.1.down_proj": 4}
    adapter = load_adapter(write(tmp_path / "1", tensors, expert_config(**fields)), shapes)
    expected = literal_deltas(tensors, names, 1.0)
    expected[f"{EXPERTS}.down_proj"][1] *= 2
    assert_same_deltas(deltas_of(adapter, shapes), expected)


@pytest.mark.parametrize("absent", [".2.down_proj.", ".up_proj."])
def test_absent_experts_are_refused_or_zero(tmp_path: Path, absent: str) -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = singles(names)
    folder = write(
        tmp_path,
        {name: t for name, t in tensors.items() if absent not in name},
        expert_config(target_parameters=None),
    )
    shapes: Targets = {EXPERTS: PLAIN}
    with pytest.raises(AdapterFormatError) as caught:
        load_adapter(folder, shapes)
    assert caught.value.code == "incomplete-experts"
    zeroed = {n: t * 0 if absent in n else t for n, t in tensors.items()}
    adapter = load_adapter(folder, shapes, strict=False)
    assert_same_deltas(deltas_of(adapter, shapes), literal_deltas(zeroed, names, 1.0))
    assert adapter.report.skipped


def test_unsloth_gpt_oss_modules_are_experts(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for expert in range(NUM_EXPERTS):
        tensors |= pair(f"{FILE}.gate_up_projs.{expert}", (HIDDEN, 2 * INNER), 3, seed=expert)
        tensors |= pair(f"{FILE}.down_projs.{expert}", (INNER, HIDDEN), 3, seed=20 + expert)
    folder = write(tmp_path, tensors, expert_config(target_parameters=None))
    shapes: Targets = {EXPERTS: GPT_OSS}
    found = deltas_of(load_adapter(folder, shapes), shapes)
    for expert in range(NUM_EXPERTS):
        path = f"{FILE}.gate_up_projs.{expert}"
        delta = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
        torch.testing.assert_close(found[f"{EXPERTS}.gate_up_proj"][expert], delta.T)


def stacks(*, shared: bool = False, rank: int = 3) -> dict[str, Tensor]:
    """Tinker's 3-D tensors; `shared`: all experts have one A of gate and up, and one B of down."""
    one = 1 if shared else NUM_EXPERTS
    return {
        f"{FILE}.w1.lora_A.weight": factor(one, rank, HIDDEN, seed=1),
        f"{FILE}.w1.lora_B.weight": factor(NUM_EXPERTS, INNER, rank, seed=2),
        f"{FILE}.w3.lora_A.weight": factor(one, rank, HIDDEN, seed=3),
        f"{FILE}.w3.lora_B.weight": factor(NUM_EXPERTS, INNER, rank, seed=4),
        f"{FILE}.w2.lora_A.weight": factor(NUM_EXPERTS, rank, INNER, seed=5),
        f"{FILE}.w2.lora_B.weight": factor(one, HIDDEN, rank, seed=6),
    }


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("storage", ["tinker", "transposed", "oriented"])
def test_stacked_experts_are_read_in_every_orientation(
    tmp_path: Path, storage: str, shared: bool
) -> None:
    tensors = stacks(shared=shared)
    product = {w: tensors[f"{FILE}.{w}.lora_B.weight"] @ tensors[f"{FILE}.{w}.lora_A.weight"]
               for w in ("w1", "w2", "w3")}  # fmt: skip
    stored = tensors
    if storage == "transposed":
        stored = {name: t.mT for name, t in tensors.items()}
    if storage == "oriented":
        stored = {n: t.permute(1, 2, 0) if "lora_B" in n else t for n, t in tensors.items()}
    folder = write(tmp_path, stored, expert_config(target_parameters=None))
    shapes: Targets = {EXPERTS: PLAIN}
    found = deltas_of(load_adapter(folder, shapes), shapes)
    expected = {
        f"{EXPERTS}.gate_up_proj": torch.cat([product["w1"], product["w3"]], dim=1),
        f"{EXPERTS}.down_proj": product["w2"],
    }
    assert_same_deltas(found, expected)


def test_packed_gate_up_is_one_stack(tmp_path: Path) -> None:
    a, b = factor(NUM_EXPERTS, 3, HIDDEN), factor(NUM_EXPERTS, 2 * INNER, 3)
    tensors = {f"{FILE}.gate_up_proj.lora_A": a, f"{FILE}.gate_up_proj.lora_B": b}
    shapes: Targets = {EXPERTS: PLAIN}
    folder = write(tmp_path, tensors, expert_config(target_parameters=BOTH[:1]))
    found = deltas_of(load_adapter(folder, shapes), shapes)
    assert_same_deltas(found, {f"{EXPERTS}.gate_up_proj": b @ a})


def test_a_stack_that_reads_two_ways_is_refused(tmp_path: Path) -> None:
    # 3 experts of rank 3 onto 3 outputs: no shape tells experts, rank and outputs apart.
    tensors = {
        f"{FILE}.w2.lora_A.weight": factor(3, 3, 3),
        f"{FILE}.w2.lora_B.weight": factor(3, 3, 3),
    }
    folder = write(tmp_path, tensors, expert_config(target_parameters=None))
    with pytest.raises(AdapterFormatError) as caught:
        load_adapter(folder, {EXPERTS: ExpertShape(3, 3, 3)})
    assert caught.value.code == "ambiguous-expert-layout"


@pytest.mark.parametrize(
    ("tensors", "fields", "shape", "code"),
    [
        (folded()[0], {}, ExpertShape(5, HIDDEN, INNER), "rank-mismatch"),
        (folded()[0], {"r": 6}, PLAIN, "rank-mismatch"),
        (folded()[0], {}, ExpertShape(NUM_EXPERTS, HIDDEN, INNER + 1), "shape-mismatch"),
        (folded()[0], {}, TargetShape(HIDDEN, HIDDEN), "unmatched-path"),
        (singles(("gate_proj", "up_proj", "down_proj")), {}, ExpertShape(3, HIDDEN, INNER),
         "shape-mismatch"),
        (stacks(), {"r": 4}, PLAIN, "shape-mismatch"),
        (stacks(), {}, ExpertShape(5, HIDDEN, INNER), "shape-mismatch"),
        (stacks() | folded()[0], {}, PLAIN, "duplicate-tensor"),
        ({n.replace("experts.", "experts.base_layer.base_layer."): t for n, t in
          folded()[0].items()}, {}, PLAIN, "ambiguous-expert-layout"),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: Any, fields: Any, shape: Any, code: str
) -> None:
    config = expert_config(**fields) | {"target_parameters": None}
    folder = write(tmp_path, tensors, config)
    with pytest.raises(AdapterError) as caught:
        load_adapter(folder, {EXPERTS: shape})
    assert vars(caught.value)["code"] == code


def test_shared_experts_are_plain_linear_layers(tmp_path: Path) -> None:
    path = f"{PREFIX}0.mlp.shared_experts.up_proj"
    folder = write(tmp_path, pair(path, (HIDDEN, INNER)))
    [entry] = parse(folder).entries
    assert entry.path == "model.layers.0.mlp.shared_experts.up_proj"
    assert entry.kind == "linear"
