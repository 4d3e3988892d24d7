"""Adapters by name: where each is on disk, and those that host memory has room for.

Thousands may be registered. `get` reads an adapter when it is first needed, keeps it for the next
time within a budget of bytes, and forgets the one that was not asked for longest when room is
needed. Nothing here knows slots: `lorafold.pool` places what `get` returns.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from lorafold.adapter import Adapter
from lorafold.device import free_bytes
from lorafold.errors import AdapterNotFoundError, BackendError, RouteError
from lorafold.peft import AdapterSpec, load_adapter
from lorafold.pool import Pool
from lorafold.refusal import listed

__all__ = ["AdapterStore"]


class _Entry:
    """One registration of a name. A later one of the same name is another object."""

    def __init__(self, path: str | AdapterSpec) -> None:
        self.path = path
        self.loading: Future[Adapter] | None = None


class AdapterStore:
    """Adapters on disk and in host memory. Methods may be called from several threads.

    What `get` has returned lives on for as long as somebody holds it; the budget counts what the
    store itself holds.

    Args:
        pool: what the adapters must fit.
        budget_bytes: host memory for adapters; None for no limit.
        pinned: keep adapters as `Pool.pack` lays them out, on CUDA in page-locked memory: placing
            one is then one copy, and each takes a slot's bytes, whatever its rank. False keeps the
            factors as they are, and placing packs them.
        read: reads the adapter of a name from what was registered, such as `MultiLora.read`; None
            for `load_adapter`.

    Raises:
        RouteError: if the budget has no room for one packed adapter, or is below 1.
        BackendError: if the host has less memory than the budget.

    Example:
        >>> from lorafold.adapter import TargetShape
        >>> store = AdapterStore(Pool({"lm_head": TargetShape(16, 8)}, max_loras=2, max_rank=8))
        >>> store.register("sql", "no/such/folder")
        >>> store.names(), store.nbytes
        (('sql',), 0)
        >>> store.get("sql")
        Traceback (most recent call last):
        lorafold.errors.AdapterFormatError: `no/such/folder`: there is no such folder ...
    """

    def __init__(
        self,
        pool: Pool,
        *,
        budget_bytes: int | None = None,
        pinned: bool = False,
        read: Callable[[str, Any], Adapter] | None = None,
    ) -> None:
        if budget_bytes is not None:
            least, free = pool.image_bytes if pinned else 1, free_bytes(torch.device("cpu"))
            if budget_bytes < least:
                raise RouteError(
                    f"the budget of host memory must be at least {least} bytes, for one adapter; "
                    f"given: {budget_bytes}"
                )
            if free is not None and budget_bytes > free:
                raise BackendError(
                    f"the host has {free} bytes free; the budget of host memory is {budget_bytes}\n"
                    "hint: lower it"
                )
        self.budget_bytes = budget_bytes
        self.pinned = pinned
        self._pool = pool
        self._read = read or self._load_adapter
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        # In the order in which they were last asked for.
        self._kept: OrderedDict[str, Adapter] = OrderedDict()
        self._kept_bytes = self._coming_bytes = 0
        self._num_reads = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the adapters in host memory, and of those that are being laid out."""
        with self._changed:
            return self._kept_bytes + self._coming_bytes

    @property
    def num_reads(self) -> int:
        """How often an adapter was read from disk."""
        with self._changed:
            return self._num_reads

    def register(self, name: str, path: str | os.PathLike[str]) -> None:
        """Say where an adapter is; nothing is read yet.

        A name that is registered already means the new path for every `get` from now on, also where
        the path is the same.

        Args:
            name: what requests will call it.
            path: a PEFT folder; or what `lorafold.peft.parse` made of one, which the first `get`
                takes, so that it does not read the folder again.
        """
        source = path if isinstance(path, AdapterSpec) else os.fspath(path)
        with self._changed:
            self._forget(name)
            self._entries[name] = _Entry(source)

    def unregister(self, name: str) -> None:
        """Take a name away, from host memory too.

        Raises:
            AdapterNotFoundError: if no adapter of that name is registered.
        """
        with self._changed:
            self._find(name)
            self._forget(name)
            del self._entries[name]

    def names(self) -> tuple[str, ...]:
        """What is registered, in the order of the names' first registrations."""
        with self._changed:
            return tuple(self._entries)

    def in_memory(self) -> tuple[str, ...]:
        """What is in host memory; the first is forgotten next."""
        with self._changed:
            return tuple(self._kept)

    def get(self, name: str) -> Adapter:
        """The adapter of a name, from host memory or from disk.

        Threads that ask for one name at a time share one read, and its error if it fails; nothing
        is changed then, and the next `get` tries again.

        Raises:
            AdapterNotFoundError: if no adapter of that name is registered.
            AdapterFormatError: if the files are broken or use what is not supported.
            AdapterMismatchError: if the adapter does not fit the pool.
            BackendError: if it is larger than the budget, or the host has no memory for it.
        """
        with self._changed:
            entry = self._find(name)
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
            loading = entry.loading
            mine: Future[Adapter] = Future()
            if loading is None:
                entry.loading = mine
                self._num_reads += 1
        if loading is not None:
            return loading.result()
        try:
            adapter = self._load(name, entry)
        except BaseException as error:
            with self._changed:
                entry.loading = None  # the next one tries again
            mine.set_exception(error)
            raise
        mine.set_result(adapter)
        return adapter

    def _load(self, name: str, entry: _Entry) -> Adapter:
        """Read an adapter and keep it, unless the name has got another meaning meanwhile."""
        adapter = self._read(name, entry.path)
        entry.path = os.fspath(entry.path)  # the budget does not count what was parsed
        self._pool.check(adapter)
        num_bytes = adapter.nbytes
        if self.pinned:
            num_bytes = self._pool.image_bytes + adapter.expert_bytes
        self._make_room(name, num_bytes)
        try:
            if self.pinned:
                adapter = self._pool.pack(adapter)
        except BaseException:
            self._settle(num_bytes)
            raise
        with self._changed:
            self._settle(num_bytes)
            entry.loading = None
            if self._entries.get(name) is entry:
                self._kept[name] = adapter
                self._kept_bytes += num_bytes
        return adapter

    def _settle(self, num_bytes: int) -> None:
        """Count bytes out that are coming no more."""
        with self._changed:
            self._coming_bytes -= num_bytes
            self._changed.notify_all()

    def _make_room(self, name: str, num_bytes: int) -> None:
        """Count bytes in that are about to be taken; others are forgotten, or waited for."""
        with self._changed:
            if self.budget_bytes is not None:
                if num_bytes > self.budget_bytes:
                    raise BackendError(
                        f"`{name}` takes {num_bytes} bytes of host memory; the budget is "
                        f"{self.budget_bytes}; hint: raise it"
                    )
                while self._kept_bytes + self._coming_bytes + num_bytes > self.budget_bytes:
                    if self._kept:
                        self._forget(next(iter(self._kept)))
                    else:
                        self._changed.wait()
            self._coming_bytes += num_bytes

    def _forget(self, name: str) -> None:
        """Let go of an adapter, if it is in memory."""
        adapter = self._kept.pop(name, None)
        if adapter is not None:
            self._kept_bytes -= adapter.nbytes

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            known = listed(self._entries) or "none"
            message = f"no adapter `{name}` is registered; registered are: {known}"
            raise AdapterNotFoundError(message, adapter=name)
        return self._entries[name]

    def _load_adapter(self, name: str, path: str | AdapterSpec) -> Adapter:
        return load_adapter(path, self._pool.shapes, name=name)
