"""The engine's thread: lets requests in, has them advance, and takes back what they hold."""

from __future__ import annotations

import logging
import threading
import time

from lorafold.engine.admission import FairQueue
from lorafold.engine.answering import Answering
from lorafold.engine.batching import Batches
from lorafold.engine.errors import EngineClosedError
from lorafold.engine.placing import SlotHolder
from lorafold.engine.shelf import Shelf
from lorafold.engine.tally import Tally
from lorafold.pool import Pool

__all__ = ["Loop"]

_log = logging.getLogger(__name__)

_PAUSE_S = 0.1  # others may let go of slots without a word


class Loop:
    """Runs requests in a thread of its own. `put`, `wake` and `close` are for any thread.

    Args:
        batches: the way to batch.
        pool: where adapters are placed.
        shelf: where they come from; told when a request needs its adapter no more.
        tally: told what happens.
        max_running: requests that run at the same time.

    Example: `lorafold.engine.Engine` uses it.
    """

    def __init__(
        self, batches: Batches, pool: Pool, shelf: Shelf, tally: Tally, *, max_running: int
    ) -> None:
        self._batches = batches
        self._shelf = shelf
        self._slots = SlotHolder(pool, shelf, tally, self.wake)
        self._tally = tally
        self._max_running = max_running
        # Two full batches may overtake a request whose adapter finds no slot.
        self._queue = FairQueue[Answering](patience=2 * max_running)
        self._running: list[Answering] = []
        self._changed = threading.Condition()
        self._inbox: list[Answering] = []
        self._is_woken = self._is_closing = self._is_aborting = False
        self._thread = threading.Thread(target=self._run, name="lorafold-engine", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._is_closing

    def put(self, answering: Answering) -> None:
        """Accept a request.

        Raises:
            EngineClosedError: if the loop is closed.
        """
        with self._changed:
            if not self.is_open:
                raise EngineClosedError("the engine is closed and takes no more requests")
            answering.at_end = self._settle
            self._inbox.append(answering)
            self._changed.notify()

    def wake(self) -> None:
        """Have the loop look at what was cancelled."""
        with self._changed:
            self._is_woken = True
            self._changed.notify()

    def close(self, timeout_s: float | None) -> None:
        """Finish what was accepted, then stop; after `timeout_s`, cancel what is left."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self._is_aborting = True
            for answering in self._running:
                answering.is_cancelled = True
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._has_work():
                self._work()
        finally:
            # After a fault in the bookkeeping itself nothing can be given back, but nobody must
            # wait for ever.
            with self._changed:
                self._is_closing = True
            self._take_inbox()
            for answering in [*self._running, *self._queue.remove(lambda _: True)]:
                answering.at_end = lambda _: None
                answering.finish("error", EngineClosedError("the engine has stopped"))
            self._slots.close()

    def _work(self) -> None:
        """Step until nothing is left to do, or a step fails."""
        try:
            with self._batches.session():
                while self._step():
                    pass
        except Exception as error:
            _log.exception("a step of the engine failed; its requests fail")
            self._fail(error)

    def _has_work(self) -> bool:
        """Wait until there is something to do; False when the loop is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._is_busy() or self._is_closing)
            return bool(self._inbox) or self._is_busy()

    def _step(self) -> bool:
        """Let in, advance, end what was cancelled. False when nothing is left to do."""
        begin = time.perf_counter()
        with self._changed:
            is_woken, self._is_woken = self._is_woken, False
            is_aborting = self._is_aborting
        self._take_inbox()
        if is_woken or is_aborting:
            for answering in self._queue.remove(lambda a: is_aborting or a.is_cancelled):
                answering.finish("cancelled")
        self._end_cancelled()
        self._queue.admit(self._let_in)
        self._slots.forget_unwanted(self._queue)
        # A batch that lets nobody in later waits for the adapters that are on their way.
        if self._running and (self._batches.is_continuous or not self._slots.is_placing):
            self._batches.advance(tuple(self._running))
            self._end_cancelled()
            self._tally.count_step(time.perf_counter() - begin, *self._batches.timed())
        elif self._is_busy():
            self._pause()
        return self._is_busy()

    def _take_inbox(self) -> None:
        """Have those wait in turn that came since the last call."""
        with self._changed:
            inbox, self._inbox = self._inbox, []
        for answering in inbox:
            self._queue.add(answering.loaded, answering)

    def _is_busy(self) -> bool:
        return bool(self._running or len(self._queue) or self._slots.is_placing)

    def _pause(self) -> None:
        """Wait until something has changed: nothing can advance."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._inbox or self._is_woken or self._is_aborting, timeout=_PAUSE_S
            )

    def _let_in(self, answering: Answering) -> bool:
        """Give a waiting request all it needs to run, or return False and leave all as it was."""
        if len(self._running) >= self._max_running or not self._batches.reserve(answering):
            return False
        try:
            slot = -1 if answering.loaded is None else self._slots.hold(answering.loaded)
        except Exception as error:
            self._batches.release(answering)
            answering.finish("error", error)
            return True
        if slot is None:
            self._batches.release(answering)
            return False
        answering.slot = slot
        with self._changed:
            self._running.append(answering)
        with self._tally.changing() as stats:
            stats.waiting[answering.request.adapter] -= 1
            stats.running[answering.request.adapter] += 1
        return True

    def _end_cancelled(self) -> None:
        for answering in tuple(self._running):
            if answering.is_cancelled:
                answering.finish("cancelled")

    def _fail(self, error: Exception) -> None:
        """End what runs with an error; if nothing runs, what waits: it would fail alike."""
        self._take_inbox()  # where no step has begun, nobody else did
        for answering in tuple(self._running) or self._queue.remove(lambda _: True):
            answering.finish("error", error)

    def _settle(self, answering: Answering) -> None:
        """Take back what a request holds at its end, and count it."""
        is_running, loaded = answering in self._running, answering.loaded
        if is_running:
            with self._changed:
                self._running.remove(answering)
            self._batches.release(answering)
            if loaded is not None:
                self._slots.let_go(loaded, answering.slot)
        if loaded is not None:
            self._shelf.give_back(loaded)
        name, reason = answering.request.adapter, answering.finish_reason
        assert reason is not None
        with self._tally.changing() as stats:
            (stats.running if is_running else stats.waiting)[name] -= 1
            stats.finished[name, reason] += 1
            if answering.num_cached:
                stats.prompt_tokens[name] += len(answering.request.prompt)
