"""The engine: takes requests from any thread, runs them in one of its own, streams the answers."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from os import PathLike
from typing import Any

from lorafold.adapter import LoadReport
from lorafold.engine.answering import Answering
from lorafold.engine.batching import Batching, build_batches, longest
from lorafold.engine.errors import QueueFullError, RequestError
from lorafold.engine.loop import Loop
from lorafold.engine.request import Answer, Delta, Request
from lorafold.engine.shelf import Loaded, Shelf
from lorafold.engine.tally import EngineStats, Tally
from lorafold.errors import AdapterNotFoundError
from lorafold.runtime import MultiLora

__all__ = ["Engine", "Ticket"]


class Ticket:
    """A request that was accepted.

    Args:
        answering: its state.
        wake: has the engine look at it.

    Example: see `Engine`.
    """

    def __init__(self, answering: Answering, wake: Callable[[], None]) -> None:
        self._answering = answering
        self._wake = wake

    def cancel(self) -> None:
        """End the answer soon, with finish_reason "cancelled"; no harm if it has ended."""
        if self._answering.finish_reason is None:
            self._answering.is_cancelled = True
            self._wake()


class Engine:
    """Many requests over one model, each with its adapter, its sampling and its end.

    Adapters are read into host memory, and placed into the slots of the pool as requests need them,
    by a thread of their own, while other requests run.
    A request keeps its adapter's slot from its admission to its last token, and the very loading
    that its name stood for when it was accepted: loading and unloading never change an answer that
    is under way. Where more adapters wait than there are slots, they take turns (`FairQueue`).

    Args:
        lora: the model; while requests run, other threads that use it wait.
        tokenizer: of the model.
        batching: "auto" packs requests where the model allows it, and else runs static batches.
        max_running: requests that run at the same time.
        max_waiting: requests that may wait.
        max_length: tokens of a request, prompt and answer; None for what the model was made for.
        cache_tokens: tokens in the KV cache; None for what may be needed, as far as memory allows.
        chunk: tokens of a prompt that are read at once. A static batch reads whole prompts, padded
            to the longest: together `max_running * chunk` tokens at most (or what a packed step
            has, if that is more), or one longer prompt alone. Kernels are compiled for that.
        graphs: on CUDA, capture the steps of packed requests as graphs at the start; where the
            model does not allow it, a warning says so.
        host_bytes: host memory for adapters; those that were not needed for longest are read from
            disk again when they are. None for no limit.

    Attributes:
        lora: as given.
        tokenizer: as given.
        max_length: tokens of the longest request.
        is_packed: whether requests are packed, and come and go between steps.

    Raises:
        RequestError: if a number is below 1.
        RouteError: if host_bytes has no room for one adapter.
        ModelError: if "packed" was asked for and the model does not allow it.
        BackendError: if the KV cache is too small for a request, or too large for the device.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lorafold.runtime import attach
        >>> class Letters:
        ...     eos_token_id = None
        ...
        ...     def decode(self, ids, **settings):
        ...         return "".join(chr(97 + token) for token in ids)
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     eos_token_id=None,
        ... )
        >>> lora = attach(LlamaForCausalLM(config).bfloat16())
        >>> with Engine(lora, Letters()) as engine:
        ...     answers = engine.answer([Request([1, 2]), Request([3])])
        >>> [len(answer.text) for answer in answers]
        [16, 16]
    """

    def __init__(
        self,
        lora: MultiLora,
        tokenizer: Any,
        *,
        batching: Batching = "auto",
        max_running: int = 32,
        max_waiting: int = 1024,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        chunk: int = 512,
        graphs: bool = True,
        host_bytes: int | None = None,
    ) -> None:
        max_length = longest(lora) if max_length is None else max_length
        numbers = {
            "max_running": max_running,
            "max_waiting": max_waiting,
            "max_length": max_length,
            "cache_tokens": 1 if cache_tokens is None else cache_tokens,
            "chunk": chunk,
        }
        for name, value in numbers.items():
            if value < 1:
                raise RequestError(f"{name} must be at least 1; given: {value}")
        batches = build_batches(
            lora,
            batching,
            max_running=max_running,
            max_length=max_length,
            cache_tokens=cache_tokens,
            chunk=chunk,
            graphs=graphs,
        )
        self.lora = lora
        self.tokenizer = tokenizer
        self.max_length = min(max_length, batches.max_length)
        self.is_packed = batches.is_continuous
        self._max_waiting = max_waiting
        self._end_tokens = _end_tokens(lora.model, tokenizer)
        model: Any = lora.model
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._shelf, self._tally = Shelf(lora, host_bytes=host_bytes), Tally()
        self._loop = Loop(batches, lora.pool, self._shelf, self._tally, max_running=max_running)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._loop.is_open

    def load(self, name: str, path: str | PathLike[str]) -> LoadReport:
        """Read an adapter; requests may name it from now on. It is placed when one does.

        Args:
            name: what requests will call it; one of the same name is replaced for those to come.
            path: a PEFT folder.

        Returns:
            What became of every tensor of the file.

        Raises:
            AdapterFormatError: if the files are broken or use what is not supported.
            AdapterMismatchError: if it does not fit the model or the pool.
            BackendError: if the host has no memory for it.
        """
        start = time.perf_counter()
        report = self._shelf.load(name, path).report
        with self._tally.changing() as stats:
            stats.num_loads += 1
            stats.load_seconds += time.perf_counter() - start
        return report

    def unload(self, name: str) -> None:
        """Take a name away; requests that were accepted with it run to their end.

        Raises:
            AdapterNotFoundError: if no adapter of that name is loaded.
        """
        self._shelf.unload(name)
        self._tally.forget(name)

    def adapters(self) -> tuple[Loaded, ...]:
        """What requests may name, in the order of loading."""
        return self._shelf.all()

    def submit(self, request: Request, deliver: Callable[[Delta], None]) -> Ticket:
        """Accept a request.

        Args:
            request: prompt, adapter and sampling.
            deliver: is given every delta in the engine's thread, and must not wait; the last one
                has a finish_reason.

        Raises:
            RequestError: if the request is too long, or has tokens that do not exist.
            AdapterNotFoundError: if no adapter of that name is loaded.
            QueueFullError: if too many requests wait.
            EngineClosedError: if the engine is closed.
        """
        self._check(request)
        if request.sampling.seed is None:
            seeded = replace(request.sampling, seed=secrets.randbits(63))
            request = replace(request, sampling=seeded)
        loaded = None if request.adapter is None else self._shelf.take(request.adapter)
        counted = self._counted(request.adapter, deliver)
        answering = Answering(request, loaded, counted, self.tokenizer, self._end_tokens)
        try:
            self._put(answering)
        except BaseException:
            if loaded is not None:
                self._shelf.give_back(loaded)
            raise
        return Ticket(answering, self._loop.wake)

    def _put(self, answering: Answering) -> None:
        """Have a request wait, and count it."""
        name = answering.request.adapter
        with self._tally.changing() as stats:
            if sum(stats.waiting.values()) >= self._max_waiting:
                raise QueueFullError(f"{self._max_waiting} requests wait already; try again soon")
            stats.waiting[name] += 1
        try:
            self._loop.put(answering)
        except BaseException:
            with self._tally.changing() as stats:
                stats.waiting[name] -= 1
            raise

    def stream(self, request: Request) -> Generator[Delta, None, None]:
        """The deltas of one answer as they come; closing the generator cancels the request.

        Raises:
            RequestError, AdapterNotFoundError, QueueFullError, EngineClosedError: as `submit`.
        """
        deltas = self._deltas(request)
        next(deltas)  # a generator that has not begun would do nothing when it is closed
        return deltas

    def _deltas(self, request: Request) -> Generator[Delta, None, None]:
        """Submit a request with the first `next`, which gives an empty delta; then as `stream`."""
        said: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        ticket = self.submit(request, said.put)
        try:
            delta = Delta()
            while delta.finish_reason is None:
                yield delta
                delta = said.get()
            yield delta
        finally:
            ticket.cancel()

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer some requests together, and wait for all of them.

        Raises:
            RequestError, AdapterNotFoundError, QueueFullError, EngineClosedError: as `submit`.
        """
        with ExitStack() as stack:
            streams = [stack.enter_context(closing(self.stream(each))) for each in requests]
            return [Answer.of(list(stream)) for stream in streams]

    def stats(self) -> EngineStats:
        """Numbers since the start, and the state now."""
        stats, pool = self._tally.read(), self.lora.pool
        slots = []
        for key in pool.names():
            with suppress(AdapterNotFoundError):  # it may have gone meanwhile
                slots.append((pool.slot(key), key.rpartition("@")[0] or key))
        stats.slots, stats.max_loras = tuple(slots), pool.max_loras
        return stats

    def close(self, timeout_s: float | None = None) -> None:
        """Take no more requests, finish those that were accepted, and stop.

        Args:
            timeout_s: after this many seconds, cancel what is left; None waits for ever.
        """
        self._loop.close(timeout_s)

    def _counted(
        self, name: str | None, deliver: Callable[[Delta], None]
    ) -> Callable[[Delta], None]:
        """`deliver`, with the tokens counted as long as the name is in use."""

        def count(delta: Delta) -> None:
            self._tally.count_tokens(name, len(delta.tokens))
            if delta.finish_reason is not None and name is not None and name not in self._shelf:
                self._tally.forget(name)
            deliver(delta)

        return count

    def _check(self, request: Request) -> None:
        length, max_tokens = len(request.prompt), request.sampling.max_tokens
        if length + max_tokens > self.max_length:
            raise RequestError(
                f"prompt and answer may have {self.max_length} tokens together; given: {length} "
                f"and max_tokens {max_tokens}"
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self._vocab_size:
            raise RequestError(
                f"tokens must be 0 .. {self._vocab_size - 1}; given: {min(request.prompt)} .. "
                f"{max(request.prompt)}"
            )


def _end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer: those of the generation config, and the tokenizer's."""
    config = getattr(model, "generation_config", None)
    known = getattr(config, "eos_token_id", None)
    tokens = known if isinstance(known, list | tuple) else [known]
    return frozenset(t for t in (*tokens, tokenizer.eos_token_id) if t is not None)
