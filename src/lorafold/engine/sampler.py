"""From logits to tokens: each row with its own temperature, top_p and seed.

Randomness is a function of (seed, place in the answer, token) and of nothing else: no generator has
a state, so an answer does not depend on what else is in the batch, or on where a step ends.

    token = argmax over v of  logits[v] / temperature + gumbel(seed, place, v)

Source: the Gumbel-max way of drawing from a categorical distribution; the hash is SplitMix64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafold.engine.request import Sampling, TokenLogprob

__all__ = ["Choice", "Draw", "choose_tokens"]

_GOLDEN, _MIX_1, _MIX_2 = (
    n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


@dataclass(frozen=True)
class Draw:
    """How the token of one row is chosen.

    Args:
        sampling: of the request; its seed is set.
        place: number of tokens that the answer has already.

    Example:
        >>> Draw(Sampling(seed=1), place=0).sampling.is_greedy
        True
    """

    sampling: Sampling
    place: int


@dataclass(frozen=True)
class Choice:
    """The token of one row, and its log-probabilities if they were asked for.

    Example:
        >>> Choice(5).logprob is None
        True
    """

    token: int
    logprob: TokenLogprob | None = None


def choose_tokens(logits: Tensor, draws: Sequence[Draw]) -> list[Choice]:
    """Choose one token per row, and wait for the device.

    Args:
        logits: [num_rows, vocab_size], any floating-point dtype.
        draws: one per row.

    Returns:
        One choice per row.

    Example:
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
        >>> [choice.token for choice in choose_tokens(logits, [Draw(Sampling(), 0)] * 2)]
        [1, 0]
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, draw in enumerate(draws) if not draw.sampling.is_greedy]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _drawn(logits[index], [draws[row] for row in drawn])
    chosen = tokens.tolist()
    logprobs = _logprobs(logits, chosen, draws)
    return [Choice(token, logprobs.get(row)) for row, token in enumerate(chosen)]


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """[num_rows] int64, drawn from the rows of `logits`."""
    device = logits.device
    temperature = _column([draw.sampling.temperature for draw in draws], torch.float64, device)
    scores = logits.double() / temperature
    top_p = [draw.sampling.top_p for draw in draws]
    if min(top_p) < 1:
        scores = _nucleus(scores, _column(top_p, torch.float64, device))
    seeds = _column([draw.sampling.seed or 0 for draw in draws], torch.int64, device)
    places = _column([draw.place for draw in draws], torch.int64, device)
    tokens = torch.arange(logits.shape[-1], device=device)
    bits = _mix(_mix(_mix(seeds) + places) + tokens)
    # 52 bits and a half are exact in float64, above 0 and below 1.
    uniform = ((bits >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52
    return (scores - torch.log(-torch.log(uniform))).argmax(dim=-1)


def _nucleus(scores: Tensor, top_p: Tensor) -> Tensor:
    """`scores` with minus infinity where a token is not among the likeliest that reach top_p."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    probability = ordered.softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    # Where top_p is 1, rounding must not cut the tail; the likeliest token always stays.
    is_out = (before >= top_p) & (top_p < 1)
    is_out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(is_out).scatter(-1, order, is_out), -torch.inf)


def _mix(x: Tensor) -> Tensor:
    """A hash of each int64 of x; products wrap."""
    x = x + _GOLDEN
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX_1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX_2
    return x ^ (x >> 31 & (1 << 33) - 1)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)


def _logprobs(
    logits: Tensor, tokens: Sequence[int], draws: Sequence[Draw]
) -> dict[int, TokenLogprob]:
    """The log-probabilities of the rows that want some."""
    rows = [row for row, draw in enumerate(draws) if draw.sampling.num_logprobs is not None]
    if not rows:
        return {}
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits[index].float().log_softmax(dim=-1)
    chosen = torch.tensor([tokens[row] for row in rows], device=logits.device)
    of_chosen = logprobs.gather(-1, chosen.unsqueeze(1)).squeeze(1).tolist()
    most = max(draws[row].sampling.num_logprobs or 0 for row in rows)
    values, ids = (t.tolist() for t in logprobs.topk(min(most, logprobs.shape[-1]), dim=-1))
    found = {}
    for at, row in enumerate(rows):
        num_top = draws[row].sampling.num_logprobs
        top = tuple(zip(ids[at][:num_top], values[at][:num_top], strict=True))
        found[row] = TokenLogprob(tokens[row], of_chosen[at], top)
    return found
