"""The plugin inside vLLM on a CPU: `make test-vllm` builds the environment that this needs.

A tiny random Qwen3 and adapters written by PEFT; every engine runs in a process of its own. What
holds for whole requests here ("mixed equals alone") needs a base model whose own bits do not depend
on the batch, which the first test therefore asserts of base requests too.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: run `make test-vllm`", allow_module_level=True)

import vllm

from lorafold.errors import BackendError
from lorafold.integrations.vllm import PUNICA, TESTED
from tests.integrations.test_scale_page import sharded
from tests.integrations.vllm_engine import (
    ADAPTERS,
    EACH_ALONE,
    MANY,
    MIXED,
    PROMPTS,
    REFUSED,
    by_name,
    generate,
    make_model,
    run,
    tokens,
)
from tests.tiny_models import adapted_by_peft

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def eager(folders):
    """The longest of the runs: what every test of one process and no compiler looks at."""
    steps = [
        *EACH_ALONE,
        generate(MIXED),
        generate(MANY),
        {"do": "remove", "name": "all"},
        {"do": "names"},
        generate(["all", "columns", None]),
        *({"do": "add", "name": name} for name in REFUSED),
        {"do": "names"},
        generate(MIXED),
        {"do": "slot_bytes"},
        {
            "do": "audit",
            "requests": [(name, PROMPTS[name]) for name in (*MIXED, "vocabulary", "small")],
        },
    ]
    results, printed = run(folders, steps)
    taken = iter(results)
    return {
        "alone": by_name([next(taken) for _ in EACH_ALONE]),
        "mixed": next(taken),
        "many": next(taken),
        "removed": next(taken),
        "left": next(taken),
        "again": next(taken),
        "refused": {name: next(taken) for name in REFUSED},
        "still": next(taken),
        "after": next(taken),
        "slot_bytes": next(taken),
        "audit": next(taken),
        "printed": printed,
    }


def test_vllm_builds_the_plugin(eager):
    assert f"Using {PUNICA.rpartition('.')[2]}" in eager["printed"]


def test_mixed_equals_alone(eager):
    """Tokens and log-probabilities, bit for bit; base requests among adapted ones too."""
    assert eager["mixed"] == [eager["alone"][name] for name in MIXED]


def test_adapters_make_a_difference(eager):
    answers = {json.dumps(tokens(eager["alone"][n])) for n in (None, "vocabulary", "columns")}
    assert len(answers) == 3  # one prompt, three answers


def test_more_adapters_than_slots(eager):
    assert eager["many"] == [eager["alone"][name] for name in MANY]


def test_unload_and_load_again(eager):
    assert eager["removed"] is True
    assert "all" not in eager["left"]
    assert eager["again"] == [eager["alone"][name] for name in ("all", "columns", None)]


CODES = {
    "prefix": "unmatched-path",
    "beyond": "unmatched-path",
    "cut": "shape-mismatch",
    "tall": "shape-mismatch",
    "halved": "unpaired-tensor",
    "copy": "base-weights",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(eager, name):
    """vLLM alone would take each of these, and leave out or half copy a tensor."""
    refused = eager["refused"][name]
    assert isinstance(refused, dict), "accepted"
    assert f"`{name}`" in refused["message"]
    assert f"[{CODES[name]}]" in refused["message"]


def test_refusals_change_nothing(eager):
    assert not {*eager["still"]} & {*REFUSED}
    assert eager["after"] == eager["mixed"]


def test_every_fold_has_the_bits_of_the_contract(eager):
    """Embedding, packed and plain layers, and head, from the files that PEFT wrote."""
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert set(eager["audit"]) == {
        "model.embed_tokens", "lm_head", *(f"model.layers.{i}.{p}" for i in range(2) for p in parts)
    }  # fmt: skip
    assert min(eager["audit"].values()) > 500


def test_close_to_peft(folders, eager):
    """PEFT in float32, fed vLLM's tokens: its log-probabilities are near, the base's are not."""
    base = make_model().float()
    for name in ADAPTERS:
        adapted = adapted_by_peft(make_model(), folders / name, torch.float32).float()
        answer = eager["alone"][name]
        ids = torch.tensor([PROMPTS[name] + tokens(answer)])
        given = torch.tensor([float.fromhex(logprob) for _, logprob in answer])
        first = len(PROMPTS[name]) - 1
        near, far = (
            torch.log_softmax(m(ids).logits[0, first:-1].float(), -1)
            .gather(1, ids[0, first + 1 :, None])
            .squeeze(1)
            for m in (adapted, base)
        )
        assert (near - given).abs().max() < 0.25, name
        assert (far - given).abs().max() > 1, name


def test_beside_an_engine_without_the_plugin(folders, eager):
    """Base requests are the same bits; adapted ones are not, because there the scale is in B.

    The control for "mixed equals alone": the CPU operators of vLLM 0.32 give base rows of a mixed
    batch an adapter's delta.
    """
    results, printed = run(folders, [*EACH_ALONE, generate(MIXED)], env={"LORAFOLD_VLLM": "0"})
    assert "Using PunicaWrapperCPU" in printed
    *each, mixed = results
    alone = by_name(each)
    assert alone[None] == eager["alone"][None]
    assert alone["all"] != eager["alone"]["all"]
    if vllm.__version__.startswith("0.32."):
        assert mixed != [alone[name] for name in MIXED]


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_compiled(folders, start):
    """Traced, cut into pieces and compiled by vLLM's back end; then again from vLLM's cache."""
    results, printed = run(
        folders,
        [*EACH_ALONE, generate(MIXED), generate(MANY)],
        compiled=True,
        enforce_eager=False,
        compilation_config={
            "compile_sizes": [],
            "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},
        },
        env={"VLLM_CACHE_ROOT": str(folders / "cache")},
    )
    assert "LorafoldPunica" in printed
    assert ("saved AOT" if start == "cold" else "Directly load AOT") in printed
    *alone, mixed, many = results
    assert mixed == [by_name(alone)[name] for name in MIXED]
    assert many == [by_name(alone)[name] for name in MANY]


def test_two_ranks_of_tensor_parallelism(two_ranks, eager):
    """Row-parallel layers add up across ranks, base and delta alike, so bits are those of two
    ranks; the tokens are those of one, and mixed equals alone."""
    alone = two_ranks["alone"]
    assert two_ranks["mixed"] == [alone[name] for name in MIXED]
    assert two_ranks["many"] == [alone[name] for name in MANY]
    assert {n: tokens(a) for n, a in alone.items()} == {
        n: tokens(a) for n, a in eager["alone"].items()
    }
    assert alone != eager["alone"]
    assert "world_size=2 rank=1" in two_ranks["printed"]


def test_two_ranks_agree_on_refusals(two_ranks):
    """One refusal, one answer; vLLM alone would take the other rank's for the next call's."""
    assert "[shape-mismatch]" in two_ranks["refused"]["message"]
    assert two_ranks["added"] is True
    assert two_ranks["loaded"] == ["all"]


def test_slots_take_what_the_page_on_scale_says(eager, two_ranks):
    rank, vocabulary, hidden = 16, 512, 128
    uncut = 2 * (vocabulary + hidden)
    for ranks, given in ((1, eager["slot_bytes"]), (2, two_ranks["slot_bytes"])):
        elements = 2 * sharded(hidden, 256, 256, 128, ranks) + uncut
        assert given == [2 * rank * elements] * ranks


def test_pipeline_ranks_load_their_own_layers(folders):
    """No rank misses what another holds, and all miss what nobody holds.

    Loading only: on a CPU vLLM 0.32 and 0.33 cannot run a pipeline with LoRA, plugin or not.
    """
    names = ("all", "beyond", "vocabulary", "beyond", "columns")
    steps = [{"do": "add", "name": name} for name in names]
    results, _ = run(
        folders,
        [*steps, {"do": "names"}],
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    *added, loaded = results
    assert [each is True for each in added] == [True, False, True, False, True]
    assert all("[unmatched-path]" in added[i]["message"] for i in (1, 3))
    assert loaded == ["all", "vocabulary", "columns"]


def test_untested_versions_are_refused():
    from lorafold.integrations.vllm.hooks import check_version

    check_version(f"{TESTED[0]}+cpu")
    with pytest.raises(BackendError, match=r"given: 0\.31\.0.*LORAFOLD_VLLM=0"):
        check_version("0.31.0")
