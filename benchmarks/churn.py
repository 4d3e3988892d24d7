"""Adapters come and go while a captured decode step serves them: every sampled row's bits.

    python -m benchmarks.churn [--steps 100000] [--adapters 500] [--slots 16] [--json [FILE]]

One thread serves: a batch of rows, each with a request that holds its adapter for some steps, or is
base; the step is a CUDA graph, captured once, before any adapter is placed. Another thread loads:
from PEFT folders through a store that has room for half of them, into slots that it takes from
whoever is idle; it gives names new weights, evicts and pins meanwhile. One step in 50 is checked,
all of its rows, against `apply_lora_delta` with tensors of the version that each row's request was
admitted with, which were never in a pool; a few rows are also compared with the CPU reference. As a
control, rows are compared with another version, and must differ.

On a GPU it also measures how fast `Pool.place` copies an adapter of rank 64 for all linear layers
of Llama-3-8B, against a plain copy of as many bytes from page-locked memory.

The exit code is 1 if a row was wrong, a control did not differ, an address moved, anything was
compiled while adapters came and went, a slot was not empty at the end, or so little happened that
nothing could have been seen. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.churn_adapters import Versions
from benchmarks.churn_load import Loader
from benchmarks.churn_step import Check, Step, shapes
from benchmarks.placing import measure_placing
from benchmarks.record import add_json_option, describe, save
from lorafold.errors import AdapterNotFoundError
from lorafold.ops.compiled import _started
from lorafold.pool import Pool
from lorafold.route import tables_of
from lorafold.store import AdapterStore

__all__ = ["Settings", "main", "run"]


@dataclass(frozen=True)
class Settings:
    """What to run.

    Args:
        steps: decode steps while adapters come and go.
        adapters: names.
        slots: slots of the pool.
        rows: rows of the batch.
        hidden: features of the model.
        ranks: dealt over the adapters; the largest is the pool's.
        longest: steps of a request, at most.
        check_every: steps from one checked step to the next.
        references: rows to compare with the CPU reference.
        max_s: end after so many seconds, though steps are left.
        device: where it runs.
    """

    steps: int
    adapters: int = 500
    slots: int = 16
    rows: int = 32
    hidden: int = 1024
    ranks: tuple[int, ...] = (64, 16, 8, 32, 16, 5)
    longest: int = 100
    check_every: int = 50
    references: int = 300
    max_s: float = 3600.0
    device: str = "cuda"


@dataclass(frozen=True)
class Request:
    """What a row serves until a step: a version of an adapter in a slot, or the base."""

    until: int
    slot: int = -1
    key: tuple[int, int] | None = None


class Server:
    """The rows, and what they serve."""

    def __init__(self, settings: Settings, loader: Loader, step: Step) -> None:
        self._loader, self._pool, self._step = loader, loader.pool, step
        self._adapters, self._longest = settings.adapters, settings.longest
        self._random = random.Random(2)
        self._rows = [Request(until=0)] * settings.rows
        self._now = 0

    def advance(self) -> None:
        """One step; requests that have ended make room for others before it."""
        for row, request in enumerate(self._rows):
            if request.until == self._now:
                if request.key is not None:
                    self._pool.release(request.slot)
                self._rows[row] = self._admit()
        self._step([request.slot for request in self._rows])
        self._now += 1

    @property
    def keys(self) -> list[tuple[int, int] | None]:
        return [request.key for request in self._rows]

    def end(self) -> None:
        for request in self._rows:
            if request.key is not None:
                self._pool.release(request.slot)
        self._rows = [Request(until=self._now)] * len(self._rows)

    def _admit(self) -> Request:
        """What has just been placed, or what is there, or the base while others are waited for."""
        until = self._now + self._random.randint(1, self._longest)
        # A few adapters get most of the requests.
        self._loader.ask(int(self._adapters * self._random.random() ** 2))
        placed = self._loader.take()
        if placed is not None:
            return Request(until, *placed)
        names = self._pool.names()
        if not names or self._random.random() < 0.4:
            return Request(until)
        try:
            slot = self._pool.acquire(self._random.choice(names))
        except AdapterNotFoundError:  # evicted meanwhile
            return Request(until)
        return Request(until, slot, self._loader.key_of(slot))


def run(settings: Settings, folder: Path) -> dict[str, Any]:
    """Serve and load; the counts and times.

    Args:
        settings: what to run.
        folder: where the adapters are written.
    """
    device = torch.device(settings.device)
    targets, max_rank = shapes(settings.hidden), max(settings.ranks)
    versions = Versions(targets, settings.ranks, max_rank, device)
    pool = Pool(targets, max_loras=settings.slots, max_rank=max_rank, device=device)
    budget = max(2, settings.adapters // 2) * pool.image_bytes
    store = AdapterStore(pool, budget_bytes=budget, pinned=True)
    loader = Loader(pool, store, versions, settings.adapters, folder)
    step = Step(pool, settings.rows, settings.hidden)
    check = Check(step, versions, settings.references)
    server = Server(settings, loader, step)
    stream = torch.cuda.Stream(device) if step.is_cuda else None
    addresses = _addresses(pool)
    if stream is not None:
        torch.cuda.synchronize()
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        if stream is not None:
            step.capture(stream)
        for key in ((0, 0), (0, 1)):  # compiles what checks
            versions.pair(*key, next(iter(targets)))
            check([key] + [None] * (settings.rows - 1))
        check, num_compiled = Check(step, versions, settings.references), len(_started)
        with loader.running():
            num_steps, seconds = _serve(server, check, settings, stream)
        alone, alone_s = _serve(server, check, replace(settings, steps=num_steps // 10), stream)
        server.end()
        loader.end()
        for name in pool.names():
            pool.evict(name)
        if stream is not None:
            torch.cuda.synchronize()
        is_empty = not any(bool(table.any()) for table in pool._tables.values())
        is_empty = is_empty and not bool(pool._memory.any())
    return {
        "steps": num_steps,
        "adapters": settings.adapters,
        "slots": settings.slots,
        "rows": check.num_rows,
        "adapter_rows": check.num_adapter_rows,
        "wrong_rows": check.num_wrong,
        "reference_rows": check.num_references,
        "controls": check.num_controls,
        "equal_controls": check.num_equal_controls,
        "moved_addresses": sum(a != b for a, b in zip(addresses, _addresses(pool), strict=True)),
        "compiled_meanwhile": len(_started) - num_compiled,
        "is_empty_at_the_end": is_empty,
        **loader.counts(),
        "seconds": round(seconds, 2),
        "steps_per_s": round(num_steps / seconds),
        "steps_per_s_alone": round(alone / alone_s),
    }


def _serve(
    server: Server, check: Check, settings: Settings, stream: torch.cuda.Stream | None
) -> tuple[int, float]:
    """Run the steps, as far as there is time; how many, and the seconds that they took."""
    begin, number = time.perf_counter(), 0
    while number < settings.steps and time.perf_counter() - begin < settings.max_s:
        server.advance()
        number += 1
        if number % settings.check_every == 0:
            check(server.keys)
    if stream is not None:
        stream.synchronize()
    return number, time.perf_counter() - begin


def _addresses(pool: Pool) -> list[int]:
    routes = [pool.route(target) for target in pool.targets]
    return [pool._memory.data_ptr()] + [
        table.data_ptr() for route in routes for table in tables_of(route)
    ]


def is_right(counts: dict[str, Any]) -> bool:
    """Whether nothing went wrong, and the checks could have seen it."""
    zeros = ("wrong_rows", "equal_controls", "moved_addresses", "compiled_meanwhile")
    some = ("adapter_rows", "reference_rows", "controls", "placed", "reloaded", "read_again")
    return (
        not any(counts[name] for name in zeros)
        and all(counts[name] for name in some)
        and bool(counts["is_empty_at_the_end"])
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--steps", type=int, default=100_000 if gpu else 500)
    parser.add_argument("--adapters", type=int, default=500 if gpu else 24)
    parser.add_argument("--slots", type=int, default=16 if gpu else 4)
    parser.add_argument("--rows", type=int, default=32 if gpu else 6)
    parser.add_argument("--longest", type=int, default=100 if gpu else 12, help="steps")
    parser.add_argument("--hidden", type=int, default=1024 if gpu else 64)
    parser.add_argument("--references", type=int, default=300)
    parser.add_argument("--max-s", type=float, default=3600, help="end after so many seconds")
    parser.add_argument("--no-placing", action="store_true", help="do not measure bandwidth")
    add_json_option(parser, "churn")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    settings = Settings(
        steps=args.steps,
        adapters=args.adapters,
        slots=args.slots,
        rows=args.rows,
        longest=args.longest,
        max_s=args.max_s,
        hidden=args.hidden,
        references=args.references,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    placing = {}
    if settings.device == "cuda" and not args.no_placing:
        placing = measure_placing()
        print(*(f"{k} {v}" for k, v in placing.items()), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        counts = run(settings, Path(folder))
    print(*(f"{k} {v}" for k, v in counts.items()), sep="\n")
    record = describe("churn", [{**counts, **placing}])
    save(record, args.json)
    print(json.dumps(record))
    if not is_right(counts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
