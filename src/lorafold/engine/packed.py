"""Continuous batching: each step is one forward of every running request, packed into one row.

A step takes one token of each request that is in its answer, and whole chunks of the prompts that
are still to be read. Chunks begin at fixed places of a prompt, whatever else is in the step, so the
shapes of a request's attention are its own. Requests come and go between steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from lorafold.engine.answering import Answering
from lorafold.engine.attention import PackedAttention
from lorafold.engine.clock import ForwardClock
from lorafold.engine.graphs import DecodeGraphs
from lorafold.engine.kv import KvCache, Stretch
from lorafold.engine.sampler import choose_tokens
from lorafold.engine.step import Piece, Step, send
from lorafold.errors import BackendError, LoraError
from lorafold.runtime import MultiLora

__all__ = ["PackedBatches", "PackedForward", "most_step_tokens", "why_not_packed"]

_log = logging.getLogger(__name__)

_PACKABLE = {"full_attention", "sliding_attention"}
# Rotary frequencies that follow the longest sequence of a batch would tie its sequences together.
_TIED_ROTARY = {"dynamic", "longrope"}
# Relative, between two orders of the same bf16 sums; what differs otherwise is > 1.
_TOLERANCE = 0.1
_STEP_TOKENS = 2048  # of prompts in one step


class PackedForward:
    """One forward of several sequences packed into one row of the batch.

    Args:
        lora: the model.
        cache: keys and values of the sequences.
        use_flash: as for `PackedAttention`.

    Attributes:
        attention: what the model calls.
        clock: of the model's part of the forwards.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lorafold.runtime import attach
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> lora = attach(LlamaForCausalLM(config).bfloat16())
        >>> cache = KvCache(64, torch.device("cpu"))
        >>> forward = PackedForward(lora, cache)
        >>> pieces = [
        ...     Piece(ids, start=0, stretch=cache.reserve(8), slot=-1, wants_logits=True)
        ...     for ids in ([1, 2, 3], [4, 5])
        ... ]
        >>> with forward.session():
        ...     forward(pieces).shape
        torch.Size([2, 8])
    """

    def __init__(self, lora: MultiLora, cache: KvCache, *, use_flash: bool = True) -> None:
        self._lora = lora
        self._device = lora.pool.device
        self.attention = PackedAttention(lora.model, cache, use_flash=use_flash)
        self.clock = ForwardClock(self._device)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Keep the model for packed forwards inside the `with` block."""
        with self._lora.turn(), self.attention.installed():
            yield

    def __call__(self, pieces: Sequence[Piece]) -> Tensor:
        """The logits [number of pieces that want some, vocab_size], in the order of the pieces."""
        # Variable-length attention wants the stretches in ascending order.
        order = sorted(range(len(pieces)), key=lambda at: pieces[at].stretch.start)
        ordered = [pieces[at] for at in order]
        step = Step.of(ordered, self._device)
        slots = [piece.slot for piece in ordered for _ in piece.tokens]
        positions = [place for piece in ordered for place in range(piece.start, piece.end)]
        ids = [token for piece in ordered for token in piece.tokens]
        last, kept, of_piece = -1, [], []
        for at, piece in zip(order, ordered, strict=True):
            last += len(piece.tokens)
            if piece.wants_logits:
                kept.append(last)
                of_piece.append(at)
        # The head must see something; without a wish for logits, it is the first row.
        inputs = send([*ids, *positions, *(kept or [0])], torch.int64, self._device)
        with self._lora.packed_rows(slots, kept or [0]), self.attention.stepping(step):
            model: Any = self._lora.model
            self.clock.begin()
            logits: Tensor = model(
                input_ids=inputs[: len(ids)].unsqueeze(0),
                position_ids=inputs[len(ids) : 2 * len(ids)].unsqueeze(0),
                logits_to_keep=inputs[2 * len(ids) :],
                use_cache=False,
            ).logits[0, : len(kept)]
            self.clock.end()
        back = sorted(range(len(kept)), key=of_piece.__getitem__)
        return logits if back == list(range(len(kept))) else logits[back]


class PackedBatches:
    """Steps over running requests.

    Args:
        lora: the model.
        num_tokens: places in the KV cache.
        max_running: requests that run at the same time.
        chunk: tokens of a prompt that are read at once.
        use_flash: as for `PackedAttention`.
        graphs: on CUDA, run decode steps as graphs, where the model allows it.

    Raises:
        BackendError: if the KV cache is too small for a request, or too large for the device.

    Example: `lorafold.engine.Engine` uses it.
    """

    def __init__(
        self,
        lora: MultiLora,
        *,
        num_tokens: int,
        max_running: int,
        chunk: int,
        use_flash: bool = True,
        graphs: bool = True,
    ) -> None:
        self.cache = KvCache(num_tokens, lora.pool.device, num_spare=max_running)
        self._forward = PackedForward(lora, self.cache, use_flash=use_flash)
        self._max_step_tokens = most_step_tokens(max_running, chunk)
        self._chunk = chunk
        self._stretches: dict[Answering, Stretch] = {}
        self._allocate()
        self._decode: DecodeGraphs | None = None
        if graphs and lora.pool.device.type == "cuda":
            self._decode = self._captured(DecodeGraphs(lora, self._forward.attention, max_running))

    def session(self) -> AbstractContextManager[None]:
        """A `with` block in which `advance` may be called."""
        return self._forward.session()

    @property
    def is_continuous(self) -> bool:
        """Requests come and go between steps."""
        return True

    @property
    def max_length(self) -> int:
        """Tokens of the longest request that can ever run."""
        return self.cache.num_tokens

    def reserve(self, answering: Answering) -> bool:
        """Find room for a request."""
        stretch = self.cache.reserve(answering.max_length)
        if stretch is not None:
            self._stretches[answering] = stretch
        return stretch is not None

    def release(self, answering: Answering) -> None:
        """Give the room of a request back."""
        self.cache.release(self._stretches.pop(answering))

    def advance(self, running: Iterable[Answering]) -> None:
        """One step: every request that reaches the end of what is known of it gets a token."""
        # In the order that the forward wants, so that it has nothing to sort.
        chosen = sorted(self._choose(running), key=lambda each: each[1].stretch.start)
        pieces = [piece for _, piece in chosen]
        if self._decode is not None and self._decode.takes(pieces):
            logits = self._decode(pieces)
            _say(chosen)  # while the device runs
        else:
            _say(chosen)  # the host is about to be busy with launches for long
            logits = self._forward(pieces)
        ready = [answering for answering, piece in chosen if piece.wants_logits]
        for answering, piece in chosen:
            answering.num_cached = piece.end
        if ready:
            choices = choose_tokens(logits, [answering.draw for answering in ready])
            for answering, choice in zip(ready, choices, strict=True):
                answering.take(choice)
                # With graphs, the rest is said once the next step has been launched; but what may
                # end must not have a row in it.
                if self._decode is None or answering.may_end:
                    answering.say()

    def timed(self) -> tuple[int, float]:
        """How many forwards have been done since the last call, and their seconds."""
        clocks = [self._forward.clock] + ([self._decode.clock] if self._decode else [])
        numbers, seconds = zip(*(clock.read() for clock in clocks), strict=True)
        return sum(numbers), sum(seconds)

    def _allocate(self) -> None:
        """Run one token, so that every layer takes its memory now, not with the first request."""
        stretch = self.cache.reserve(1)
        if stretch is None:
            raise BackendError(
                f"the KV cache needs room for 16 tokens at least; given: {self.cache.num_tokens}"
            )
        try:
            with self.session():
                self._forward([Piece([0], 0, stretch, -1, wants_logits=False)])
        except LoraError:
            raise
        except (RuntimeError, MemoryError) as error:
            message = f"no memory for a KV cache of {self.cache.num_tokens} tokens: {error}"
            raise BackendError(f"{message}\nhint: lower cache_tokens or max_running") from error
        self.cache.release(stretch)
        self._forward.clock.clear()

    def _captured(self, graphs: DecodeGraphs) -> DecodeGraphs | None:
        """The graphs, captured; None, with a warning, if the model does not allow it."""
        try:
            with self.session():
                graphs.capture()
        except Exception as error:  # whatever model code does that a graph cannot hold
            _log.warning("decode steps run without CUDA graphs: %s", error)
            return None
        return graphs

    def _choose(self, running: Iterable[Answering]) -> list[tuple[Answering, Piece]]:
        """Answers first, a token each, then chunks of prompts as far as there is room."""
        prompts, chosen = [], []
        for answering in running:
            if answering.tokens:
                chosen.append((answering, self._piece(answering, answering.tokens[-1:])))
            else:
                prompts.append(answering)
        room = self._max_step_tokens - len(chosen)
        for answering in prompts:
            prompt, start = answering.request.prompt, answering.num_cached
            tokens = prompt[start : start // self._chunk * self._chunk + self._chunk]
            if len(tokens) > room:
                break
            room -= len(tokens)
            chosen.append((answering, self._piece(answering, tokens)))
        return chosen

    def _piece(self, answering: Answering, tokens: Sequence[int]) -> Piece:
        start = answering.num_cached
        known = len(answering.request.prompt) + len(answering.tokens)
        return Piece(
            tokens,
            start,
            self._stretches[answering],
            answering.slot,
            wants_logits=start + len(tokens) == known,
        )


def most_step_tokens(max_running: int, chunk: int) -> int:
    """Tokens of the largest step: an answer's each, and a chunk fits beside them.

    Args:
        max_running: requests that run at the same time.
        chunk: tokens of a prompt that are read at once.

    Example:
        >>> most_step_tokens(32, 512)
        2080
    """
    return max_running + max(chunk, _STEP_TOKENS)


def _say(chosen: Iterable[tuple[Answering, Piece]]) -> None:
    """Deliver what the step before added and left unsaid."""
    for answering, _ in chosen:
        answering.say()


def why_not_packed(lora: MultiLora, *, use_flash: bool = True) -> str | None:
    """Why the requests of this model cannot be packed, or None if they can.

    What the configuration does not rule out is tried: two short sequences, packed and in chunks,
    must give the logits that the model gives for each of them alone.

    Args:
        lora: the model.
        use_flash: as for `PackedAttention`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lorafold.runtime import attach
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> why_not_packed(attach(LlamaForCausalLM(config).bfloat16())) is None
        True
    """
    model: Any = lora.model
    name, config = type(model).__name__, model.config.get_text_config()
    if others := set(getattr(config, "layer_types", None) or ()) - _PACKABLE:
        return f"{name} has layers of {', '.join(sorted(others))}"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not let its attention function be named"
    if tied := _rotary_types(getattr(config, "rope_parameters", None)) & _TIED_ROTARY:
        return f"{name} has rotary frequencies ({', '.join(tied)}) that depend on the whole batch"
    sequences = [[t % config.vocab_size for t in ids] for ids in ((5, 3, 4, 1, 2), (2, 5, 1, 4))]
    with lora.rows([None]):
        alone = torch.cat([_logits(model, ids) for ids in sequences])
    try:
        packed = _packed_in_chunks(lora, sequences, use_flash=use_flash)
    except Exception as error:  # whatever model code does with what it does not expect
        return f"{name} cannot run packed: {error}"
    apart = float((packed - alone).norm() / alone.norm())
    if not apart <= _TOLERANCE:
        return f"{name} gives other logits for packed sequences: they differ by {apart:.2g}"
    return None


def _rotary_types(parameters: Any) -> set[str]:
    """The kinds of rotary embedding in a configuration, which may hold one per type of layer."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return kinds.union(*(_rotary_types(each) for each in parameters.values()))


def _logits(model: Any, ids: list[int]) -> Tensor:
    out: Tensor = model(input_ids=torch.tensor([ids], device=model.device)).logits[:, -1]
    return out.double()


def _packed_in_chunks(lora: MultiLora, sequences: list[list[int]], *, use_flash: bool) -> Tensor:
    """The logits after each sequence: packed, and read in three chunks."""
    cache = KvCache(64, lora.pool.device)
    forward = PackedForward(lora, cache, use_flash=use_flash)
    # The first sequence gets the second stretch, so that rows and stretches differ in order.
    stretches = [cache.reserve(16), cache.reserve(16)][::-1]
    with forward.session():
        for part in (slice(0, 1), slice(1, -1), slice(-1, None)):
            logits = forward(
                [
                    Piece(ids[part], len(ids[: part.start]), at, -1, wants_logits=True)
                    for ids, at in zip(sequences, stretches, strict=True)
                    if at is not None
                ]
            )
    return logits.double()
