"""`lorafold serve`: what it refuses before it loads anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lorafold.cli.app import app


def run(*arguments: object, code: int) -> str:
    result = CliRunner().invoke(app, ["serve", "--port", "0", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--model'"),
        (["--model", "m", "--adapter", "sql"], "--adapter must be NAME=PATH; given: sql"),
        (["--model", "m", "--adapter", "a=1", "--adapter", "a=2"], "the name `a` is taken"),
        (["--model", "m", "--adapter", "m=1"], "the name `m` is the base model's"),
        (
            ["--model", "m", "--served-model-name", "n", "--adapter", "n=1"],
            "the name `n` is the base model's",
        ),
        (["--model", "m", "--batching", "best"], "must be auto, packed or static; given: best"),
        (["--model", "m", "--allow-runtime-loading"], "--adapter-root go together"),
        (["--model", "m", "--adapter-root", "."], "--adapter-root go together"),
        (
            ["--model", "m", "--allow-runtime-loading", "--adapter-root", "/no/such"],
            "--adapter-root must be a folder; given: /no/such",
        ),
        (["--model", "m", "--max-loras", "0"], "--max-loras"),
        (["--model", "m", "--port", "70000"], "--port"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_usage_is_refused_with_the_reason(arguments: list[str], message: str) -> None:
    assert message in run(*arguments, code=2)


def test_what_cannot_be_loaded_is_one_message(tmp_path: Path, model_folder: Path) -> None:
    assert "there is no such folder" in run(
        "--model", model_folder, "--adapter", f"a={tmp_path}/none", code=1
    )
    assert "no tokenizer at" in run("--model", tmp_path / "none", code=1)


def test_a_server_for_others_without_a_key_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = ["--model", tmp_path / "none"]
    warning = "may be reached by others, and there is no --api-key"
    assert warning in run(*model, "--host", "0.0.0.0", code=1)
    assert warning not in run(*model, "--host", "0.0.0.0", "--api-key", "k", code=1)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert warning not in run(*model, "--host", host, code=1)
    monkeypatch.setenv("LORAFOLD_API_KEY", "k")
    assert warning not in run(*model, "--host", "0.0.0.0", code=1)


def test_without_the_web_framework_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install 'lorafold[server]'" in run("--model", "m", code=1)
