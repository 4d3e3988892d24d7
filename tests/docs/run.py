"""Run the blocks of one page, in order, as a reader would."""

from __future__ import annotations

import contextlib
import doctest
import io
import shlex
import subprocess
from typing import Any

from typer.testing import CliRunner

from lorafold.cli.app import app
from tests.docs.blocks import Block
from tests.server.process import Process

ADDRESS = "http://127.0.0.1:8000"
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def is_like(shown: str, printed: str) -> bool:
    """Whether a block shows what was printed; "..." there stands for anything."""
    return doctest.OutputChecker().check_output(
        shown.strip() + "\n", printed.strip() + "\n", _FLAGS
    )


class PageRun:
    """One page: its Python shares its names, and its server lives until `stop`."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._server: Process | None = None

    def __enter__(self) -> PageRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop()

    def __call__(self, block: Block) -> str:
        """Run a block in the current folder; returns what it printed."""
        if block.language == "python":
            return self._python(block)
        return "".join(map(self._command, block.commands()))

    def _address(self, text: str) -> str:
        return text if self._server is None else text.replace(ADDRESS, self._server.url)

    def _python(self, block: Block) -> str:
        code = "\n" * block.line + self._address(block.text)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, block.page, "exec"), self._names)
        return printed.getvalue()

    def _command(self, command: str) -> str:
        program, *words = shlex.split(command, comments=True)
        if program == "lorafold" and words[0] == "serve":
            assert self._server is None, "a page starts one server"
            self._server = Process(words[1:]).wait_until_up()
            return ""
        if program == "lorafold":
            result = CliRunner(env={"COLUMNS": "100"}).invoke(app, words)
            assert result.exit_code == 0, f"{command}\n{result.output}{result.exception!r}"
            return str(result.stdout)
        assert program == "curl", f"nothing runs `{program}`; list the block as not run"
        done = subprocess.run(
            shlex.split(self._address(command)),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout
