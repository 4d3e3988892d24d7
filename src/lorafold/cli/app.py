"""All commands of `lorafold`, one module each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from lorafold import __version__
from lorafold.cli.bench import bench
from lorafold.cli.convert import convert
from lorafold.cli.demo import demo
from lorafold.cli.generate import generate
from lorafold.cli.inspect import inspect
from lorafold.cli.plan import plan
from lorafold.cli.serve import serve
from lorafold.cli.verify import verify

__all__ = ["app"]

app = typer.Typer(
    name="lorafold",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXAMPLES: dict[Callable[..., None], str] = {
    demo: "lorafold demo --model ./llama --adapter sql=./sql-adapter --prompt 'List all users.'",
    verify: "lorafold verify --quick",
    bench: "lorafold bench --rows 1 --rows 64 --rank 16",
    inspect: "lorafold inspect ./sql-adapter --model ./llama",
    convert: "lorafold convert ./old-adapter ./new-adapter",
    plan: "lorafold plan --model ./llama --max-loras 64 --max-rank 16",
    serve: "lorafold serve --model ./llama --adapter sql=./sql-adapter",
    generate: "lorafold generate ./llama 'How are you?' --adapter pirate=./pirate --with pirate",
}

_EXIT_CODES = "Exit code 0: fine. 1: a difference or a refusal, with the reason. 2: wrong usage."

for _command, _example in _EXAMPLES.items():
    app.command(epilog=f"Example:  {_example}\n\n{_EXIT_CODES}")(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorafold {__version__}")
        raise typer.Exit


@app.callback()
def lorafold(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Many LoRA adapters over one base model, the same bits whatever else is in the batch.

    Exit code 0: fine. 1: a difference or a refusal, with the reason. 2: wrong usage.
    """
