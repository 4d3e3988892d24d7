"""Loading on all ranks of a replica, or on none.

vLLM loads an adapter on every rank by itself. A rank that refuses it, because of its own layers or
its own disk, would leave the others with it loaded; and vLLM's executor stops reading answers at
the first that is an error, so that the rest would be taken for answers to the next call. So the
ranks tell each other, take back what only some could do, and the last rank alone raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed

from lorafold.errors import AdapterError

__all__ = ["add_on_all_ranks"]


def add_on_all_ranks(
    add: Callable[[], bool], manager: Any, lora_request: Any, groups: Sequence[Any]
) -> bool:
    """Load an adapter, if every rank can.

    Args:
        add: vLLM's own loading on this rank.
        manager: vLLM's WorkerLoRAManager of this rank.
        lora_request: which adapter, by `lora_int_id`, `lora_name` and `load_inplace`.
        groups: this rank's groups of the replica, with `cpu_group`, `rank_in_group` and
            `world_size`; together they reach all its ranks, and their order is that of the ranks.

    Returns:
        What `add` returns; False on all ranks but the last if some rank could not load it.

    Raises:
        AdapterError: on the last rank, if another could not; whatever `add` raises, if it did.

    Example:
        >>> from types import SimpleNamespace
        >>> manager = SimpleNamespace(list_adapters=set)
        >>> request = SimpleNamespace(lora_int_id=1, lora_name="sql", load_inplace=False)
        >>> add_on_all_ranks(lambda: True, manager, request, groups=[])  # a replica of one rank
        True
    """
    was_loaded = lora_request.lora_int_id in manager.list_adapters()
    added, error = False, None
    try:
        added = add()
    except Exception as caught:
        error = caught
    reports = _gathered(None if error is None else str(error), groups)
    refusals = [report for report in reports if report is not None]
    if not refusals:
        return added
    if None in reports and (lora_request.load_inplace or not was_loaded):
        manager.remove_adapter(lora_request.lora_int_id)
    if any(group.rank_in_group < group.world_size - 1 for group in groups):
        return False
    if error is None:
        raise AdapterError(f"on another rank: {refusals[0]}", adapter=lora_request.lora_name)
    raise error


def _gathered(report: str | None, groups: Sequence[Any]) -> list[str | None]:
    """The reports of all ranks."""
    reports = [report]
    for group in groups:
        if group.world_size > 1:
            parts: list[Any] = [None] * group.world_size
            distributed.all_gather_object(parts, reports, group=group.cpu_group)
            reports = [each for part in parts for each in part]
    return reports
