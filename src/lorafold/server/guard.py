"""What every request passes before it is read: the API key, and the size of its body."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lorafold.server.errors import Refusal

__all__ = ["BodyLimit", "KeyCheck"]


class KeyCheck:
    """Refuses requests without the API key.

    Args:
        app: what comes after.
        api_key: the key, sent as `Authorization: Bearer KEY`.
        open_paths: that need no key.

    Example: `lorafold.server.app` uses it.
    """

    def __init__(self, app: ASGIApp, *, api_key: str, open_paths: Collection[str]) -> None:
        self._app = app
        self._expected = api_key.encode()
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer with 401."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            # Both sides are bytes: text that is not ASCII cannot be compared in constant time.
            is_same = hmac.compare_digest(given.strip().encode("latin-1"), self._expected)
            if scheme.lower() != "bearer" or not is_same:
                refusal = Refusal(
                    401,
                    "the API key is wrong or missing",
                    "invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Reads the body before anything else does, and refuses one that is too large.

    Args:
        app: what comes after.
        max_bytes: of a body.

    Example: `lorafold.server.app` uses it.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer with 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, is_whole = bytearray(), False
        length = Headers(scope=scope).get("content-length", "")
        is_too_large = length.isdigit() and int(length) > self._max_bytes
        while not (is_whole or is_too_large):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            is_whole = not message.get("more_body", False)
            is_too_large = len(body) > self._max_bytes
        if is_too_large:
            text = f"a body may have {self._max_bytes} bytes"
            await Refusal(413, text, "request_too_large").response()(scope, receive, send)
            return
        is_given = False

        async def replay() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": bytes(body), "more_body": False}

        await self._app(scope, replay, send)
