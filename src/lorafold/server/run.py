"""Run the HTTP server in this process until it is told to stop."""

from __future__ import annotations

import signal
import socket

import uvicorn

from lorafold.errors import BackendError
from lorafold.server.app import create_app
from lorafold.server.service import Service

__all__ = ["check_address", "run"]

_KEEP_ALIVE_S = 75
"""Idle connections are kept for so long: longer than clients (OpenAI's library: 5 s) and proxies
(60 s, as a rule) use one again, or the next request would meet the close now and then, and fail.
"""


def check_address(host: str, port: int) -> None:
    """Whether a server could listen there now: that should be known before the model is loaded.

    Args:
        host: name or address to listen on.
        port: 0 for a free one.

    Raises:
        BackendError: if there is no such address, or it is taken.

    Example:
        >>> check_address("127.0.0.1", 0)
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server will: ports of connections that have just ended are free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, OverflowError) as error:
        raise BackendError(f"cannot listen on {host}, port {port}: {error}") from error


def run(service: Service, *, host: str, port: int, drain_seconds: int) -> None:
    """Serve until SIGTERM or SIGINT; then take no more requests and finish those that run.

    Args:
        service: what is served; its engine is closed at the end.
        host: address to listen on.
        port: 0 for a free one.
        drain_seconds: after this time, what still runs is cancelled.
    """
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        access_log=False,
        log_level="info",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=drain_seconds,
    )
    server = uvicorn.Server(config)

    def stop(*_: object) -> None:
        """For a signal that comes before the server listens to it, or is raised again by it."""
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run()
    finally:
        service.engine.close(timeout_s=0)
        for number, handler in before.items():
            signal.signal(number, handler)
