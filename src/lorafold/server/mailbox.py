"""From the engine's thread to the event loop's: one wake-up for all that is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, ref

__all__ = ["Mailbox", "mailbox_of"]


class Mailbox:
    """Has calls made in an event loop, in the order of posting; waking a loop costs more than they.

    Args:
        loop: where the calls are made.

    Example:
        >>> async def main() -> list[int]:
        ...     seen = []
        ...     mailbox = Mailbox(asyncio.get_running_loop())
        ...     await asyncio.to_thread(lambda: [mailbox.post(seen.append, n) for n in range(3)])
        ...     await asyncio.sleep(0)
        ...     return seen
        >>> asyncio.run(main())
        [0, 1, 2]
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # `_mailboxes` forgets loops that nobody else keeps
        self._lock = Lock()
        self._posted: list[tuple[Callable[[Any], object], Any]] = []

    def post(self, call: Callable[[Any], object], value: object) -> None:
        """Have `call(value)` made in the loop; for any thread.

        Raises:
            RuntimeError: if the loop is closed or gone.
        """
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop is closed")
        with self._lock:
            self._posted.append((call, value))
            is_first = len(self._posted) == 1
        if is_first:
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        for call, value in posted:
            call(value)


_mailboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = WeakKeyDictionary()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """The mailbox that everybody in a loop shares; for the loop's own thread.

    Args:
        loop: that runs.
    """
    return _mailboxes.setdefault(loop, Mailbox(loop))
