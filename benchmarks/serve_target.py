"""The server that the serving benchmark asks, and its clocks, which say what it spends itself."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from tests.server.process import Process

from benchmarks.serve_models import MODEL, SHAPES, adapter_folders, write_apart, write_tiny

__all__ = ["Clock", "Target", "metrics_clock", "own_server"]

Clock = Callable[[], float | None]
"""Milliseconds per step that the server spent outside forwards, since the last call."""


@dataclass(frozen=True)
class Target:
    """A server to be asked.

    Args:
        url: its address.
        about: what the record says of it.
    """

    url: str
    about: dict[str, Any] = field(default_factory=dict)


@contextmanager
def own_server(options: argparse.Namespace) -> Iterator[Target]:
    """A server over a model with random weights."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        start = time.perf_counter()
        folder = _written(options, scratch)
        written = time.perf_counter()
        server = _start(options, folder)
        try:
            server.wait_until_up(timeout_s=400)
            up = time.perf_counter()
            about = {"write_s": round(written - start, 1), "start_s": round(up - written, 1)}
            print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
            yield Target(server.url, about)
        except Exception:
            print("".join(server.lines[-40:]), file=sys.stderr)  # why, if it is the server's doing
            raise
        finally:
            server.stop()


def _written(options: argparse.Namespace, scratch: Path) -> Path:
    """The folder of model and adapters."""
    sizes = {"num_adapters": options.adapters, "rank": options.rank}
    if options.model_shapes == "tiny":
        write_tiny(scratch / "tiny", **sizes)
        return scratch / "tiny"
    name = f"{options.model_shapes}-{options.adapters}-rank-{options.rank}"
    folder = (options.work or scratch) / name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_apart(folder, SHAPES[options.model_shapes], device=device, **sizes)
    return folder


def _start(options: argparse.Namespace, folder: Path) -> Process:
    arguments: list[Any] = ["--model", folder / MODEL, "--served-model-name", "base"]
    arguments += ["--max-loras", options.slots, "--max-running", max(32, options.clients)]
    for path in adapter_folders(folder):
        arguments += ["--adapter", f"{path.name}={path}"]
    if options.model_shapes == "tiny":
        return Process(arguments)
    arguments += ["--max-length", 4096, "--cache-tokens", 65536]
    return Process(arguments, launch=(sys.executable, "-m", "lorafold"))


def metrics_clock(url: str, api_key: str) -> Clock | None:
    """The clocks of the server itself, from call to call; None where `/metrics` has none."""

    def read() -> tuple[float, ...] | None:
        headers = {"Authorization": f"Bearer {api_key}"}
        text = httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text
        names = ("steps", "step_seconds", "forward_seconds")
        found = [re.search(rf"^lorafold_{name}_total (\S+)$", text, re.M) for name in names]
        values = tuple(float(each[1]) for each in found if each is not None)
        return values if len(values) == len(names) else None

    last = read()

    def since_last() -> float | None:
        nonlocal last
        before, last = last, read()
        if before is None or last is None:
            return None
        steps, whole, forwards = (now - then for now, then in zip(last, before, strict=True))
        return 1e3 * (whole - forwards) / steps if steps else None

    return None if last is None else since_last
