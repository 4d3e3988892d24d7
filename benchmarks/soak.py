"""Many requests over many adapters and few slots, with everything that disturbs them.

    python -m benchmarks.soak [--requests 2000] [--adapters 40] [--slots 8] [--clients 24]

A server in a process of its own serves a tiny model. First every distinct request is answered
alone. Then all of them come again from many clients at once: whole, streamed, or left half-way,
while an operator loads adapters under new names, replaces loaded ones in place and unloads them.
Every answer must be the one that was given alone, nothing may be held at the end, and the server's
memory must not have grown since it was warm. That answers can be equal at all is because each row
of this base is computed by itself, which PyTorch's own CPU products do (docs/server.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from tests.server.process import Process
from tests.tiny_models import make_model, write_adapter
from tests.tiny_text import LETTERS, save_model

__all__ = ["Soak", "main", "run_soak"]

_TARGETS = (["q_proj", "v_proj"], ["o_proj", "up_proj"], ["k_proj", "gate_proj", "down_proj"])
_KINDS = ("whole", "whole", "whole", "stream", "stream", "leave")
_MEMORY_SLACK = 16 << 20  # bytes, beside 5 %: what an allocator keeps


@dataclass(frozen=True)
class Ask:
    """One request: an adapter (None is base), a prompt, and how it is answered."""

    adapter: int | None
    prompt: str
    max_tokens: int
    seed: int | None

    def body(self, model: str) -> dict[str, Any]:
        drawn = {"temperature": 0} if self.seed is None else {"temperature": 1.2, "seed": self.seed}
        fixed = {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens}
        return fixed | drawn | {"extra_body": {"ignore_eos": True}}


@dataclass
class Soak:
    """What happened.

    Args:
        outcomes: how often an answer was equal, left in the middle, or refused as unloaded.
        wrong: answers that were not the ones given alone.
        memory_bytes: of the server, at eight times during the load.
        operations: what the operator did.
        answers_per_s: during the load.
        is_empty: whether nothing was held at the end.
        num_voices: different answers of base and adapters to one prompt, out of `num_models`: were
            they alike, mixing them up would not be seen.
        num_models: base and adapters.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    answers_per_s: float = 0.0
    is_empty: bool = False
    num_voices: int = 0
    num_models: int = 1

    @property
    def is_memory_flat(self) -> bool:
        """Whether the last quarter needs no more than the second, but for what allocators keep."""
        if not self.memory_bytes:
            return True
        quarter = len(self.memory_bytes) // 4
        warm = max(self.memory_bytes[quarter : 2 * quarter])
        return max(self.memory_bytes[-quarter:]) <= warm * 1.05 + _MEMORY_SLACK

    @property
    def is_good(self) -> bool:
        is_telling = self.num_voices > 0.9 * self.num_models
        return not self.wrong and self.is_empty and self.is_memory_flat and is_telling


def run_soak(*, requests: int, adapters: int, slots: int, clients: int, seed: int = 0) -> Soak:
    """Make a model and adapters, start a server, and load it."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        model = make_model()
        for at in range(adapters):
            write_adapter(model, folder / f"a{at}", _TARGETS[at % 3], rank=1 + at % 8, seed=at)
        loaded = [x for at in range(adapters) for x in ("--adapter", f"a{at}={folder}/a{at}")]
        server = Process(
            [
                *("--model", folder / "model", "--served-model-name", "tiny", *loaded),
                *("--max-loras", slots, "--max-running", 2 * slots),
                *("--allow-runtime-loading", "--adapter-root", folder),
            ]
        )
        try:
            server.wait_until_up()
            asks = _asks(chance, max(8, requests // 10), adapters)
            return asyncio.run(_Load(server, asks, chance, requests, clients).run())
        finally:
            server.stop()


def _asks(chance: random.Random, count: int, adapters: int) -> list[Ask]:
    return [
        Ask(
            adapter=None if chance.random() < 0.1 else chance.randrange(adapters),
            prompt="".join(chance.choices(LETTERS, k=chance.choice((3, 8, 20, 60)))),
            max_tokens=chance.randint(2, 16),
            seed=None if chance.random() < 0.8 else chance.randrange(1000),
        )
        for _ in range(count)
    ]


class _Load:
    """The clients and the operator of one run."""

    def __init__(
        self,
        server: Process,
        asks: Sequence[Ask],
        chance: random.Random,
        requests: int,
        clients: int,
    ) -> None:
        self.server = server
        self.asks = asks
        self.chance = chance
        self.requests = requests
        self.clients = clients
        self.soak = Soak()
        self.alone: dict[Ask, str] = {}
        self.guests: dict[str, int] = {}  # name -> adapter, of what the operator has loaded
        self.left = requests

    async def run(self) -> Soak:
        async with openai.AsyncOpenAI(
            base_url=f"{self.server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            for ask in self.asks:
                self.alone[ask] = await self._whole(client, ask.body(_name(ask)))
            self.soak.num_voices, self.soak.num_models = await self._voices(client)
            start = time.perf_counter()
            operator = asyncio.create_task(self._operate())
            await asyncio.gather(*(self._client(client) for _ in range(self.clients)))
            self.soak.answers_per_s = self.requests / (time.perf_counter() - start)
            operator.cancel()
            await asyncio.gather(operator, return_exceptions=True)
        await self._empty()
        return self.soak

    async def _voices(self, client: openai.AsyncOpenAI) -> tuple[int, int]:
        """Different answers to one prompt, and the models that were asked."""
        ask = Ask(None, "Who are you?", max_tokens=12, seed=None)
        names = [model.id async for model in client.models.list()]
        answers = {await self._whole(client, ask.body(name)) for name in names}
        return len(answers), len(names)

    async def _client(self, client: openai.AsyncOpenAI) -> None:
        while self.left > 0:
            self.left -= 1
            if self.left % max(1, self.requests // 8) == 0:
                self._measure()
            ask = self.chance.choice(self.asks)
            names = [name for name, adapter in self.guests.items() if adapter == ask.adapter]
            model = self.chance.choice([_name(ask), *names])
            kind = self.chance.choice(_KINDS)
            try:
                text = await getattr(self, f"_{kind}")(client, ask.body(model))
            except openai.NotFoundError:
                is_expected = model not in self.guests and model.startswith("guest")
                self.soak.outcomes["unloaded"] += 1
                if not is_expected:
                    self.soak.wrong.append(f"{model}: not found")
                continue
            expected = self.alone[ask]
            if kind == "leave":
                self.soak.outcomes["left"] += 1
                is_equal = expected.startswith(text)
            else:
                is_equal = text == expected
                self.soak.outcomes["equal"] += is_equal
            if not is_equal:
                self.soak.wrong.append(f"{model} {ask}: {text!r}, alone {expected!r}")

    async def _whole(self, client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
        return str((await client.completions.create(**body)).choices[0].text)

    async def _stream(self, client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
        stream = await client.completions.create(stream=True, **body)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def _leave(self, client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
        stream = await client.completions.create(stream=True, **body)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            if self.chance.random() < 0.4:
                break
        await stream.close()
        return text

    async def _operate(self) -> None:
        """Load under new names, replace in place, unload: as fast as the server lets one."""
        adapters = sorted({ask.adapter for ask in self.asks if ask.adapter is not None})
        number = 0
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as http:
            while True:
                number += 1
                if len(self.guests) > 3 and self.chance.random() < 0.5:
                    name = self.chance.choice(list(self.guests))
                    del self.guests[name]
                    await self._post(http, "unload", lora_name=name)
                elif self.chance.random() < 0.5:
                    at = self.chance.choice(adapters)
                    body = {"lora_name": f"a{at}", "lora_path": f"a{at}", "load_inplace": True}
                    await self._post(http, "load", **body)
                else:
                    at, name = self.chance.choice(adapters), f"guest{number}"
                    await self._post(http, "load", lora_name=name, lora_path=f"a{at}")
                    self.guests[name] = at
                await asyncio.sleep(0.02)

    async def _post(self, http: httpx.AsyncClient, verb: str, **body: Any) -> None:
        response = await http.post(f"/v1/{verb}_lora_adapter", json=body)
        response.raise_for_status()
        self.soak.operations["replace" if "load_inplace" in body else verb] += 1

    def _measure(self) -> None:
        status = Path(f"/proc/{self.server.pid}/status")
        if status.exists():
            (line,) = [each for each in status.read_text().splitlines() if "VmRSS" in each]
            self.soak.memory_bytes.append(int(line.split()[1]) << 10)

    async def _empty(self) -> None:
        """Unload everything, and see that nothing is left in the slots."""
        status = self.server.wait_for(running=0, waiting=0)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as http:
            for adapter in status["adapters"]:
                await self._post(http, "unload", lora_name=adapter["name"])
        status = self.server.status()
        self.soak.is_empty = not status["slots"] and not status["adapters"]


def _name(ask: Ask) -> str:
    return "tiny" if ask.adapter is None else f"a{ask.adapter}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--adapters", type=int, default=40)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    soak = run_soak(**options)
    for line in soak.wrong[:10]:
        print("wrong:", line)
    megabytes = [round(size / 2**20) for size in soak.memory_bytes]
    print(
        f"answers: {dict(soak.outcomes)}, {len(soak.wrong)} wrong, {soak.answers_per_s:.1f} per s"
    )
    print(f"operator: {dict(soak.operations)}")
    print(f"voices: {soak.num_voices} of {soak.num_models} models")
    print(f"memory: {megabytes} MiB, flat: {soak.is_memory_flat}; empty: {soak.is_empty}")
    record = {
        "benchmark": "soak",
        **options,
        "outcomes": soak.outcomes,
        "wrong": len(soak.wrong),
        "operations": soak.operations,
        "voices": soak.num_voices,
        "memory_mib": megabytes,
        "answers_per_s": round(soak.answers_per_s, 1),
        "is_good": soak.is_good,
    }
    print(json.dumps(record))
    raise SystemExit(0 if soak.is_good else 1)


if __name__ == "__main__":
    main()
