"""Which adapter is in which slot: names, pins, uses and ages. No tensors.

`lorafold.pool` asks this ledger where an adapter may go, and tells it what it has put there.
"""

from __future__ import annotations

from dataclasses import dataclass

from lorafold.errors import AdapterNotFoundError, PoolFullError, RouteError

__all__ = ["SlotLedger"]


@dataclass
class _Slot:
    """One slot that is not empty.

    One that arrives is being written, and has no generation yet. A retired one has lost its name
    and waits for its last user.
    """

    name: str
    generation: int = 0
    last_use: int = 0
    num_uses: int = 0
    is_pinned: bool = False
    is_arriving: bool = False
    is_retired: bool = False


class SlotLedger:
    """The bookkeeping of a pool's slots. Not thread-safe: the pool holds a lock.

    Args:
        max_loras: number of slots.

    Example:
        >>> ledger = SlotLedger(2)
        >>> index = ledger.begin("sql")
        >>> ledger.is_arriving("sql"), ledger.names()
        (True, ())
        >>> ledger.occupy(index)
        >>> ledger.slot("sql"), ledger.names()
        (0, ('sql',))
    """

    def __init__(self, max_loras: int) -> None:
        self._slots: list[_Slot | None] = [None] * max_loras
        self._slot_of: dict[str, int] = {}
        self._clock = 0
        self._generation = 0

    def slot(self, name: str) -> int:
        """The slot of a name.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        if name not in self._slot_of:
            placed = ", ".join(f"`{other}`" for other in self.names()) or "none"
            message = f"no adapter `{name}` is placed; placed are: {placed}"
            raise AdapterNotFoundError(message, adapter=name)
        return self._slot_of[name]

    def names(self) -> tuple[str, ...]:
        """The names, in the order of their slots."""
        return tuple(sorted(self._slot_of, key=self._slot_of.__getitem__))

    def generation(self, name: str) -> int:
        """The number of the placement of a name: no two placements share one.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        return self._named(name).generation

    def generation_in(self, index: int) -> int:
        """The number of the placement that a slot holds, named or retired.

        Raises:
            RouteError: if the slot holds none.
        """
        slot = self._slots[index] if 0 <= index < len(self._slots) else None
        if slot is None or slot.is_arriving:
            raise RouteError(f"slot {index} holds no adapter; hint: ask for a slot that is in use")
        return slot.generation

    def is_arriving(self, name: str) -> bool:
        """Whether a name has no slot yet, or no more, because its adapter is being written."""
        return name not in self._slot_of and self._begun(name) is not None

    def _begun(self, name: str) -> int | None:
        """The slot that an adapter of this name is being written into."""
        for index, slot in enumerate(self._slots):
            if slot is not None and slot.is_arriving and slot.name == name:
                return index
        return None

    def _named(self, name: str) -> _Slot:
        slot = self._slots[self.slot(name)]
        assert slot is not None
        return slot

    def begin(self, name: str) -> int:
        """Choose the slot that a new adapter of this name will be written into, and empty it.

        Its own if that is idle, else the first empty one, else the idle unpinned one that was not
        used for longest. What was there loses its name; a slot of this name that is in use keeps
        it until `occupy`.

        Raises:
            PoolFullError: if every slot is pinned or in use; nothing is changed then.
        """
        index = self._choose(name)
        victim = self._slots[index]
        is_pinned = victim is not None and victim.name == name and victim.is_pinned
        # Made first: an interrupt in the call must not leave a victim that has only lost its name.
        arriving = _Slot(name, is_pinned=is_pinned, is_arriving=True)
        if victim is not None:
            del self._slot_of[victim.name]
        self._slots[index] = arriving
        return index

    def _choose(self, name: str) -> int:
        own = self._slot_of.get(name)
        if own is not None and self._named(name).num_uses == 0:
            return own
        if None in self._slots:
            return self._slots.index(None)
        idle = [
            (slot.last_use, index)
            for index, slot in enumerate(self._slots)
            if slot is not None and slot.num_uses == 0 and not (slot.is_pinned or slot.is_arriving)
        ]
        if not idle:
            max_loras = len(self._slots)
            message = (
                f"`{name}` has no place: all {max_loras} slots are pinned or in use; "
                "hint: unpin or evict an adapter, or raise max_loras"
            )
            raise PoolFullError(message, max_loras=max_loras)
        return min(idle)[1]

    def occupy(self, index: int) -> int | None:
        """Record that what was begun is there: the name now means this slot.

        A pin of the name stays.

        Returns:
            The slot that the name meant before, if it is now empty, else None.
        """
        slot = self._slots[index]
        assert slot is not None
        assert slot.is_arriving
        emptied = None
        if slot.name in self._slot_of:
            slot.is_pinned = self._named(slot.name).is_pinned
            emptied = self.retire(slot.name)
        self._generation += 1
        slot.generation, slot.last_use, slot.is_arriving = self._generation, self._tick(), False
        self._slot_of[slot.name] = index
        return emptied

    def retire(self, name: str) -> int | None:
        """Take the name from its slot, which is emptied now or by its last user.

        Returns:
            The slot if it is now empty, else None.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        index, slot = self.slot(name), self._named(name)
        del self._slot_of[name]
        if slot.num_uses == 0:
            self._slots[index] = None
            return index
        slot.is_retired, slot.is_pinned = True, False
        return None

    def pin(self, name: str, *, is_pinned: bool) -> None:
        """Keep a name from being chosen as a victim, or no longer.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        self._named(name).is_pinned = is_pinned

    def acquire(self, name: str) -> int:
        """Count a user of a name's slot.

        Raises:
            AdapterNotFoundError: if no adapter of that name is placed.
        """
        slot = self._named(name)
        slot.num_uses += 1
        slot.last_use = self._tick()
        return self._slot_of[name]

    def release(self, index: int) -> int | None:
        """Count a user off.

        Returns:
            The slot if it was retired and is now empty, else None.

        Raises:
            RouteError: if the slot has no user.
        """
        slot = self._slots[index] if 0 <= index < len(self._slots) else None
        if slot is None or slot.num_uses == 0:
            raise RouteError(f"slot {index} is not in use; only what acquire returned is released")
        slot.num_uses -= 1
        if slot.is_retired and slot.num_uses == 0:
            self._slots[index] = None
            return index
        return None

    def vacate(self, name: str) -> int | None:
        """Record that what was begun for this name, if anything, has failed.

        Returns:
            The slot, which is now empty; None if nothing was begun.
        """
        index = self._begun(name)
        if index is not None:
            self._slots[index] = None
        return index

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
