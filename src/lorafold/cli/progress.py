"""The bar that commands show while they work."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lorafold.cli.output import notices

__all__ = ["progress_bar"]


def progress_bar(*, hidden: bool, width: int = 22) -> Progress:
    """A bar on stderr that vanishes at the end: what is done, how much, how long it took.

    Args:
        hidden: show nothing, because a program reads the output.
        width: of what is being done, in characters.
    """
    columns = (
        TextColumn(f"{{task.description:{width}}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=notices(), transient=True, disable=hidden)
