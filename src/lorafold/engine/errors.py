"""What can go wrong between a request and its answer; part of the tree of `lorafold.errors`."""

from __future__ import annotations

from lorafold.errors import LoraError

__all__ = ["EngineClosedError", "QueueFullError", "RequestError"]


class RequestError(LoraError, ValueError):
    """A request cannot be answered as it is: its prompt or its settings are out of range.

    Example:
        >>> raise RequestError("temperature must be 0 .. 2; given: -1")
        Traceback (most recent call last):
        lorafold.engine.errors.RequestError: temperature must be 0 .. 2; given: -1
    """


class QueueFullError(LoraError):
    """Too many requests wait already.

    Attributes:
        retry_after_s: when it is worth another try, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineClosedError(LoraError, RuntimeError):
    """The engine takes no more requests: it is closed, or its thread has died."""
