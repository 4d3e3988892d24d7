"""When bytes may be written into a slot: after all that still reads it, beside all that does not.

On CUDA what goes into a slot is copied on a stream of its own, which waits for the last users of
that slot only; kernels of other slots run on meanwhile. Nothing waits for the whole device.
Elsewhere everything happens at once, in the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lorafold.errors import RouteError

__all__ = ["Transfer"]


class Transfer:
    """Orders the writes into the slots of one pool. Not thread-safe: the pool holds a lock.

    It is made in the stream that has made the slots, so that no write comes before that.

    Args:
        device: where the slots are.
        max_loras: number of slots.

    Example:
        >>> transfer = Transfer(torch.device("cpu"), max_loras=2)
        >>> transfer.note_use(0)
        >>> with transfer.writing(0):
        ...     pass  # copies into slot 0
        >>> transfer.finish(), transfer.is_pinned
        (None, False)
    """

    def __init__(self, device: torch.device, max_loras: int) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Per slot and stream: what may still be reading the slot, or emptying it.
        self._pending: list[dict[int, torch.cuda.Event]] = [{} for _ in range(max_loras)]
        for slot in range(max_loras):
            self.note_use(slot)

    @property
    def is_pinned(self) -> bool:
        """Whether what is copied should be in page-locked memory."""
        return self._stream is not None

    def check(self) -> None:
        """Refuse what would become part of a CUDA graph.

        Raises:
            RouteError: if the current stream is being captured.
        """
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            raise RouteError(
                "adapters cannot be placed, evicted or released while a CUDA graph is captured; "
                "hint: do it before or after"
            )

    def note_use(self, slot: int) -> None:
        """Let later writes into a slot wait for all that is in the current stream now."""
        if self._stream is not None:
            here = torch.cuda.current_stream(self._device)
            events = self._pending[slot]
            if here.cuda_stream not in events:
                events[here.cuda_stream] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            events[here.cuda_stream].record(here)

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        """Inside, the current stream is the one for copies, and comes after all uses of the slot.

        It also comes after what this thread has enqueued so far.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._follow(slot, self._stream)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self.note_use(slot)

    @contextmanager
    def emptying(self, slot: int) -> Iterator[None]:
        """Inside, the current stream is the thread's own, and comes after all uses of the slot.

        Nobody waits for it but the next write into the slot.
        """
        if self._stream is not None:
            self._follow(slot, torch.cuda.current_stream(self._device))
        yield
        self.note_use(slot)

    def finish(self) -> None:
        """Wait, in this thread alone, until the copies are in the slot."""
        if self._stream is not None:
            # A blocking event lets the processor go to those who serve.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            event.synchronize()

    def _follow(self, slot: int, stream: torch.cuda.Stream) -> None:
        for event in self._pending[slot].values():
            stream.wait_event(event)
        self._pending[slot].clear()
