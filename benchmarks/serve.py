"""Tokens per second of a server: the base alone, and adapters in several mixes.

    python -m benchmarks.serve [--url http://127.0.0.1:8000] [--api-key KEY] [--json [FILE]]

Clients of OpenAI's own library ask for streams. A mix says whose they are:

    base       nobody's
    identical  all of one adapter
    distinct   each adapter in turn
    uniform    an adapter by chance
    zipf       likewise, adapter number i with a chance of 1 / i

Without --url a tiny model with random adapters is served on this machine: that shows the cost of
the server and of many small adapters, not of a model that anybody uses. Some answers of each mix
are compared with the same requests alone; if fewer than --min-equal are the same, the run stops. A
base whose rows depend on the batch, as on a GPU, cannot give 1.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from tests.server.process import Process
from tests.tiny_models import make_model, write_adapter
from tests.tiny_text import save_model

from benchmarks.record import add_json_option, describe, save

__all__ = ["MIXES", "Timed", "main", "measure", "pick"]

MIXES = ("base", "identical", "distinct", "uniform", "zipf")
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def pick(mix: str, base: str, adapters: Sequence[str], count: int, seed: int = 0) -> list[str]:
    """The model of each request.

    Example:
        >>> pick("distinct", "base", ["a", "b"], 3)
        ['a', 'b', 'a']
    """
    chance = random.Random(seed)
    if mix == "base":
        return [base] * count
    if mix == "identical":
        return [adapters[0]] * count
    if mix == "distinct":
        return [adapters[at % len(adapters)] for at in range(count)]
    weights = [1.0 if mix == "uniform" else 1 / (at + 1) for at in range(len(adapters))]
    return chance.choices(adapters, weights, k=count)


@dataclass(frozen=True)
class Timed:
    """One answer: its text, and when its tokens came, in seconds since the request."""

    text: str
    times: tuple[float, ...]


async def _ask(client: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> Timed:
    start, text, times = time.perf_counter(), "", list[float]()
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        text += chunk.choices[0].text
        times.append(time.perf_counter() - start)
    return Timed(text, tuple(times))


async def measure(
    client: openai.AsyncOpenAI,
    models: Sequence[str],
    *,
    clients: int,
    prompt: str,
    max_tokens: int,
    num_checked: int = 8,
) -> dict[str, Any]:
    """Ask each of the models from several clients at once; the figures of one row."""
    checked = range(min(num_checked, len(models)))
    alone = [await _ask(client, models[at], f"{at} {prompt}", max_tokens) for at in checked]
    answers: list[Timed | None] = [None] * len(models)
    left = iter(range(len(models)))

    async def work() -> None:
        for at in left:
            answers[at] = await _ask(client, models[at], f"{at} {prompt}", max_tokens)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    seconds = time.perf_counter() - start
    done = [answer for answer in answers if answer is not None]
    equal = [answers[at] is not None and done[at].text == alone[at].text for at in checked]
    firsts = sorted(answer.times[0] for answer in done)
    steps = [
        after - before
        for answer in done
        for before, after in zip(answer.times, answer.times[1:], strict=False)
    ]
    return {
        "tokens_per_s": round(len(done) * max_tokens / seconds, 1),
        "first_token_ms": round(1e3 * statistics.median(firsts), 1),
        "first_token_p99_ms": round(1e3 * firsts[int(0.99 * (len(firsts) - 1))], 1),
        "step_ms": round(1e3 * statistics.median(steps), 2) if steps else None,
        "equal_alone": round(sum(equal) / len(equal), 3),
    }


@contextmanager
def _tiny_server(num_adapters: int, slots: int, rank: int) -> Iterator[Process]:
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), make_model()
        save_model(folder / "model")
        loaded: list[str] = []
        for at in range(num_adapters):
            write_adapter(model, folder / f"a{at}", _TARGETS, rank=rank, seed=at)
            loaded += ["--adapter", f"a{at}={folder}/a{at}"]
        server = Process(["--model", folder / "model", "--max-loras", slots, *loaded])
        try:
            yield server.wait_until_up()
        finally:
            server.stop()


async def _run(options: argparse.Namespace, client: openai.AsyncOpenAI) -> list[dict[str, Any]]:
    cards = [model async for model in client.models.list()]
    base = next(card.id for card in cards if getattr(card, "parent", None) is None)
    adapters = [card.id for card in cards if getattr(card, "parent", None) is not None]
    if not adapters:
        raise SystemExit("the server has no adapters")
    record = describe("serve", [], adapters=len(adapters), **_settings(options))
    rows: list[dict[str, Any]] = record["rows"]
    for mix in options.mixes.split(","):
        models = pick(mix, base, adapters, options.requests)
        settings = {"prompt": options.prompt, "max_tokens": options.max_tokens}
        # Once for what is compiled or placed on first use, then for the figures.
        await measure(client, models[: options.clients], clients=options.clients, **settings)
        row = await measure(client, models, clients=options.clients, **settings)
        if row["equal_alone"] < options.min_equal:
            raise SystemExit(f"{mix}: {row['equal_alone']:.1%} of the answers are those alone")
        rows.append({"mix": mix, "adapters": len(set(models) - {base}), **row})
        of_base = row["tokens_per_s"] / rows[0]["tokens_per_s"]
        print(
            f"{mix:10} {rows[-1]['adapters']:3} adapters {row['tokens_per_s']:9.1f} tokens/s "
            f"{of_base:6.1%} of {rows[0]['mix']}, first {row['first_token_ms']:.1f} ms, "
            f"step {row['step_ms']} ms",
            flush=True,
        )
        save(record, options.json)
    return rows


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("requests", "clients", "max_tokens", "slots", "rank")
    return {name: getattr(options, name) for name in names} | {"own_server": options.url is None}


async def _with_client(options: argparse.Namespace, url: str) -> list[dict[str, Any]]:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=options.api_key, max_retries=0, timeout=600
    ) as client:
        return await _run(options, client)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--requests", type=int, default=128, help="of each mix")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt", default="Tell me something that I do not know yet.")
    parser.add_argument("--min-equal", type=float, default=1.0)
    parser.add_argument("--adapters", type=int, default=16, help="of the server of one's own")
    parser.add_argument("--slots", type=int, default=8, help="likewise")
    parser.add_argument("--rank", type=int, default=8, help="likewise")
    add_json_option(parser, "serve")
    options = parser.parse_args(arguments)
    if options.url is not None:
        return asyncio.run(_with_client(options, options.url.rstrip("/")))
    with _tiny_server(options.adapters, options.slots, options.rank) as server:
        return asyncio.run(_with_client(options, server.url))


if __name__ == "__main__":
    main()
