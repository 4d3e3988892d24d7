"""A server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import openai

# oneDNN takes another way for a single row; PyTorch's own products do not (tests/engine/conftest),
# so that an answer among others can be compared with the same answer alone.
ALIKE = "import torch; torch._C._set_mkldnn_enabled(False); torch.set_num_threads(1)"
_LAUNCH = f"{ALIKE}; from lorafold.cli import main; main()"


class Process:
    """`lorafold serve` with some arguments; stopped by `stop` at the latest."""

    def __init__(
        self,
        arguments: Sequence[Any],
        *,
        api_key: str = "none",
        launch: Sequence[str] = (sys.executable, "-c", _LAUNCH),
    ) -> None:
        command = [*launch, "serve", *map(str, arguments), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("LORAFOLD_API_KEY", None)
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.api_key = api_key
        self.lines: list[str] = []
        self._is_up = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                self.url = found[1]
                self._is_up.set()
        self._is_up.set()

    def wait_until_up(self, timeout_s: float = 120) -> Process:
        assert self._is_up.wait(timeout_s), "".join(self.lines)
        assert self.url, "".join(self.lines)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def openai(self, **settings: Any) -> openai.OpenAI:
        defaults = {"api_key": self.api_key, "max_retries": 0, "timeout": 60}
        return openai.OpenAI(base_url=f"{self.url}/v1", **(defaults | settings))

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def status(self) -> dict[str, Any]:
        with self.http() as client:
            return dict(client.get("/status").raise_for_status().json())

    def wait_for(self, timeout_s: float = 20, **expected: int) -> dict[str, Any]:
        """Wait until the sums over all models are as expected."""
        end = time.monotonic() + timeout_s
        while True:
            status = self.status()
            models = [status["base"], *status["adapters"]]
            sums = {name: sum(model[name] for model in models) for name in expected}
            if sums == expected:
                return status
            assert time.monotonic() < end, f"{sums}, not {expected}"
            time.sleep(0.02)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 30) -> int:
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()
