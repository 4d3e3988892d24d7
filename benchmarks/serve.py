"""Tokens per second of a server: the base alone, and adapters in several mixes.

    python -m benchmarks.serve [--model-shapes qwen3-8b] [--url URL] [--json [FILE]]

Clients of OpenAI's own library ask for streams. A mix says whose they are:

    base       nobody's
    identical  all of one adapter
    distinct   each adapter in turn
    uniform    an adapter by chance
    zipf       likewise, adapter number i with a chance of 1 / i

Without --url a model with random weights and random adapters is served on this machine, all mixes
by one process. The tiny one shows the cost of the server and of many small adapters, not of a model
that anybody uses; --model-shapes has the layers of a real one and wants a GPU. What is compiled or
placed on first use is timed apart, as `warm_up_s`. With --repeats the mixes take turns, and a row
is the repeat of median speed.

Some answers of each mix are compared with the same requests alone; if fewer than --min-equal are
the same, the run stops. A base whose rows depend on the batch, as on a GPU, cannot give 1.

`server_ms_per_step` is what a step of the server takes beyond the model's forward: by the clocks in
its `/metrics`, if it has them, all of its steps less all forwards in them, over their number. What
the host does while a GPU is at a forward is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from benchmarks.record import add_json_option, describe, save
from benchmarks.serve_models import SHAPES
from benchmarks.serve_target import Clock, Target, metrics_clock, own_server

__all__ = ["MIXES", "Timed", "main", "measure", "pick"]

MIXES = ("base", "identical", "distinct", "uniform", "zipf")


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


async def _ask_all(
    client: openai.AsyncOpenAI, models: Sequence[str], options: argparse.Namespace
) -> tuple[list[Timed], float, float]:
    """All answers, from several clients at once, and when the first began and the last ended."""
    answers: dict[int, Timed] = {}
    left = iter(range(len(models)))

    async def work() -> None:
        for at in left:
            prompt = f"{at} {options.prompt}"
            answers[at] = await _ask(client, models[at], prompt, options.max_tokens)

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(options.clients)))
    end = time.perf_counter()
    return [answers[at] for at in range(len(models))], begin, end


async def measure(
    client: openai.AsyncOpenAI,
    models: Sequence[str],
    options: argparse.Namespace,
    *,
    alone: Sequence[str] = (),
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Ask each of the models; the figures of one row.

    Args:
        client: of the server.
        models: of the requests.
        options: of the command line.
        alone: texts that the first requests have when they are asked alone.
        clock: of the server's own work, where there is one.
    """
    answers, begin, end = await _ask_all(client, models, options)
    equal = [one.text == text for one, text in zip(answers, alone, strict=False)]
    firsts = sorted(answer.times[0] for answer in answers)
    steps = [
        (answer.times[-1] - answer.times[0]) / (len(answer.times) - 1)
        for answer in answers
        if len(answer.times) > 1
    ]
    own_ms = clock() if clock is not None else None
    return {
        "tokens_per_s": round(len(answers) * options.max_tokens / (end - begin), 1),
        "first_token_ms": round(1e3 * statistics.median(firsts), 1),
        "first_token_p99_ms": round(1e3 * firsts[int(0.99 * (len(firsts) - 1))], 1),
        "step_ms": round(1e3 * statistics.median(steps), 2) if steps else None,
        "server_ms_per_step": None if own_ms is None else round(own_ms, 3),
        "equal_alone": round(sum(equal) / len(equal), 3) if equal else None,
    }


async def _run(
    options: argparse.Namespace, client: openai.AsyncOpenAI, target: Target
) -> list[dict[str, Any]]:
    cards = [model async for model in client.models.list()]
    base = next(card.id for card in cards if getattr(card, "parent", None) is None)
    adapters = [card.id for card in cards if getattr(card, "parent", None) is not None]
    if not adapters:
        raise SystemExit("the server has no adapters")
    mixes = {mix: pick(mix, base, adapters, options.requests) for mix in options.mixes.split(",")}
    record = describe("serve", [], adapters=len(adapters), **_settings(options), **target.about)
    rows: list[dict[str, Any]] = record["rows"]
    start = time.perf_counter()
    for models in mixes.values():
        await _ask_all(client, models[: options.clients], options)
    record["warm_up_s"] = round(time.perf_counter() - start, 1)
    print(f"warm_up_s {record['warm_up_s']}", flush=True)
    alone = {mix: await _alone(client, models, options) for mix, models in mixes.items()}
    clock = metrics_clock(target.url, options.api_key)
    repeats: dict[str, list[dict[str, Any]]] = {mix: [] for mix in mixes}
    for _ in range(options.repeats):
        for mix, models in mixes.items():
            row = await measure(client, models, options, alone=alone[mix], clock=clock)
            if row["equal_alone"] is not None and row["equal_alone"] < options.min_equal:
                raise SystemExit(f"{mix}: {row['equal_alone']:.1%} of the answers are those alone")
            repeats[mix].append(row)
    for mix, models in mixes.items():
        row = sorted(repeats[mix], key=lambda row: row["tokens_per_s"])[(options.repeats - 1) // 2]
        first = rows[0]["tokens_per_s"] if rows else row["tokens_per_s"]
        of_first = round(row["tokens_per_s"] / first, 4)
        rows.append(
            {"mix": mix, "adapters": len(set(models) - {base}), **row, "of_first": of_first}
        )
        _print(rows[-1], rows[0]["mix"])
    save(record, options.json)
    return rows


async def _alone(
    client: openai.AsyncOpenAI, models: Sequence[str], options: argparse.Namespace
) -> list[str]:
    """The texts of the first requests, each asked while no other runs."""
    checked = range(min(options.checked, len(models)))
    asked = [
        await _ask(client, models[at], f"{at} {options.prompt}", options.max_tokens)
        for at in checked
    ]
    return [answer.text for answer in asked]


def _print(row: dict[str, Any], first: str) -> None:
    print(
        f"{row['mix']:10} {row['adapters']:3} adapters {row['tokens_per_s']:9.1f} tokens/s "
        f"{row['of_first']:6.1%} of {first}, first {row['first_token_ms']:.1f} ms, "
        f"step {row['step_ms']} ms, server {row['server_ms_per_step']} ms per step, "
        f"equal alone {row['equal_alone']}",
        flush=True,
    )


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    names = ("requests", "clients", "max_tokens", "repeats")
    settings = {name: getattr(options, name) for name in names}
    own = {name: getattr(options, name) for name in ("model_shapes", "slots", "rank")}
    return settings | (own if options.url is None else {"url": options.url})


async def _with_client(options: argparse.Namespace, target: Target) -> list[dict[str, Any]]:
    async with openai.AsyncOpenAI(
        base_url=f"{target.url}/v1", api_key=options.api_key, max_retries=0, timeout=600
    ) as client:
        return await _run(options, client, target)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--requests", type=int, default=128, help="of each mix")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--prompt", default="Tell me something that I do not know yet.")
    parser.add_argument("--checked", type=int, default=8, help="answers of a mix, asked alone too")
    parser.add_argument("--min-equal", type=float, help="1 for the tiny model, else 0")
    parser.add_argument("--repeats", type=int, default=1)
    own = parser.add_argument_group("the server of one's own")
    own.add_argument("--model-shapes", choices=("tiny", *SHAPES), default="tiny")
    own.add_argument("--work", type=Path, metavar="DIR", help="keep a large model's folder here")
    own.add_argument("--adapters", type=int, default=16)
    own.add_argument("--slots", type=int, default=8)
    own.add_argument("--rank", type=int, default=8)
    add_json_option(parser, "serve")
    options = parser.parse_args(arguments)
    if options.min_equal is None:
        options.min_equal = 1.0 if options.model_shapes == "tiny" else 0.0
    if options.url is not None:
        target = Target(options.url.rstrip("/"))
        return asyncio.run(_with_client(options, target))
    with own_server(options) as target:
        return asyncio.run(_with_client(options, target))


if __name__ == "__main__":
    main()
