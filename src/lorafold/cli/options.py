"""What several commands read from their options in the same way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer

from lorafold.cli.output import usage_error
from lorafold.device import usable_device
from lorafold.errors import BackendError
from lorafold.peft.layouts import ExpertLayout

__all__ = [
    "BASE",
    "Device",
    "Layout",
    "Seed",
    "adapter_paths",
    "parse_device",
]

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


def parse_device(text: str) -> torch.device:
    """The device that `--device` names.

    Raises:
        typer.BadParameter: if it is no CPU or CUDA device of this machine.

    Example:
        >>> parse_device("cpu")
        device(type='cpu')
    """
    try:
        return usable_device(text)
    except BackendError as error:
        raise usage_error(str(error)) from None


Device = Annotated[
    torch.device | None,
    typer.Option(
        "--device",  # Typer 0.27 would take the metavar for it
        parser=parse_device,
        metavar="DEVICE",
        help="cpu or cuda:N; without it, CUDA where there is a device.",
    ),
]
"""The option of every command that computes."""


Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random numbers.")]
"""The option of every command that draws some."""


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
