"""Signals around the server, which takes them for itself only while it runs."""

from __future__ import annotations

import os
import signal
import socket

import pytest
import uvicorn

from lorafold.errors import BackendError
from lorafold.server.run import check_address, run
from lorafold.server.service import Service


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_early_stops_the_server_and_is_then_left_to_others(
    service: Service, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stops = []

    def early(server: uvicorn.Server) -> None:
        os.kill(os.getpid(), number)
        stops.append(server.should_exit)

    monkeypatch.setattr(uvicorn.Server, "run", early)
    before = signal.getsignal(number)
    try:
        run(service, host="127.0.0.1", port=0, drain_seconds=0)
        assert stops == [True]
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, before)
    assert not service.engine.is_open


def test_an_address_that_is_taken_is_refused_and_a_free_one_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(BackendError, match=f"cannot listen on .*, port {port}: .*in use"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_cannot_be_had_is_refused(host: str) -> None:
    with pytest.raises(BackendError, match=f"cannot listen on {host}, port 0: "):
        check_address(host, 0)
