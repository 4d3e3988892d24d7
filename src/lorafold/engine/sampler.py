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
from lorafold.engine.step import send

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
    drawn = [row for row, draw in enumerate(draws) if not draw.sampling.is_greedy]
    if len(drawn) == len(draws):
        tokens = _drawn(logits, draws)
    else:
        tokens = logits.argmax(dim=-1)
        if drawn:
            index = send(drawn, torch.int64, logits.device)
            tokens[index] = _drawn(logits[index], [draws[row] for row in drawn])
    logprobs = _logprobs(logits, tokens, draws)
    return [Choice(token, logprobs.get(row)) for row, token in enumerate(tokens.tolist())]


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """[num_rows] int64, drawn from the rows of `logits`."""
    device, asked = logits.device, [draw.sampling for draw in draws]
    numbers = [each.temperature for each in asked] + [each.top_p for each in asked]
    temperature, top_p = send(numbers, torch.float64, device).view(2, -1, 1).unbind()
    scores = logits.double() / temperature
    cut = [row for row, each in enumerate(asked) if each.top_p < 1]
    if cut:
        index = send(cut, torch.int64, device)
        is_out = _beyond(logits[index], temperature[index], top_p[index])
        scores[index] = scores[index].masked_fill(is_out, -torch.inf)
    origins = [each.seed or 0 for each in asked] + [draw.place for draw in draws]
    seeds, places = send(origins, torch.int64, device).view(2, -1, 1).unbind()
    tokens = torch.arange(logits.shape[-1], device=device)
    bits = _mix(_mix(_mix(seeds) + places) + tokens)
    # 52 bits and a half are exact in float64, above 0 and below 1.
    uniform = ((bits >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52
    return (scores - torch.log(-torch.log(uniform))).argmax(dim=-1)


def _beyond(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """[num_rows, vocab_size] bool: tokens that are not among the likeliest that reach top_p."""
    # In the order of their scores: the temperature, applied in float64, makes no two equal. Fewer
    # bits are sorted sooner.
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probability = (ordered.double() / temperature).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    is_out = before >= top_p
    is_out[:, 0] = False  # the likeliest token always stays
    return torch.zeros_like(is_out).scatter(-1, order, is_out)


def _mix(x: Tensor) -> Tensor:
    """A hash of each int64 of x; products wrap."""
    x = x + _GOLDEN
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX_1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX_2
    return x ^ (x >> 31 & (1 << 33) - 1)


def _logprobs(logits: Tensor, tokens: Tensor, draws: Sequence[Draw]) -> dict[int, TokenLogprob]:
    """The log-probabilities of the rows that want some."""
    wanted = {row: draw.sampling.num_logprobs for row, draw in enumerate(draws)}
    rows = [row for row, num_top in wanted.items() if num_top is not None]
    if not rows:
        return {}
    index = send(rows, torch.int64, logits.device)
    logprobs = logits[index].float().log_softmax(dim=-1)
    chosen = tokens[index].unsqueeze(1)
    most = max(wanted[row] or 0 for row in rows)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    # One wait for all of it: token ids and float32 are exact in float64.
    columns = (chosen, logprobs.gather(-1, chosen), ids, values)
    found = {}
    for row, (token, of_token, *rest) in zip(
        rows, torch.cat([t.double() for t in columns], dim=1).tolist(), strict=True
    ):
        pairs = zip(map(int, rest[: ids.shape[1]]), rest[ids.shape[1] :], strict=True)
        found[row] = TokenLogprob(int(token), of_token, tuple(pairs)[: wanted[row]])
    return found
