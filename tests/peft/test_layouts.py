"""Folded expert factors: what each release of PEFT, and Unsloth, wrote under the same names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.errors import AdapterFormatError
from lorafold.peft import load_adapter
from tests.peft.expert_folders import (
    BOTH,
    EXPERTS,
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
from tests.peft.folders import Targets, linear_shapes, tensors_of, write
from tests.tiny_models import old_peft

# PEFT says so of the patterns of every expert parameter, and applies them all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not")

DATA = Path(__file__).parents[1] / "data" / "peft_experts"
COMMON: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {
        "num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER,
        "intermediate_size": 20,
    },
    "Mixtral": {"num_local_experts": NUM_EXPERTS, "intermediate_size": INNER},
    "GptOss": {
        "num_local_experts": NUM_EXPERTS, "intermediate_size": INNER,
        "layer_types": ["full_attention"] * 2,
    },
}  # fmt: skip


def make_model(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**COMMON, **MODELS[family])
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    return model.eval().requires_grad_(False)


def shapes_of(model: nn.Module) -> Targets:
    """Linear layers, routers and experts of a model."""
    found = linear_shapes(model)
    for path, module in model.named_modules():
        if path.endswith(".mlp.experts"):
            found[path] = GPT_OSS if module.is_transposed else PLAIN
        elif path.endswith((".mlp.gate", ".mlp.router")):
            found[path] = TargetShape(HIDDEN, NUM_EXPERTS)
    return found


def write_by_peft(model: nn.Module, folder: Path, **settings: Any) -> dict[str, Tensor]:
    """Let PEFT write an adapter; returns what its own merge adds to every parameter."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with old_peft():
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values.to(torch.bfloat16))
    adapted.save_pretrained(folder)
    after = adapted.merge_and_unload().state_dict()
    deltas = {name: after[name] - before[name] for name in before}
    return {name: delta for name, delta in deltas.items() if delta.any()}


VARIANTS: dict[str, dict[str, Any]] = {
    "both": {"target_parameters": BOTH},
    "gate_up alone": {"target_parameters": BOTH[:1]},
    "down alone": {"target_parameters": BOTH[1:]},
    "short names": {"target_parameters": ["down_proj", "gate_up_proj"]},
    "rslora": {"target_parameters": BOTH, "use_rslora": True},
    "rank 1": {"target_parameters": BOTH, "r": 1},
    "patterns": {
        "target_parameters": BOTH,
        "rank_pattern": {r".*\.gate_up_proj": 5},
        "alpha_pattern": {"experts.down_proj": 7},
    },
    "with attention": {"target_parameters": BOTH, "target_modules": ["q_proj", "o_proj"]},
    "all-linear": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_peft_writes_is_what_is_bound(tmp_path: Path, family: str, variant: str) -> None:
    model, settings = make_model(family), {"target_modules": []} | VARIANTS[variant]
    expected = write_by_peft(model, tmp_path, **({"r": 3, "lora_alpha": 4} | settings))
    shapes = shapes_of(model)
    adapter = load_adapter(tmp_path, shapes)
    assert_same_deltas(deltas_of(adapter, shapes), expected)
    assert adapter.report.num_tensors == len(tensors_of(tmp_path))


@pytest.mark.parametrize(("family", "router"), [("Qwen3Moe", "gate"), ("GptOss", "router")])
def test_routers_are_linear_targets(tmp_path: Path, family: str, router: str) -> None:
    model = make_model(family)
    expected = write_by_peft(
        model, tmp_path, r=3, lora_alpha=4, target_modules=[],
        target_parameters=[f"mlp.{router}.weight"], rank_pattern={f"{router}.weight": 2},
    )  # fmt: skip
    adapter = load_adapter(tmp_path, shapes_of(model))
    assert_same_deltas(deltas_of(adapter, shapes_of(model)), expected)
    assert {line.kind for line in adapter.report.bound} == {"router"}
    assert adapter.rank == 2


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0"])
@pytest.mark.parametrize(("family", "shape"), [("qwen3_moe", PLAIN), ("gpt_oss", GPT_OSS)])
def test_older_peft_is_read_by_its_shapes(version: str, family: str, shape: ExpertShape) -> None:
    folder = DATA / f"peft-{version}-{family}"
    shapes: Targets = {EXPERTS: shape}
    adapter = load_adapter(folder, shapes)
    expected = load_file(folder / "delta.safetensors")
    found = deltas_of(adapter, shapes)
    assert found.keys() == expected.keys()
    for name, delta in found.items():
        # The recorded factors are float32: rounding them to bfloat16 costs 2^-9 each.
        assert (delta - expected[name]).norm() < 0.01 * expected[name].norm()
    was_swapped = family == "qwen3_moe" or version == "0.19.0"
    assert any("swapped" in line for line in adapter.report.decisions) == was_swapped


def unsloth(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same adapter with the columns of lora_B grouped by expert."""
    return {
        name: t.unflatten(1, (-1, NUM_EXPERTS)).transpose(1, 2).flatten(1)
        if "lora_B" in name
        else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("swapped", [False, True])
def test_unsloth_columns_are_read_if_the_file_or_the_caller_says_so(
    tmp_path: Path, swapped: bool
) -> None:
    tensors, deltas = folded(swapped=swapped)
    shapes: Targets = {EXPERTS: PLAIN}
    grouped = unsloth(tensors)
    assert_same_deltas(
        deltas_of(load_adapter(write(tmp_path / "0", tensors, expert_config()), shapes), shapes),
        deltas,
    )
    marked = expert_config(lora_B_layout="grouped_by_expert")
    assert_same_deltas(
        deltas_of(load_adapter(write(tmp_path / "1", grouped, marked), shapes), shapes), deltas
    )
    unmarked = write(tmp_path / "2", grouped, expert_config())
    layout: Any = "unsloth-0.18" if swapped else "unsloth"
    told = load_adapter(unmarked, shapes, expert_layout=layout)
    assert_same_deltas(deltas_of(told, shapes), deltas)
    # The wrong order is a wrong adapter of the same shapes: nothing but a mark can tell.
    wrong = deltas_of(load_adapter(unmarked, shapes), shapes)
    name = f"{EXPERTS}.down_proj"
    assert (wrong[name] - deltas[name]).norm() > deltas[name].norm()


def test_an_unsloth_file_without_the_order_is_refused(tmp_path: Path) -> None:
    shapes: Targets = {EXPERTS: PLAIN}
    mark = {"auto_mapping": {"unsloth_fixed": True}}
    tensors, deltas = folded()
    folder = write(tmp_path / "0", tensors, expert_config(**mark))
    with pytest.raises(AdapterFormatError, match="expert_layout is `unsloth`") as caught:
        load_adapter(folder, shapes)
    assert caught.value.code == "ambiguous-expert-layout"
    told = load_adapter(folder, shapes, expert_layout="peft")
    assert_same_deltas(deltas_of(told, shapes), deltas)
    said = write(tmp_path / "1", tensors, expert_config(**mark, lora_B_layout="rank_major"))
    assert_same_deltas(deltas_of(load_adapter(said, shapes), shapes), deltas)
    odd = write(tmp_path / "2", tensors, expert_config(lora_B_layout="by_moon"))
    with pytest.raises(AdapterFormatError, match="by_moon"):
        load_adapter(odd, shapes)
    # With rank 1 both orders are one.
    tensors, deltas = folded(rank=1)
    one = write(tmp_path / "3", tensors, expert_config(**mark, r=1, lora_alpha=1))
    assert_same_deltas(deltas_of(load_adapter(one, shapes), shapes), deltas)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("version", "transposed", "decides"),
    [
        (None, False, False),
        ("0.18.1", False, False),
        ("0.19.0", False, False),
        ("0.19.1", False, True),
        ("0.21.2.dev0", False, True),
        (None, True, True),
        ("0.18.1", True, True),
        ("0.19.0", True, False),
    ],
)
def test_a_square_parameter_alone_needs_a_version_or_a_word(
    tmp_path: Path, version: str | None, transposed: bool, decides: bool, swapped: bool
) -> None:
    inner = HIDDEN // 2
    shapes: Targets = {EXPERTS: ExpertShape(NUM_EXPERTS, HIDDEN, inner, transposed=transposed)}
    tensors, deltas = folded(inner=inner, swapped=swapped)
    alone = {n.replace(".base_layer", ""): t for n, t in tensors.items() if "base_layer" in n}
    name = f"{EXPERTS}.gate_up_proj"
    expected = deltas[name].mT if transposed else deltas[name]
    config = expert_config(target_parameters=BOTH[:1], peft_version=version)
    folder = write(tmp_path / "alone", alone, config)
    if decides:
        found = deltas_of(load_adapter(folder, shapes), shapes)[name]
        assert torch.allclose(found, expected) == (not swapped)
    else:
        with pytest.raises(AdapterFormatError) as caught:
            load_adapter(folder, shapes)
        assert caught.value.code == "ambiguous-expert-layout"
    layout: Any = "peft-0.18" if swapped else "peft"
    told = load_adapter(folder, shapes, expert_layout=layout)
    assert torch.allclose(deltas_of(told, shapes)[name], expected)
    # The other parameter of the same file is never square as well, and decides for both.
    both = write(tmp_path / "both", tensors, expert_config(peft_version=version))
    assert torch.allclose(deltas_of(load_adapter(both, shapes), shapes)[name], expected)


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, folded()[0], expert_config())
    with pytest.raises(AdapterFormatError, match="does not fit the shapes"):
        load_adapter(folder, {EXPERTS: PLAIN}, expert_layout="peft-0.18")
