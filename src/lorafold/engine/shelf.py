"""The adapters that requests may name; more of them than the pool has slots."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike, fspath

from lorafold.adapter import Adapter, LoadReport
from lorafold.errors import AdapterNotFoundError
from lorafold.refusal import listed
from lorafold.runtime import MultiLora
from lorafold.store import AdapterStore

__all__ = ["Loaded", "Shelf"]


@dataclass(frozen=True, eq=False)
class Loaded:
    """One loading of an adapter. A request keeps the one that it was accepted with.

    Args:
        name: what requests call it.
        key: its name in store and pool, which no other loading shares: what was computed with one
            loading of a name is never taken for another.
        path: the folder it was read from.
        report: what became of every tensor of the file.
        loaded_at: when, in seconds since the epoch.

    Example: see `Shelf`.
    """

    name: str
    key: str
    path: str
    report: LoadReport
    loaded_at: float


class Shelf:
    """Names, what they stand for, and who uses it. Methods may be called from several threads.

    Args:
        lora: the model that the adapters are for.
        host_bytes: host memory for adapters; those that were not needed for longest are read from
            disk again when they are. None for no limit.

    Raises:
        RouteError: if host_bytes has no room for one adapter.
        BackendError: if the host has less memory than that.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lorafold.runtime import attach
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> Shelf(attach(LlamaForCausalLM(config).bfloat16())).take("sql")
        Traceback (most recent call last):
        lorafold.errors.AdapterNotFoundError: no adapter `sql` is loaded; loaded are: none
    """

    def __init__(self, lora: MultiLora, *, host_bytes: int | None = None) -> None:
        self._lora = lora
        self._store = AdapterStore(
            lora.pool,
            budget_bytes=host_bytes,
            pinned=lora.pool.device.type == "cuda",
            read=self._read,
        )
        self._lock = threading.Lock()
        self._loaded: dict[str, Loaded] = {}
        self._num_users: Counter[str] = Counter()
        self._num_loadings = 0

    def load(self, name: str, path: str | PathLike[str]) -> Loaded:
        """Read an adapter; one of the same name is replaced for the requests to come.

        Args:
            name: what requests will call it.
            path: a PEFT folder.

        Raises:
            AdapterFormatError: if the files are broken or use what is not supported.
            AdapterMismatchError: if it does not fit the model or the pool.
            BackendError: if the host has no memory for it.
        """
        with self._lock:
            self._num_loadings += 1
            key = f"{name}@{self._num_loadings}"
        self._store.register(key, path)
        try:
            report = self._store.get(key).report
        except BaseException:
            self._store.unregister(key)
            raise
        with self._lock:
            before = self._loaded.pop(name, None)
            loaded = Loaded(name, key, fspath(path), report, time.time())
            self._loaded[name] = loaded
            is_gone = before is not None and self._is_gone(before)
        if before is not None and is_gone:
            self._clear_away(before)
        return loaded

    def adapter(self, loaded: Loaded) -> Adapter:
        """The tensors, from host memory, or from disk again if memory had no room for them.

        Raises:
            AdapterFormatError, AdapterMismatchError: if the files have changed for the worse.
            BackendError: if the host has no memory for it.
        """
        return self._store.get(loaded.key)

    def unload(self, name: str) -> None:
        """Take a name away; its slot is emptied when the last request that has it ends.

        Raises:
            AdapterNotFoundError: if no adapter of that name is loaded.
        """
        with self._lock:
            loaded = self._find(name)
            del self._loaded[name]
            is_gone = self._is_gone(loaded)
        if is_gone:
            self._clear_away(loaded)

    def take(self, name: str) -> Loaded:
        """What a name stands for now, for one more user.

        Raises:
            AdapterNotFoundError: if no adapter of that name is loaded.
        """
        with self._lock:
            loaded = self._find(name)
            self._num_users[loaded.key] += 1
            return loaded

    def share(self, loaded: Loaded) -> None:
        """Count one more user of what has one already."""
        with self._lock:
            self._num_users[loaded.key] += 1

    def give_back(self, loaded: Loaded) -> None:
        """Count a user off, of `take` or `share`."""
        with self._lock:
            self._num_users[loaded.key] -= 1
            is_gone = self._is_gone(loaded)
        if is_gone:
            self._clear_away(loaded)

    def __contains__(self, name: object) -> bool:
        """Whether requests may name it."""
        with self._lock:
            return name in self._loaded

    def all(self) -> tuple[Loaded, ...]:
        """Everything that can be named, in the order of loading."""
        with self._lock:
            return tuple(self._loaded.values())

    def _find(self, name: str) -> Loaded:
        if name not in self._loaded:
            message = f"no adapter `{name}` is loaded; loaded are: {listed(self._loaded) or 'none'}"
            raise AdapterNotFoundError(message, adapter=name)
        return self._loaded[name]

    def _is_gone(self, loaded: Loaded) -> bool:
        """Whether it has just lost the last of its name and its users; asked under the lock."""
        if self._num_users[loaded.key] > 0:
            return False
        del self._num_users[loaded.key]
        return self._loaded.get(loaded.name) is not loaded

    def _clear_away(self, loaded: Loaded) -> None:
        """Forget what is gone, and empty its slot; not under the lock, as that may take a while."""
        self._store.unregister(loaded.key)
        with suppress(AdapterNotFoundError):  # it was not placed
            self._lora.pool.evict(loaded.key)

    def _read(self, key: str, path: str) -> Adapter:
        """The adapter under its key; messages speak of it by its name."""
        return replace(self._lora.read(key.rpartition("@")[0], path), name=key)
