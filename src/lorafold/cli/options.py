"""What several commands read from their options in the same way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, get_args

import typer

from lorafold.cli.output import usage_error
from lorafold.peft.layouts import ExpertLayout

__all__ = ["BASE", "Layout", "adapter_paths"]

BASE = "base"
"""How the command line calls the model without an adapter."""


def _layout(text: str) -> ExpertLayout:
    known: tuple[ExpertLayout, ...] = get_args(ExpertLayout)
    for layout in known:
        if text == layout:
            return layout
    raise usage_error(f"--expert-layout must be one of {', '.join(known)}; given: {text}")


Layout = Annotated[
    ExpertLayout | None,
    typer.Option(
        parser=_layout,
        metavar="LAYOUT",
        help="How the file stores experts, where it does not tell: "
        f"{', '.join(get_args(ExpertLayout))}.",
    ),
]
"""The option of every command that reads experts for a model."""


def adapter_paths(texts: Sequence[str], *, taken: Collection[str] = ()) -> dict[str, Path]:
    """The folders that `--adapter NAME=PATH` names, by adapter.

    Args:
        texts: the option's values.
        taken: names that no adapter may have.

    Raises:
        typer.BadParameter: if a value has another form, or a name comes twice or is taken.

    Example:
        >>> {name: path.as_posix() for name, path in adapter_paths(["sql=./sql"]).items()}
        {'sql': 'sql'}
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise usage_error(f"--adapter must be NAME=PATH; given: {text}")
        if name in found or name in taken:
            raise usage_error(f"--adapter: the name `{name}` is taken")
        found[name] = Path(path)
    return found
