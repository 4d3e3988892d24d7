"""What is asked of the engine, and what it answers: plain values, no tensors and no state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from lorafold.engine.errors import RequestError

__all__ = ["Answer", "Delta", "FinishReason", "Request", "Sampling", "TokenLogprob"]

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why an answer ended: an end-of-sequence token or stop string, max_tokens, the caller, a fault."""

_COLDEST = 1e-30  # far from where a logit over the temperature overflows
_MAX_STOPS, _MAX_STOP_LENGTH, _MAX_LOGPROBS = 16, 256, 20


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are chosen, and when it ends.

    Args:
        max_tokens: tokens of the answer, at most.
        temperature: 0 takes the likeliest token every time.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this sum.
        seed: makes a drawn answer repeatable, whatever else is in the batch; None for a new one.
        stop: strings before which the answer ends.
        num_logprobs: how many of the likeliest tokens to report at each place of the text, besides
            the chosen one; None for no log-probabilities at all.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        RequestError: if a value is out of range.

    Example:
        >>> Sampling(temperature=0.7, seed=1).is_greedy
        False
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        ranges: list[tuple[str, float | None, float, float]] = [
            ("max_tokens", self.max_tokens, 1, math.inf),
            ("temperature", self.temperature, 0, 100),
            ("seed", self.seed, -(2**63), 2**63 - 1),
            ("num_logprobs", self.num_logprobs, 0, _MAX_LOGPROBS),
        ]
        for name, value, low, high in ranges:
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name} must be {low:g} .. {high:g}; given: {value}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1; given: {self.top_p}")
        if len(self.stop) > _MAX_STOPS or not all(
            0 < len(text) <= _MAX_STOP_LENGTH for text in self.stop
        ):
            raise RequestError(
                f"there may be {_MAX_STOPS} stop strings of 1 .. {_MAX_STOP_LENGTH} characters; "
                f"given: {len(self.stop)} of {[len(text) for text in self.stop]}"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn. Colder than this, a draw could only be among equals."""
        return self.temperature < _COLDEST


@dataclass(frozen=True)
class Request:
    """One prompt, the adapter that answers it, and how.

    Args:
        prompt: token ids.
        adapter: the name of a loaded adapter; None is base.
        sampling: how tokens are chosen.

    Raises:
        RequestError: if the prompt is empty.

    Example:
        >>> Request([5, 6, 7], adapter="sql").prompt
        (5, 6, 7)
    """

    prompt: tuple[int, ...]
    adapter: str | None = None
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))
        if not self.prompt:
            raise RequestError("a prompt needs at least one token; given: none")


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one place of an answer, before temperature and top_p.

    Args:
        token: the chosen token.
        logprob: its natural log-probability.
        top: the likeliest tokens and their log-probabilities, likeliest first.

    Example:
        >>> TokenLogprob(5, -0.1, ((5, -0.1), (9, -3.0))).top[0]
        (5, -0.1)
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """What one step adds to an answer.

    Args:
        text: may be empty, and may lag behind the tokens: what could still turn out to be part of
            a stop string, or of a character, is held back.
        tokens: the new tokens.
        logprobs: one per token, if they were asked for. They come with the text of their tokens, so
            those of a stop string, which is cut off, never come; a token that begins before it and
            ends in it does.
        finish_reason: not None in the last delta of an answer.
        error: why, where finish_reason is "error".

    Example:
        >>> Delta("Hi", (42,)).finish_reason is None
        True
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer: its deltas put together.

    `tokens` are all that were generated, also those of a stop string; `logprobs` are of those that
    begin in the text.

    Example:
        >>> Answer.of([Delta("Hi", (42,)), Delta("!", (7,), finish_reason="stop")]).text
        'Hi!'
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    error: BaseException | None = None

    @classmethod
    def of(cls, deltas: list[Delta]) -> Answer:
        """The answer that these deltas, at least one, make up."""
        return cls(
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(each for delta in deltas for each in delta.logprobs),
            finish_reason=deltas[-1].finish_reason,
            error=deltas[-1].error,
        )
