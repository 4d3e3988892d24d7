"""What the engine has done and is doing, in numbers, for `/metrics` and the status page."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lorafold.engine.request import FinishReason

__all__ = ["EngineStats", "Tally"]


@dataclass
class EngineStats:
    """Numbers since the start, and the state now. The adapter None is base.

    Args:
        running: requests that hold a place in the batch, per adapter.
        waiting: requests that wait for one, per adapter.
        finished: per adapter and reason.
        prompt_tokens: read, per adapter, of finished requests.
        answer_tokens: generated, per adapter, those of running requests included.
        slots: (slot, name) of the adapters that are placed.
        max_loras: slots there are.
        num_loads: how often an adapter was read into host memory.
        load_seconds: time spent reading.
        num_places: how often an adapter was placed into a slot.
        num_evictions: how often one had to give way.
        place_seconds: time spent placing.
        num_steps: forwards of requests. Those of a static batch are counted when it ends, and so
            are their times.
        step_seconds: time of the engine's thread from letting in requests to delivering tokens,
            forwards included, while there was something to run.
        forward_seconds: time of the forwards alone: on CUDA the device's, else the host's.

    Example:
        >>> EngineStats().num_places
        0
    """

    running: Counter[str | None] = field(default_factory=Counter)
    waiting: Counter[str | None] = field(default_factory=Counter)
    finished: Counter[tuple[str | None, FinishReason]] = field(default_factory=Counter)
    prompt_tokens: Counter[str | None] = field(default_factory=Counter)
    answer_tokens: Counter[str | None] = field(default_factory=Counter)
    slots: tuple[tuple[int, str], ...] = ()
    max_loras: int = 0
    num_loads: int = 0
    load_seconds: float = 0.0
    num_places: int = 0
    num_evictions: int = 0
    place_seconds: float = 0.0
    num_steps: int = 0
    step_seconds: float = 0.0
    forward_seconds: float = 0.0

    def copy(self) -> EngineStats:
        """The same numbers, which do not change any more."""
        copied = EngineStats(**vars(self))
        for name, value in vars(self).items():
            if isinstance(value, Counter):
                setattr(copied, name, Counter(value))
        return copied


class Tally:
    """The numbers that grow. Methods may be called from several threads.

    Example:
        >>> tally = Tally()
        >>> with tally.changing() as stats:
        ...     stats.waiting["sql"] += 1
        >>> tally.read().waiting["sql"]
        1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = EngineStats()

    @contextmanager
    def changing(self) -> Iterator[EngineStats]:
        """The numbers, to be changed inside the `with` block."""
        with self._lock:
            yield self._stats

    def count_tokens(self, name: str | None, number: int) -> None:
        """Count tokens of an answer: what happens most often, so without a `with` block."""
        with self._lock:
            self._stats.answer_tokens[name] += number

    def count_step(self, seconds: float, num_forwards: int, forward_seconds: float) -> None:
        """Count a step of the engine's thread, and the forwards that have been done meanwhile."""
        with self._lock:
            self._stats.num_steps += num_forwards
            self._stats.step_seconds += seconds
            self._stats.forward_seconds += forward_seconds

    def read(self) -> EngineStats:
        """A copy."""
        with self._lock:
            return self._stats.copy()

    def forget(self, name: str) -> None:
        """Drop what is counted under a name that is gone, once no request has it any more."""
        with self._lock:
            stats = self._stats
            if stats.running[name] or stats.waiting[name]:
                return
            for counter in (
                stats.running,
                stats.waiting,
                stats.prompt_tokens,
                stats.answer_tokens,
            ):
                counter.pop(name, None)
            for key in [key for key in stats.finished if key[0] == name]:
                del stats.finished[key]
