"""How long forwards take, told without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import torch

__all__ = ["ForwardClock"]


class ForwardClock:
    """The number and the time of forwards: by events on a CUDA device, else by the host's clock.

    Args:
        device: where the model is.

    Example:
        >>> clock = ForwardClock(torch.device("cpu"))
        >>> clock.begin()
        >>> clock.end()
        >>> number, seconds = clock.read()
        >>> number, 0 <= seconds < 1, clock.read()
        (1, True, (0, 0.0))
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._now()
        self._ended = deque[tuple[_Moment | torch.cuda.Event, _Moment | torch.cuda.Event]]()

    def begin(self) -> None:
        """A forward begins. One that fails needs no `end`."""
        self._begin = self._now()

    def end(self) -> None:
        """All of the forward has been launched."""
        self._ended.append((self._begin, self._now()))

    def read(self) -> tuple[int, float]:
        """How many forwards have been done since the last call, and their seconds.

        One that the device is still at is left for the next call.
        """
        number, seconds = 0, 0.0
        while self._ended and self._ended[0][1].query():
            begin, end = self._ended.popleft()
            seconds += begin.elapsed_time(end) / 1e3  # type: ignore[arg-type]
            number += 1
        return number, seconds

    def clear(self) -> None:
        """Forget the forwards that were not read."""
        self._ended.clear()

    def _now(self) -> _Moment | torch.cuda.Event:
        if self._device.type != "cuda":
            return _Moment()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(frozen=True)
class _Moment:
    """What an event of CUDA is, on the host."""

    at: float = field(default_factory=time.perf_counter)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Moment) -> float:
        return 1e3 * (end.at - self.at)
