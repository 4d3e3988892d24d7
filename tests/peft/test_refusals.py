"""Every reason to refuse an adapter: one broken adapter each, and the code that it must get."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.errors import AdapterError, AdapterFormatError, AdapterMismatchError
from lorafold.peft import load_adapter, parse
from lorafold.pool import Pool
from lorafold.refusal import DOWNGRADABLE, Refusal
from tests.peft.folders import (
    CONFIG,
    HIDDEN,
    PREFIX,
    SIZES,
    VOCABULARY,
    Targets,
    dense,
    factor,
    pair,
    targets,
    tensors_of,
    write,
)
from tests.tiny_models import make_model, old_peft

Q = f"{PREFIX}0.self_attn.q_proj"
EXPERTS = f"{PREFIX}0.mlp.experts"


def config(**fields: Any) -> Callable[[Path], object]:
    """A plain adapter whose config has other fields."""
    return lambda folder: write(folder, dense(), CONFIG | fields)


def tensors(**changed: Any) -> Callable[[Path], object]:
    """A plain adapter with tensors changed, added, or (None) removed; `__` stands for a dot."""

    def build(folder: Path) -> None:
        found: dict[str, Any] = dict(dense())
        for name, tensor in changed.items():
            found[name.replace("__", ".").replace("Q.", f"{Q}.")] = tensor
        write(folder, {name: t for name, t in found.items() if t is not None})

    return build


def instead(found: dict[str, Any], **fields: Any) -> Callable[[Path], object]:
    """An adapter of other tensors."""
    return lambda folder: write(folder, found, CONFIG | fields)


def files(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A plain adapter whose files are changed."""

    def build(folder: Path) -> None:
        write(folder, dense())
        change(folder)

    return build


def to_bin(folder: Path) -> None:
    tensors_file = folder / "adapter_model.safetensors"
    torch.save(tensors_of(folder), folder / "adapter_model.bin")
    tensors_file.unlink()


def link_out(folder: Path) -> None:
    real = folder.parent / "elsewhere.safetensors"
    (folder / "adapter_model.safetensors").rename(real)
    (folder / "adapter_model.safetensors").symlink_to(real)


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def index(**weight_map: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        text = json.dumps({"weight_map": {n.replace("__", "."): f for n, f in weight_map.items()}})
        (folder / "adapter_model.safetensors").rename(folder / "one.safetensors")
        (folder / "adapter_model.safetensors.index.json").write_text(text)

    return build


def rewrite_config(text: str) -> Callable[[Path], object]:
    return files(lambda folder: (folder / "adapter_config.json").write_text(text))


def second_file(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "one.safetensors")
    (folder / "two.safetensors").write_bytes((folder / "one.safetensors").read_bytes())


def folded(rank: int, in_features: int, out_features: int) -> dict[str, Any]:
    return {
        f"{EXPERTS}.lora_A.weight": factor(2 * rank, in_features),
        f"{EXPERTS}.lora_B.weight": factor(out_features, 2 * rank),
    }


def single_experts(*experts: int, **scales: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for expert in experts:
        found |= pair(f"{EXPERTS}.{expert}.down_proj", (8, HIDDEN))
    return found


SQUARE = ExpertShape(num_experts=2, hidden=HIDDEN, inner=8)
FUSED: Targets = {"model.layers.0.self_attn.qkv_proj": TargetShape(HIDDEN, 32)}
TOWERS = targets("model.text.layers") | targets("model.vision.layers")
nan, infinite = factor(4, HIDDEN), factor(4, HIDDEN)
nan[1, 1], infinite[2, 2] = float("nan"), float("inf")
zero_b = {n: t * 0 if "lora_B" in n else t for n, t in dense().items()}

CASES: list[tuple[str, Callable[[Path], object], Targets | None]] = [
    ("missing-file", lambda folder: None, None),
    ("missing-file", lambda folder: folder.mkdir(), None),
    ("missing-file", files(lambda folder: (folder / "adapter_config.json").unlink()), None),
    ("ambiguous-files", files(second_file), None),
    ("pickle", files(to_bin), None),
    ("escaping-path", files(link_out), None),
    ("escaping-path", files(index(x="../one.safetensors")), None),
    ("broken-file", files(truncate), None),
    ("bad-index", files(index(x="one.safetensors")), None),
    ("dtype", tensors(Q__lora_A__weight=torch.ones(4, HIDDEN, dtype=torch.int8)), None),
    ("dtype", tensors(Q__lora_A__weight=torch.ones(4, HIDDEN, dtype=torch.float64)), None),
    ("foreign-format", instead({"model.layers.0.self_attn.q_proj.lora_a": factor(16, 4)}), None),
    ("foreign-format", instead({"blk.0.attn_q.weight.lora_b": factor(16, 4)}), None),
    ("foreign-format", instead({"d.0.linear_qkv.adapter.linear_in.weight": factor(4, 4)}), None),
    ("foreign-format", config(lora_parameters={"rank": 8, "scale": 2.0}), None),
    (
        "foreign-format",
        tensors(lora_te_x__lora_up__weight=factor(4, 4), lora_te_x__lora_down__weight=factor(4, 4)),
        None,
    ),
    (
        "several-adapters",
        tensors(y__lora_A__one__weight=factor(4, 4), y__lora_B__two__weight=factor(4, 4)),
        None,
    ),
    ("duplicate-tensor", tensors(Q__lora_A__default__weight=factor(4, HIDDEN)), None),
    ("unpaired-tensor", tensors(Q__lora_A__weight=None), None),
    ("unpaired-tensor", tensors(Q__lora_B__weight=None), None),
    ("unknown-tensor", tensors(Q__lora_C__weight=factor(4, 4)), None),
    ("unknown-tensor", instead(pair(f"{Q}.base_layer", SIZES["self_attn.q_proj"])), None),
    ("empty-adapter", instead({"base_model.model.lm_head.weight": factor(4, 4)}), None),
    ("shape", tensors(Q__lora_A__weight=factor(HIDDEN)), None),
    ("shape", tensors(Q__lora_A__weight=factor(3, HIDDEN)), None),
    ("empty-factor", tensors(Q__lora_A__weight=torch.ones(0, HIDDEN)), None),
    ("non-finite", tensors(Q__lora_A__weight=nan), None),
    ("non-finite", tensors(Q__lora_A__weight=infinite), None),
    ("overflow", tensors(Q__lora_A__weight=torch.full((4, HIDDEN), 3.4e38)), None),
    ("inert", instead(zero_b), None),
    ("inert", config(lora_alpha=0), None),
    ("bad-config", rewrite_config("{"), None),
    ("bad-config", rewrite_config("[" * 100_000), None),
    ("bad-config", rewrite_config('{"r": 8, "r": 4}'), None),
    ("bad-config", rewrite_config('{"peft_type": "LORA", "lora_alpha": NaN, "r": 8}'), None),
    ("bad-config", config(r=None), None),
    ("bad-config", config(r=True), None),
    ("bad-config", config(lora_alpha="16"), None),
    ("bad-config", config(lora_alpha=10**400), None),
    ("bad-config", config(use_rslora="yes"), None),
    ("bad-config", config(rank_pattern=["q_proj"]), None),
    ("bad-config", config(alpha_pattern={"(": 3}), None),
    ("not-lora", config(peft_type="LOHA"), None),
    ("not-lora", config(peft_type=None), None),
    ("not-lora", instead({"x.hada_w1_a": factor(4, 4)}), None),
    ("task-type", config(task_type="SEQ_CLS"), None),
    ("unknown-field", config(use_next_lora=True), None),
    ("rank-mismatch", config(r=8), None),
    ("rank-mismatch", config(rank_pattern={"q_proj": 8}), None),
    ("ambiguous-scale", config(alpha_pattern={"q_proj": 4, ".*self_attn.*": 8}), None),
    ("unmatched-pattern", config(alpha_pattern={"k_proj": 4}), None),
    (
        "unmatched-pattern",
        config(alpha_pattern={f"{Q.removesuffix('.q_proj')}.q_proj": 4}),
        None,
    ),
    ("unsafe-pattern", config(alpha_pattern={"(a+)+b": 4}), None),
    ("unsafe-pattern", config(alpha_pattern={".*a.*a.*a.*a": 4}), None),
    ("unsafe-pattern", config(alpha_pattern={"q" * 600: 4}), None),
    ("unmatched-target", config(target_modules=["q_proj", "down_proj", "up_proj"]), None),
    ("unmatched-target", config(target_parameters=["mlp.experts.down_proj"]), None),
    ("excluded-tensor", config(exclude_modules=["q_proj"]), None),
    ("excluded-tensor", config(layers_to_transform=[1]), None),
    ("dora", config(use_dora=True), None),
    ("dora", tensors(Q__lora_magnitude_vector=factor(HIDDEN)), None),
    ("bias", config(bias="all"), None),
    ("bias", tensors(Q__base_layer__bias=factor(HIDDEN)), None),
    ("lora-bias", config(lora_bias=True), None),
    ("lora-bias", tensors(Q__lora_B__bias=factor(HIDDEN)), None),
    ("base-weights", tensors(Q__base_layer__weight=factor(HIDDEN, HIDDEN)), None),
    ("modules-to-save", config(modules_to_save=["norm"]), None),
    ("modules-to-save", tensors(base_model__model__model__norm__weight=factor(HIDDEN)), None),
    (
        "modules-to-save",
        tensors(base_model__model__lm_head__weight=factor(VOCABULARY, HIDDEN)),
        None,
    ),
    (
        "resized-vocabulary",
        instead(pair("base_model.model.lm_head", (HIDDEN, VOCABULARY + 2))),
        None,
    ),
    ("trainable-tokens", config(trainable_token_indices=[1, 2]), None),
    ("trainable-tokens", tensors(e__token_adapter__trainable_tokens_delta=factor(2, 4)), None),
    *[
        ("base-changing-init", config(init_lora_weights=init), None)
        for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    ],
    ("base-changing-init", config(kasa_config={"beta": 1.0}), None),
    ("unknown-init", config(init_lora_weights="next"), None),
    ("unknown-init", config(init_lora_weights=["pissa"]), None),
    ("alora", config(alora_invocation_tokens=[1, 2]), None),
    ("arrow", config(arrow_config={"top_k": 2}), None),
    ("bdlora", config(use_bdlora={"nblocks": 2}), None),
    ("layer-replication", config(layer_replication=[[0, 2], [1, 2]]), None),
    ("megatron", config(megatron_config={"a": 1}), None),
    (
        "qalora",
        instead(pair(Q, (HIDDEN // 2, HIDDEN)), use_qalora=True, qalora_group_size=2),
        None,
    ),
    ("conv", instead(pair(f"{PREFIX}0.linear_attn.conv1d", (HIDDEN, HIDDEN))), None),
    (
        "conv",
        tensors(Q__lora_A__weight=torch.ones(4, 4, 3, 3), Q__lora_B__weight=torch.ones(4, 4, 1, 1)),
        None,
    ),
    (
        "embedding",
        instead(
            {
                "base_model.model.model.embed_tokens.lora_embedding_A": factor(4, VOCABULARY),
                "base_model.model.model.embed_tokens.lora_embedding_B": factor(HIDDEN, 4),
            }
        ),
        None,
    ),
    ("unmatched-path", instead(pair(f"{PREFIX}7.self_attn.q_proj", (HIDDEN, HIDDEN))), None),
    ("ambiguous-path", instead(dense(prefix="layers.")), TOWERS),
    ("ambiguous-path", instead(dense() | pair(f"{PREFIX}0.attn.q_proj", (HIDDEN, HIDDEN))), None),
    ("shape-mismatch", instead(pair(Q, (HIDDEN, 8))), None),
    ("shape-mismatch", instead(pair(Q, (8, HIDDEN))), None),
    ("fused-slices", instead(pair(f"{PREFIX}0.self_attn.qkv_proj", (HIDDEN, 31))), None),
    ("fused-slices", instead(pair(f"{PREFIX}0.self_attn.q_proj", (HIDDEN, 16))), FUSED),
    (
        "fused-scales",
        instead(
            pair(f"{PREFIX}0.self_attn.q_proj", (HIDDEN, 16))
            | pair(f"{PREFIX}0.self_attn.v_proj", (HIDDEN, 8)),
            alpha_pattern={"v_proj": 10},
        ),
        FUSED,
    ),
    (
        "ambiguous-expert-layout",
        instead(folded(4, HIDDEN, HIDDEN), target_parameters=["gate_up_proj"]),
        {"model.layers.0.mlp.experts": SQUARE},
    ),
    (
        "incomplete-experts",
        instead(single_experts(0)),
        {"model.layers.0.mlp.experts": SQUARE},
    ),
]


def names_of(case: Any) -> str:
    return str(case) if isinstance(case, str) else ""


@pytest.mark.parametrize(("code", "build", "shapes"), CASES, ids=names_of)
def test_a_broken_adapter_gets_its_code(
    tmp_path: Path, code: str, build: Callable[[Path], object], shapes: Targets | None
) -> None:
    build(tmp_path / "sql")
    with pytest.raises(AdapterError) as caught:
        load_adapter(tmp_path / "sql", targets() if shapes is None else shapes, name="sql")
    error = caught.value
    assert error.code == code
    assert f"[{code}]" in str(error)
    assert isinstance(error, AdapterFormatError | AdapterMismatchError)
    assert error.adapter in ("sql", str(tmp_path / "sql"))
    # What the command line shows names options without the syntax of one language.
    assert not re.search(r"\b(strict|allow_inert|expert_layout|base_tensor|targets)=", str(error))


def test_a_rank_above_the_pool_gets_its_code(tmp_path: Path) -> None:
    shapes = {p: s for p, s in targets().items() if isinstance(s, TargetShape)}
    pool = Pool(shapes, max_loras=1, max_rank=3)
    with pytest.raises(AdapterMismatchError, match="attach with max_rank 4") as caught:
        pool.place(load_adapter(write(tmp_path, dense()), shapes))
    assert vars(caught.value)["code"] == "rank-above-max"


def test_every_code_has_a_case_and_the_plain_adapter_none(tmp_path: Path) -> None:
    assert {code for code, _, _ in CASES} | {"rank-above-max"} == {r.value for r in Refusal}
    assert len(load_adapter(write(tmp_path, dense()), targets()).weights) == 4


def test_the_documentation_lists_the_same_codes() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    refusals = text.split("## What is refused")[1].split("\n## ")[0]
    rows = [line.split("|") for line in refusals.splitlines() if line.startswith("| `")]
    listed = {row[1].strip().strip("`"): row[2].strip() for row in rows}
    assert listed == {refusal.value: refusal.meaning for refusal in Refusal}
    assert {row[1].strip().strip("`") for row in rows if "yes" in row[-2]} == {
        refusal.value for refusal in DOWNGRADABLE
    }


@pytest.mark.parametrize("refusal", sorted(DOWNGRADABLE, key=str), ids=str)
def test_strict_false_reports_what_it_lets_pass(tmp_path: Path, refusal: Refusal) -> None:
    build, shapes = next((b, s) for code, b, s in CASES if code == refusal.value)
    if refusal is Refusal.UNMATCHED_PATH:
        build = instead(dense() | pair(f"{PREFIX}7.self_attn.q_proj", (HIDDEN, HIDDEN)))
    build(tmp_path)
    adapter = load_adapter(tmp_path, shapes or targets(), strict=False)
    [line] = adapter.report.skipped
    assert line.startswith(f"{refusal.value}: ")


@pytest.mark.parametrize("refusal", sorted(set(Refusal) - DOWNGRADABLE, key=str), ids=str)
def test_strict_false_lets_nothing_else_pass(tmp_path: Path, refusal: Refusal) -> None:
    for number, (code, build, shapes) in enumerate(CASES):
        if code == refusal.value:
            build(tmp_path / str(number))
            with pytest.raises(AdapterError):
                load_adapter(tmp_path / str(number), shapes or targets(), strict=False)


BEYOND_LORA: list[tuple[str, dict[str, Any], bool]] = [
    # code, setting, whether the tensors show it too
    ("dora", {"use_dora": True}, True),
    ("lora-bias", {"lora_bias": True}, True),
    ("modules-to-save", {"modules_to_save": ["norm"]}, True),
    ("trainable-tokens", {"trainable_token_indices": [1, 2]}, True),
    ("bias", {"bias": "lora_only"}, True),
    ("base-changing-init", {"init_lora_weights": "pissa"}, False),
    ("base-changing-init", {"init_lora_weights": "olora"}, False),
    ("alora", {"alora_invocation_tokens": [1, 2]}, False),
    ("layer-replication", {"layer_replication": [[0, 2], [0, 2]]}, False),
]


@pytest.mark.parametrize(("code", "settings", "is_in_tensors"), BEYOND_LORA)
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 2 LoRA tensor")  # PEFT's view of B's bias
def test_what_peft_writes_beyond_lora_is_refused(
    tmp_path: Path, code: str, settings: dict[str, Any], is_in_tensors: bool
) -> None:
    model = make_model("llama", attention_bias=True).float()
    with old_peft():
        adapted = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings
            ),
        )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path)
    with pytest.raises(AdapterFormatError) as caught:
        parse(tmp_path)
    assert caught.value.code == code
    # A config that keeps silent does not help where the tensors show it.
    file = tmp_path / "adapter_config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in fields.items() if k not in settings}))
    if is_in_tensors:
        with pytest.raises(AdapterFormatError) as caught:
            parse(tmp_path)
        assert caught.value.code == code
