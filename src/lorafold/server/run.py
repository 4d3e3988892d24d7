"""Run the HTTP server in this process until it is told to stop."""

from __future__ import annotations

import signal

import uvicorn

from lorafold.server.app import create_app
from lorafold.server.service import Service

__all__ = ["run"]


def run(service: Service, *, host: str, port: int, drain_seconds: int) -> None:
    """Serve until SIGTERM or SIGINT; then take no more requests and finish those that run.

    Args:
        service: what is served; its engine is closed at the end.
        host: address to listen on.
        port: 0 for a free one.
        drain_seconds: after this time, what still runs is cancelled.
    """
    # The server raises the signal again when it has stopped; that is no reason to die of it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    config = uvicorn.Config(
        create_app(service),
        host=host,
        port=port,
        access_log=False,
        log_level="info",
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
    )
    try:
        uvicorn.Server(config).run()
    finally:
        service.engine.close(timeout_s=0)
