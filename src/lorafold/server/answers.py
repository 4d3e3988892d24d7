"""Requests that are in the engine, seen from an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from starlette.types import Receive

from lorafold.engine import Answer, Delta, Engine, EngineClosedError, Request, Ticket
from lorafold.errors import AdapterError, BackendError
from lorafold.server.mailbox import mailbox_of

__all__ = ["Answers", "running_answers"]


class Answers:
    """The answers of some requests, as they come.

    Args:
        engine: runs them.
        requests: one answer each.

    Raises:
        RequestError, AdapterNotFoundError, QueueFullError, EngineClosedError: as `Engine.submit`;
            none of the requests runs then.

    Example: `lorafold.server.generation` uses it.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self._mailbox = mailbox_of(asyncio.get_running_loop())
        self._deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._num_open = len(requests)
        try:
            for index, request in enumerate(requests):
                self._tickets.append(engine.submit(request, self._listener(index)))
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End what has not ended."""
        for ticket in self._tickets:
            ticket.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """(index of the request, what is added to its answer), until all have ended.

        Raises:
            BackendError: if the files of an adapter, which could be loaded, can no longer be read.
            EngineClosedError: if one was cancelled by the engine.
            LoraError: if one cannot be answered for another reason.
        """
        while self._num_open:
            index, delta = await self._deltas.get()
            self._num_open -= delta.finish_reason is not None
            if isinstance(delta.error, AdapterError):
                # No fault of this client, whom the server's paths in the message do not concern.
                raise BackendError("an adapter can no longer be read") from delta.error
            if delta.error is not None:
                raise delta.error
            if delta.finish_reason == "cancelled":
                raise EngineClosedError("the server is shutting down")
            yield index, delta

    async def whole(self) -> list[Answer]:
        """All answers, when the last has ended.

        Raises:
            LoraError: as iterating.
        """
        deltas: list[list[Delta]] = [[] for _ in self._tickets]
        async for index, delta in self:
            deltas[index].append(delta)
        return [Answer.of(each) for each in deltas]

    def _listener(self, index: int) -> Callable[[Delta], None]:
        """Takes deltas from the engine's thread to the event loop's."""

        def deliver(delta: Delta) -> None:
            self._mailbox.post(self._deltas.put_nowait, (index, delta))

        return deliver


@asynccontextmanager
async def running_answers(answers: Answers, receive: Receive) -> AsyncIterator[Answers]:
    """Cancel the answers when the client goes away, and whatever is left of them at the end.

    Args:
        answers: of the client's request.
        receive: of ASGI, the body being read.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answers.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield answers
    finally:
        answers.cancel()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
