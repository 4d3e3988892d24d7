"""The command line. `main` is its entrance; typer and rich are needed here and nowhere else."""

from __future__ import annotations

import sys

__all__ = ["main"]

_HINT = "the command line needs typer and rich\nhint: pip install 'lorafold[cli]'"


def main() -> None:
    """Run `lorafold`: exit code 0 means fine, 1 a difference or a refusal, 2 wrong usage.

    Raises:
        SystemExit: always, with the exit code.
    """
    try:
        import rich
        import typer
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print(_HINT, file=sys.stderr)
        raise SystemExit(2) from None
    del rich, typer
    from lorafold.cli.app import app

    app()
