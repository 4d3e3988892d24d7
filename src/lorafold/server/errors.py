"""Errors over HTTP: OpenAI's shape, the right status, and nothing of the server's inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from lorafold.engine import EngineClosedError, QueueFullError, RequestError
from lorafold.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    PoolFullError,
)

__all__ = ["STATUS", "Refusal", "add_handlers", "refusal_of"]

_log = logging.getLogger(__name__)

STATUS: dict[type[Exception], tuple[int, str]] = {
    AdapterNotFoundError: (404, "model_not_found"),
    AdapterFormatError: (400, "adapter_format"),
    AdapterMismatchError: (400, "adapter_mismatch"),
    RequestError: (400, "invalid_value"),
    PoolFullError: (503, "pool_full"),
    QueueFullError: (503, "queue_full"),
    EngineClosedError: (503, "closed"),
}
"""The status and the code of every error that is the client's business; all others are 500."""

_TYPES = {401: "authentication_error", 500: "internal_error", 503: "overloaded_error"}


@dataclass(frozen=True)
class Refusal:
    """An answer that is not a success.

    Args:
        status: of HTTP.
        message: for people.
        code: for programs.
        param: the field of the request that is wrong.
        headers: of the answer.

    Example:
        >>> Refusal(404, "no such model", "model_not_found").body["error"]["type"]
        'invalid_request_error'
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """As a response."""
        return JSONResponse(self.body, self.status, dict(self.headers))


def refusal_of(error: BaseException) -> Refusal:
    """How an error is told to a client; what is not in `STATUS` is logged and told as "internal".

    Example:
        >>> refusal_of(RequestError("top_p must be above 0")).status
        400
    """
    for kind in type(error).__mro__:
        if kind in STATUS:
            status, code = STATUS[kind]
            retry_after = getattr(error, "retry_after_s", 1)
            headers = {"Retry-After": str(retry_after)} if status == 503 else {}
            return Refusal(status, str(error), code, headers=headers)
    _log.error("a request failed", exc_info=error)
    return Refusal(500, "the server failed on this request", "internal_error")


def add_handlers(app: FastAPI) -> None:
    """Have every error of an app answered in the right shape."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        message = str(first["msg"]).removeprefix("Value error, ")
        place = [str(part) for part in first["loc"] if part != "body"]
        if first["type"] == "json_invalid" or not place:
            return Refusal(400, message, "invalid_value").response()
        return Refusal(400, f"`{place[0]}`: {message}", "invalid_value", place[0]).response()

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return Refusal(error.status_code, str(error.detail), headers=error.headers or {}).response()

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return refusal_of(error).response()

    for kind in STATUS:
        app.add_exception_handler(kind, failed)
