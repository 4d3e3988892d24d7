"""What all pictures share: matplotlib, which is not always there, and a file that may not be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lorafold.errors import BackendError, LoraError

__all__ = ["load_matplotlib", "writing"]


def load_matplotlib() -> tuple[Any, Any]:
    """matplotlib, and its Figure, which draws without a display.

    Raises:
        BackendError: if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BackendError(
            "a picture is drawn by matplotlib, which is not installed\n"
            "hint: pip install 'lorafold[plot]'"
        ) from error
    return matplotlib, Figure


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A block that writes a picture.

    Raises:
        LoraError: if the file cannot be written, or its ending is no format of pictures.

    Example:
        >>> with writing("picture.svg"):
        ...     raise OSError("disk full")
        Traceback (most recent call last):
        lorafold.errors.LoraError: the picture cannot be written to `picture.svg`: disk full
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise LoraError(f"the picture cannot be written to `{path}`: {error}") from error
