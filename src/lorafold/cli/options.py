"""What several commands read from their options in the same way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from lorafold.cli.output import usage_error

__all__ = ["BASE", "adapter_paths"]

BASE = "base"
"""How the command line calls the model without an adapter."""


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
