"""Who is next: a first-in-first-out queue per adapter, the adapters in turn, nobody for ever last.

Knows no tensors and no slots: it offers items in a fair order and is told which could be taken.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items wait under keys (adapters). Not thread-safe.

    The key that was served longest ago is offered first, so a key with many items does not delay
    the others, and within a key items stay in order. An item that cannot be taken (its adapter
    finds no slot) lets others pass, but only `patience` times: after that nothing is taken before
    it, so what it waits for is set free by and by.

    Args:
        patience: how often an item lets others pass.

    Example:
        >>> queue = FairQueue[str](patience=8)
        >>> for key, item in [("a", "a1"), ("a", "a2"), ("b", "b1")]:
        ...     queue.add(key, item)
        >>> queue.admit(lambda item: True)
        ['a1', 'b1', 'a2']
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._queues: OrderedDict[Hashable, deque[Item]] = OrderedDict()
        # How often the first item of a key has let others pass.
        self._passed: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, key: object) -> bool:
        """Whether items wait under a key."""
        return key in self._queues

    def add(self, key: Hashable, item: Item) -> None:
        """Let an item wait behind the others of its key."""
        self._queues.setdefault(key, deque()).append(item)

    def remove(self, is_gone: Callable[[Item], bool]) -> list[Item]:
        """Take out every item for which `is_gone` is true."""
        gone = []
        for key, queue in list(self._queues.items()):
            first = queue[0]
            gone += [item for item in queue if is_gone(item)]
            kept = deque(item for item in queue if not is_gone(item))
            if not kept or kept[0] is not first:
                self._passed.pop(key, None)
            if kept:
                self._queues[key] = kept
            else:
                del self._queues[key]
        return gone

    def admit(self, take: Callable[[Item], bool]) -> list[Item]:
        """Offer items until none can be taken.

        Args:
            take: takes an item and returns True, or leaves everything as it is and returns False.

        Returns:
            What was taken, in order.
        """
        taken: list[Item] = []
        while self._admit_one(take, taken):
            pass
        return taken

    def _admit_one(self, take: Callable[[Item], bool], taken: list[Item]) -> bool:
        """Move the first item that can be taken, in turn, to `taken`; False if there is none."""
        blocked: list[Hashable] = []
        for key, queue in self._queues.items():
            if take(queue[0]):
                for other in blocked:
                    self._passed[other] = self._passed.get(other, 0) + 1
                self._passed.pop(key, None)
                taken.append(queue.popleft())
                if queue:
                    self._queues.move_to_end(key)
                else:
                    del self._queues[key]
                return True
            if self._passed.get(key, 0) >= self._patience:
                return False
            blocked.append(key)
        return False
