"""Signals around the server, which takes them for itself only while it runs."""

from __future__ import annotations

import os
import signal

import pytest
import uvicorn

from lorafold.server.run import run
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
