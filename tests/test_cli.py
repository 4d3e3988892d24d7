"""The command line on real files: what it prints, writes and refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import lorafold.peft
from lorafold import ops
from lorafold.cli.app import app
from lorafold.cli.output import number, size_text
from lorafold.peft import load_adapter, parse
from lorafold.runtime import attach
from tests.peft.folders import CONFIG, dense, linear_shapes, pair, tensors_of, write
from tests.tiny_models import COMMON, make_model, write_adapter

REPOSITORY = Path(__file__).parents[1]


def cli(*args: Any, code: int = 0) -> str:
    """Run a command in this process; returns what it printed on stdout."""
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == code, result.output + repr(result.exception)
    if code == 1 and not result.stdout:
        assert result.stderr.lstrip().startswith("error: ")
        assert "Traceback" not in result.stderr
        return str(result.stderr)
    return str(result.stdout if code != 2 else result.stderr)


def cli_json(*args: Any, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(cli(*args, "--json", code=code)))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model()


@pytest.fixture(scope="module")
def model_folder(model, tmp_path_factory) -> Path:
    """A tiny model with a tokenizer of its own, as transformers writes them."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(3, COMMON["vocab_size"])}
    tokenizer = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **words}, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "sql": write_adapter(model, root / "sql", ["q_proj", "down_proj"], rank=3, alpha=4.0),
        "poet": write_adapter(model, root / "poet", ["v_proj", "up_proj"], rank=5, seed=2),
    }


@pytest.mark.parametrize("command", ["", "verify", "inspect", "convert", "plan", "generate"])
def test_help_shows_what_it_is_for_and_an_example(command):
    text = cli(*command.split(), "--help")
    assert "Usage" in text
    assert ("Example:  lorafold" in text) == bool(command)
    if not command:
        assert "Exit code 0" in text
        for name in ("verify", "inspect", "convert", "plan", "generate"):
            assert name in text


def test_version():
    assert cli("--version").startswith("lorafold 0.")


def test_verify_agrees(tmp_path):
    text = cli("verify", "--quick", "--device", "cpu", "--only", "slots", "--only", "graph")
    assert "every bit agrees" in text
    assert "needs a CUDA device" in text
    pytest.importorskip("matplotlib")
    picture = tmp_path / "report.png"
    report = cli_json("verify", "--quick", "--only", "slots", "--plot", picture)
    assert (report["ok"], report["case"]) == (True, None)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_verify_writes_the_case_that_fails_and_replays_it(tmp_path, monkeypatch):
    file = tmp_path / "case.safetensors"
    original = ops.apply_lora_bgmv

    def broken(route: Any, x: Any, out: Any, *rest: Any, **kwargs: Any) -> None:
        original(route, x, out, *rest, **kwargs)
        if x.shape[0] > 1:
            out.view(torch.int16)[-1, -1] ^= 1

    monkeypatch.setattr(ops, "apply_lora_bgmv", broken)
    arguments = ("verify", "--quick", "--device", "cpu", "--only", "row alone", "--case", file)
    text = cli(*arguments, code=1)
    assert "not the same bits" in text
    assert f"again: lorafold verify --replay {file}" in text
    assert load_file(file)["x"].shape == (2, 1)
    report = cli_json(*arguments, code=1)
    assert report["case"] == str(file)
    assert report["failure"]["sizes"]["rows"] == 2
    again = cli_json("verify", "--replay", file, code=1)
    assert again["failure"]["first"] == report["failure"]["first"]
    assert "instead of" in cli("verify", "--replay", file, code=1)
    monkeypatch.undo()
    assert cli_json("verify", "--replay", file)["ok"]


def test_verify_refuses_what_it_cannot_do(tmp_path):
    assert "is not there" in cli("verify", "--device", "cuda:99", code=2)
    missing = tmp_path / "nothing"
    assert "cannot be read" in cli("verify", "--replay", missing, code=1)
    error = cli_json("verify", "--replay", missing, code=1)
    assert error["error"] == "LoraError"


def run_python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_verify_in_a_process_of_its_own(tmp_path):
    case = tmp_path / "case.safetensors"
    done = run_python("-m", "lorafold", "verify", "--quick", "--json", "--case", str(case))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["differences"] == 0
    assert report["elements"] > 100_000
    assert not case.exists()


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_there_is_a_hint_and_the_library_works(missing):
    program = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "from lorafold.verify import run\n"
        "assert run(quick=True, device='cpu', only=['base rows']).ok\n"
        "from lorafold.cli import main\n"
        "main()"
    )
    done = run_python("-c", program)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "the command line needs typer and rich\nhint: pip install 'lorafold[cli]'\n"
    )


def test_inspect_shows_what_an_adapter_is(adapters):
    text = cli("inspect", adapters["sql"])
    assert "model.layers.*.mlp.down_proj" in text
    assert "1.333" in text
    assert "model.layers.1.mlp.down_proj" in cli("inspect", adapters["sql"], "--all")
    shown = cli_json("inspect", adapters["sql"])
    assert (shown["rank"], shown["num_tensors"], len(shown["targets"])) == (3, 8, 4)
    spec = parse(adapters["sql"])
    entry, row = spec.entries[0], shown["targets"][0]
    assert (row["target"], row["scale"]) == (entry.path, entry.scale)
    norm = torch.linalg.matrix_norm(entry.scale * entry.b.double() @ entry.a.double())
    assert row["delta_norm"] == pytest.approx(float(norm))


def test_inspect_fits_an_adapter_to_a_model(adapters, model_folder):
    shown = cli_json("inspect", adapters["poet"], "--model", model_folder)
    assert shown["model"] == "LlamaForCausalLM"
    targets = {row["target"] for row in shown["targets"]}
    assert targets == load_adapter(adapters["poet"], linear_shapes(make_model())).weights.keys()
    assert "fits LlamaForCausalLM" in cli("inspect", adapters["poet"], "--model", model_folder)


@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_inspect_compares_copies_of_the_vocabulary(model, model_folder, tmp_path):
    """PEFT writes a copy of the head's weight when the head is a target."""
    folder = write_adapter(model, tmp_path / "head", ["lm_head"])
    assert "lm_head" in "".join(tensors_of(folder))
    shown = cli_json("inspect", folder, "--model", model_folder)
    assert any("equals the base" in line for line in shown["dropped"])
    # A tied head is in the model's file as the embedding only.
    tied = make_model(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    folder_tied = write_adapter(tied, tmp_path / "head of tied", ["lm_head"])
    shown = cli_json("inspect", folder_tied, "--model", tmp_path / "tied")
    assert any("equals the base" in line for line in shown["dropped"])
    other = make_model(seed=5)
    other.save_pretrained(tmp_path / "other")
    refused = cli_json("inspect", folder, "--model", tmp_path / "other", code=1)
    assert refused["code"] == "modules-to-save"


def test_inspect_says_why_it_would_be_refused(tmp_path, model_folder):
    dora = write(tmp_path / "dora", dense(), CONFIG | {"use_dora": True})
    refused = cli_json("inspect", dora, code=1)
    assert (refused["error"], refused["code"]) == ("AdapterFormatError", "dora")
    assert "[dora]" in cli("inspect", dora, code=1)
    foreign = write(tmp_path / "foreign", dense())
    refused = cli_json("inspect", foreign, "--model", model_folder, code=1)
    assert refused["code"] == "shape-mismatch"
    odd = write(tmp_path / "odd", dense(), CONFIG | {"new_flag": 1})
    assert cli_json("inspect", odd, code=1)["code"] == "unknown-field"
    shown = cli_json("inspect", odd, "--no-strict")
    assert shown["skipped"] == [
        "unknown-field: adapter_config.json sets fields that are not known: `new_flag`"
    ]
    assert "let pass by --no-strict" in cli("inspect", odd, "--no-strict")


def test_inspect_shows_experts(tmp_path):
    folder = REPOSITORY / "tests/data/peft_experts/peft-0.19.0-qwen3_moe"
    shown = cli_json("inspect", folder)
    kinds = {row["kind"] for row in shown["targets"]}
    assert any(kind.startswith("experts.") for kind in kinds)
    assert "only with --model" in cli("inspect", folder)


def test_inspect_shows_names_as_they_are(tmp_path):
    """A name may look like markup of the library that prints tables, and a config like anything."""
    tensors = pair("model.layers.0.[/b][red]", (8, 8))
    folder = write(tmp_path / "a", tensors, CONFIG | {"base_model_name_or_path": "x\x1b[31m\ud800"})
    text = cli("inspect", folder)
    assert "model.layers.*.[/b][red]" in text
    assert r"trained on: x\x1b[31m\ud800" in text


@pytest.mark.parametrize(
    "words", [[], ["q_proj", "down_proj"], ["embed_tokens"], ["all-linear", "embed_tokens"]]
)
def test_plan_is_what_attaching_allocates(words, model_folder):
    options = [option for word in words for option in ("--target", word)]
    shown = cli_json("plan", "--model", model_folder, "--max-loras", 3, "--max-rank", 7, *options)
    lora = attach(make_model(), max_loras=3, max_rank=7, targets=words or None)
    assert shown["bytes"] == lora.pool.nbytes
    assert shown["num_targets"] == len(lora.targets)
    assert shown["bytes_per_adapter"] * 3 == shown["bytes"]
    assert (shown["fits"], shown["free_bytes"]) == (True, None)
    assert "the pool:" in cli("plan", "--model", model_folder)
    assert cli_json("plan", "--model", model_folder, "--device", "cpu")["free_bytes"] > 0


def test_plan_counts_experts_and_routers(tmp_path):
    make_model("qwen3_next").config.save_pretrained(tmp_path)
    options = ("--max-loras", 2, "--max-rank", 4)
    shown = cli_json("plan", "--model", tmp_path, *options, "--max-expert-rank", 3)
    lora = attach(make_model("qwen3_next"), max_loras=2, max_rank=4, max_expert_rank=3)
    assert lora.pool.experts is not None
    assert shown["bytes"] == lora.pool.nbytes + lora.pool.experts.nbytes
    assert shown["expert_bytes"] == lora.pool.experts.nbytes
    text = cli("plan", "--model", tmp_path, *options, "--max-expert-rank", 3)
    assert "experts of rank 3" in text
    alone = cli_json("plan", "--model", tmp_path, *options)
    assert (alone["bytes"] < shown["bytes"], alone["expert_bytes"]) == (True, 0)


def test_plan_refuses(model_folder, tmp_path):
    assert "no causal language model" in cli("plan", "--model", tmp_path, code=1)
    experts = ("--max-expert-rank", 4)
    assert "no routed experts" in cli("plan", "--model", model_folder, *experts, code=1)
    assert "they end in: down_proj, embed_tokens" in cli(
        "plan", "--model", model_folder, "--target", "x", code=1
    )
    if not torch.cuda.is_available():
        arguments = ("plan", "--model", model_folder, "--device", "cuda:0")
        assert "is not there" in cli(*arguments, code=2)


def generate(model_folder: Path, prompts: Sequence[str], *options: Any, code: int = 0) -> Any:
    arguments = ("generate", model_folder, *prompts, *options, "--max-new-tokens", 6)
    if code:
        return cli(*arguments, code=code)
    return cli_json(*arguments)["answers"]


def test_generate_answers_with_several_adapters_at_a_time(model, model_folder, adapters):
    prompts = ["w5 w6 w7", "w9"]
    loads = [
        option for name, path in adapters.items() for option in ("--adapter", f"{name}={path}")
    ]
    answers = generate(model_folder, prompts, *loads, "--with", "sql", "--with", "base")
    assert [(a["prompt"], a["adapter"]) for a in answers] == [
        (prompts[0], "sql"),
        (prompts[1], None),
    ]
    lora = attach(make_model(), max_loras=2, max_rank=5)
    lora.load("sql", adapters["sql"])
    ids = torch.tensor([[5, 6, 7], [0, 0, 9]])
    output = lora.generate(
        input_ids=ids,
        attention_mask=(ids > 0).long(),
        adapters=["sql", None],
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    expected = [" ".join(f"w{t}" for t in row if t > 2) for row in output[:, 3:].tolist()]
    assert [answer["text"] for answer in answers] == expected
    every = generate(model_folder, prompts, *loads)
    assert [a["adapter"] for a in every] == ["sql", "poet", "sql", "poet"]
    assert generate(model_folder, ["w4"])[0]["adapter"] is None
    text = cli("generate", model_folder, "w5", *loads[:2], "--max-new-tokens", 3)
    assert text.startswith("sql> w5\n")


def test_generate_reads_each_folder_once_and_makes_targets_of_what_it_changes(
    model, model_folder, tmp_path, monkeypatch
):
    folder = write_adapter(model, tmp_path / "sql", ["embed_tokens", "lm_head"], rank=5)
    opened: list[Path] = []
    original = lorafold.peft.open_folder

    def counted(path: Path, decisions: Any) -> Any:
        opened.append(path)
        return original(path, decisions)

    monkeypatch.setattr("lorafold.peft.open_folder", counted)
    loads = ("--adapter", f"sql={folder}")
    texts = [answer["text"] for answer in generate(model_folder, ["w5 w6"], *loads)]
    assert opened == [folder]
    base = [answer["text"] for answer in generate(model_folder, ["w5 w6"])]
    assert texts != base
    shown = cli_json("inspect", folder, "--model", model_folder)
    assert {row["target"]: row["kind"] for row in shown["targets"]} == {
        "model.embed_tokens": "embedding",
        "lm_head": "linear",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--adapter", "sql"], "must be NAME=PATH"),
        (["--adapter", "base=x"], "name `base` is taken"),
        (["--with", "sql"], "load it with --adapter sql=PATH"),
        (["--with", "base", "--with", "base", "--with", "base"], "once per prompt"),
        (["--max-new-tokens", "0"], "Invalid value for '--max-new-tokens'"),
    ],
)
def test_generate_refuses_wrong_usage(options, message, model_folder):
    arguments = ("generate", model_folder, "w4", "w5", *options)
    assert message in " ".join(cli(*arguments, code=2).replace("│", " ").split())


def test_generate_refuses_before_the_model_is_loaded(tmp_path, adapters):
    no_model = tmp_path / "model"
    assert "no such folder" in generate(
        no_model, ["w4"], "--adapter", f"sql={tmp_path / 'x'}", code=1
    )
    assert "no tokenizer at" in generate(
        no_model, ["w4"], "--adapter", f"sql={adapters['sql']}", code=1
    )


def test_figures_are_readable():
    assert [size_text(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**40, 2**52)] == [
        "0 B", "1023 B", "1.00 KiB", "5.00 MiB", "3.00 TiB", "4096.00 TiB",
    ]  # fmt: skip
    assert number(0.123456) == "0.1235"


def test_generate_refuses_a_prompt_without_a_token(model_folder):
    said = "every prompt needs a token"
    assert said in generate(model_folder, ["w5", ""], "--raw", code=1)
