"""Slots for running requests, and a thread that places adapters beside them.

Placing waits for copies, and for disk where host memory had no room; the engine's thread must not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor

from lorafold.engine.shelf import Loaded, Shelf
from lorafold.engine.tally import Tally
from lorafold.errors import AdapterNotFoundError, PoolFullError
from lorafold.pool import Pool

__all__ = ["SlotHolder"]


class SlotHolder:
    """Holds the slots that requests need. All of it is called in the engine's thread.

    Args:
        pool: where adapters are placed.
        shelf: where they come from.
        tally: told what is placed.
        wake: called from another thread when a placement has ended.

    Example: `lorafold.engine.loop` uses it.
    """

    def __init__(self, pool: Pool, shelf: Shelf, tally: Tally, wake: Callable[[], None]) -> None:
        self._pool = pool
        self._shelf = shelf
        self._tally = tally
        self._wake = wake
        self._held: Counter[str] = Counter()
        self._coming: dict[Loaded, Future[None]] = {}
        # Those of which no request has held a slot since their placement was begun.
        self._alone: set[Loaded] = set()
        self._is_full = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lorafold-placing")

    @property
    def is_placing(self) -> bool:
        """Whether an adapter is on its way."""
        return self._num_coming > 0

    @property
    def _num_coming(self) -> int:
        return sum(not future.done() for future in self._coming.values())

    def hold(self, loaded: Loaded) -> int | None:
        """Hold the slot of an adapter, or have it placed and return None for now.

        Raises:
            PoolFullError: if the pool found no slot, though the engine holds none.
            LoraError: if the adapter cannot be placed.
        """
        if loaded in self._coming:
            if not self._coming[loaded].done():
                return None
            error = self._coming.pop(loaded).exception()
            if not isinstance(error, PoolFullError):
                if error is not None:
                    raise error
            elif loaded in self._alone:
                raise PoolFullError(
                    f"`{loaded.name}` has no place: all {self._pool.max_loras} slots are pinned, "
                    "or in use elsewhere; hint: unpin or evict an adapter, or raise max_loras",
                    max_loras=self._pool.max_loras,
                ) from error
            else:
                # Until the engine lets a slot go, if it has not yet, trying is of no use.
                self._is_full = bool(self._held)
        try:
            slot = self._pool.acquire(loaded.key)
        except AdapterNotFoundError:
            # No more come than there are slots that nobody holds: none pushes out another.
            if not self._is_full and len(self._held) + self._num_coming < self._pool.max_loras:
                self._shelf.share(loaded)
                if not self._held:
                    self._alone.add(loaded)
                self._coming[loaded] = self._thread.submit(self._place, loaded)
            return None
        self._held[loaded.key] += 1
        self._alone.clear()
        return slot

    def let_go(self, loaded: Loaded, slot: int) -> None:
        """Give back what `hold` returned."""
        self._pool.release(slot)
        self._held[loaded.key] -= 1
        if self._held[loaded.key] == 0:
            del self._held[loaded.key]
        self._is_full = False

    def forget_unwanted(self, wanted: Container[Loaded]) -> None:
        """Drop the news of placements that nobody asks for any more."""
        for loaded, future in list(self._coming.items()):
            if future.done() and loaded not in wanted:
                del self._coming[loaded]

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _place(self, loaded: Loaded) -> None:
        """In the placing thread, which is a user: what nobody else wants any more goes again."""
        try:
            adapter, before = self._shelf.adapter(loaded), set(self._pool.names())
            start = time.perf_counter()
            self._pool.place(adapter)
            with self._tally.changing() as stats:
                stats.num_places += 1
                stats.num_evictions += len(before - set(self._pool.names()))
                stats.place_seconds += time.perf_counter() - start
        finally:
            self._shelf.give_back(loaded)
            self._wake()
