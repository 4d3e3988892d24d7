"""The thread that loads: from folders through the store into slots, and what it disturbs."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.churn_adapters import Versions
from lorafold.errors import AdapterNotFoundError, PoolFullError
from lorafold.pool import Pool
from lorafold.store import AdapterStore

__all__ = ["Loader"]

NUM_VERSIONS = 3
"""Versions of the names that get new weights; they take turns."""

_MOST_WAITING = 4  # adapters that wait to be placed, and that wait to be used
_PAUSE_S = 0.002  # between placements: both threads are Python's, and take turns


class Loader:
    """Writes the folders, then loads what is asked for.

    Args:
        pool: where adapters go.
        store: where they come from.
        versions: what they are.
        num_adapters: names "0", "1", ...; every eighth comes in several versions.
        folder: where to write them.
    """

    def __init__(
        self, pool: Pool, store: AdapterStore, versions: Versions, num_adapters: int, folder: Path
    ) -> None:
        self.pool, self._store = pool, store
        self._version = [0] * num_adapters
        self._folders: dict[tuple[int, int], Path] = {}
        for adapter in range(num_adapters):
            for version in range(NUM_VERSIONS if adapter % 8 == 0 else 1):
                path = folder / f"{adapter}-{version}"
                self._folders[adapter, version] = versions.write(adapter, version, path)
            store.register(str(adapter), self._folders[adapter, 0])
        self._random = random.Random(3)
        self._wanted: deque[int] = deque()
        self._placed: deque[tuple[int, tuple[int, int]]] = deque()
        self._key_of: dict[int, tuple[int, int]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._stop = threading.Event()
        self._counts = dict.fromkeys(("placed", "reloaded", "evicted", "found_no_slot"), 0)

    def ask(self, adapter: int) -> None:
        """Have an adapter placed, if not too many wait already."""
        if len(self._wanted) < _MOST_WAITING:
            self._wanted.append(adapter)

    def take(self) -> tuple[int, tuple[int, int]] | None:
        """The slot and version of an adapter that was asked for, acquired already."""
        return self._placed.popleft() if self._placed else None

    def key_of(self, slot: int) -> tuple[int, int]:
        """The version in a slot that the caller has acquired."""
        generation = self.pool.generation_in(slot)
        while generation not in self._key_of:  # placed, and noted in a moment
            time.sleep(0)
        return self._key_of[generation]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Load inside, in another thread; what fails there is raised at the end."""
        before = sys.getswitchinterval()
        # Who serves must not wait 5 ms for who loads, whenever torch has let go of the interpreter.
        sys.setswitchinterval(2e-4)
        try:
            with ThreadPoolExecutor(1) as threads:
                running = threads.submit(self._run)
                try:
                    yield
                finally:
                    self._stop.set()
                running.result()
        finally:
            sys.setswitchinterval(before)

    def end(self) -> None:
        """Give back what was placed and not taken."""
        while (placed := self.take()) is not None:
            self.pool.release(placed[0])

    def counts(self) -> dict[str, Any]:
        """What was done; `read_again` are reads of a version that had been read before."""
        read_again = self._store.num_reads - len(self._seen)
        return {**self._counts, "read": self._store.num_reads, "read_again": read_again}

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._wanted or len(self._placed) >= _MOST_WAITING:
                time.sleep(1e-4)
                continue
            adapter = self._wanted.popleft()
            if (adapter, 1) in self._folders and self._random.random() < 0.5:
                self._reload(adapter)
            key = adapter, self._version[adapter]
            self._seen.add(key)
            try:
                slot = self.pool.place(self._store.get(str(adapter)), acquire=True)
            except PoolFullError:
                self._counts["found_no_slot"] += 1
                time.sleep(_PAUSE_S)
                continue
            self._key_of[self.pool.generation_in(slot)] = key
            self._placed.append((slot, key))
            self._counts["placed"] += 1
            self._disturb()
            time.sleep(_PAUSE_S)

    def _reload(self, adapter: int) -> None:
        """Give a name its next weights."""
        self._version[adapter] = (self._version[adapter] + 1) % NUM_VERSIONS
        self._store.register(str(adapter), self._folders[adapter, self._version[adapter]])
        self._counts["reloaded"] += 1

    def _disturb(self) -> None:
        """Sometimes evict an adapter, or pin one and let the others go."""
        names = self.pool.names()
        if not names or self._random.random() > 0.1:
            return
        with suppress(AdapterNotFoundError):
            if self._random.random() < 0.7:
                self.pool.evict(self._random.choice(names))
                self._counts["evicted"] += 1
            else:
                for name in names:
                    self.pool.unpin(name)
                self.pool.pin(self._random.choice(names))
