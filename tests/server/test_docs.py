"""docs/server.md: every command and every piece of code in it, run as it stands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import Process

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
ADDRESS = "http://127.0.0.1:8000"


def is_like(shown: Any, got: Any) -> bool:
    """Whether `got` is what the page shows; "..." there stands for anything, also for more."""
    if shown == "...":
        return True
    if isinstance(shown, dict) and isinstance(got, dict):
        names = set(shown) - {"..."}
        is_complete = "..." in shown or names == set(got)
        return is_complete and all(n in got and is_like(shown[n], got[n]) for n in names)
    if isinstance(shown, list) and isinstance(got, list):
        return len(shown) == len(got) and all(map(is_like, shown, got))
    return bool(shown == got)


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, adapter_root: Path
) -> Iterator[tuple[Path, str]]:
    """A folder with what the page speaks of, and the address of the server that it starts."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(model_folder, folder / "llama")
    for name, source in (("sql", "a0"), ("poet", "a1")):
        shutil.copytree(adapter_root / source, folder / "adapters" / name)
    (command,) = [text for kind, text in BLOCKS if kind == "serve"]
    words = shlex.split(command)
    assert words[:2] == ["lorafold", "serve"]
    here = Path.cwd()
    os.chdir(folder)
    server = Process(words[2:], api_key="sk-secret")
    try:
        yield folder, server.wait_until_up().url
    finally:
        server.stop()
        os.chdir(here)


def test_the_commands_print_what_the_page_shows(place: tuple[Path, str]) -> None:
    folder, url = place
    num_run = 0
    for (kind, text), (next_kind, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if kind != "bash":
            continue
        assert ADDRESS in text
        script = f"set -euo pipefail\n{text.replace(ADDRESS, url)}"
        run = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=folder,
            check=True,
        )
        num_run += 1
        if next_kind == "json":
            assert is_like(json.loads(shown), json.loads(run.stdout)), run.stdout
        elif next_kind == "text":
            assert run.stdout.strip() == shown.strip()
        else:
            assert int(run.stdout) > 10
    assert num_run == 7


def test_the_python_code_runs(place: tuple[Path, str]) -> None:
    _, url = place
    codes = [text for kind, text in BLOCKS if kind == "python"]
    assert len(codes) == 2
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code.replace(ADDRESS, url), str(PAGE), "exec"), {})
        assert len(printed.getvalue().strip()) > 5


def test_likeness_sees_differences() -> None:
    shown = {"a": [1, "..."], "...": "..."}
    assert is_like(shown, {"a": [1, {"x": 2}], "b": 3})
    assert not is_like(shown, {"a": [2, 0]})
    assert not is_like(shown, {"a": [1]})
    assert not is_like({"a": 1}, {"a": 1, "b": 2})
    assert not is_like(shown, {"b": 3})
