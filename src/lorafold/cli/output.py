"""What all commands share in what they print: JSON or text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lorafold.errors import LoraError

__all__ = [
    "Json",
    "console",
    "notices",
    "number",
    "print_json",
    "refusals",
    "size_text",
    "table",
    "usage_error",
]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
"""The option of every command whose result a program may read."""


def console() -> Console:
    """Where results go."""
    return Console(highlight=False, soft_wrap=True)


def notices() -> Console:
    """Where progress, warnings and errors go."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object, which holds no NaN or infinity."""
    typer.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """The same value with names for the numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@contextmanager
def refusals(*, as_json: bool = False) -> Iterator[None]:
    """Turn an error of lorafold into one message and exit code 1, without a traceback.

    Args:
        as_json: print it as JSON on stdout instead of text on stderr.
    """
    try:
        yield
    except LoraError as error:
        if as_json:
            code = getattr(error, "code", "")
            print_json({"error": type(error).__name__, "code": code, "message": str(error)})
        else:
            notices().print(f"error: {error}", markup=False, style="red")
        raise typer.Exit(1) from None


def usage_error(message: str) -> typer.BadParameter:
    """The error for wrong usage, to be raised: exit code 2."""
    return typer.BadParameter(message)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def number(value: float) -> str:
    """A figure with four digits, such as "1.333".

    Example:
        >>> number(4 / 3), number(2.0)
        ('1.333', '2')
    """
    return f"{value:.4g}"


def size_text(num_bytes: int) -> str:
    """Bytes in the largest unit that leaves a whole part.

    Example:
        >>> size_text(1536), size_text(3 * 2**30)
        ('1.50 KiB', '3.00 GiB')
    """
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
