"""Choosing tokens: what a seed promises, and that draws follow the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorafold.engine import RequestError, Sampling
from lorafold.engine.sampler import Draw, choose_tokens

VOCAB = 50


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def tokens(scores: torch.Tensor, draws: list[Draw]) -> list[int]:
    return [choice.token for choice in choose_tokens(scores, draws)]


def test_without_temperature_the_likeliest_token_is_taken() -> None:
    scores = logits(5)
    assert tokens(scores, [Draw(Sampling(), 3)] * 5) == scores.argmax(dim=1).tolist()


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-200, 1e-29])
def test_the_coldest_draw_takes_the_likeliest_token(temperature: float) -> None:
    scores = logits(5)
    draws = [Draw(Sampling(temperature=temperature, seed=1), 0)] * 5
    assert tokens(scores, draws) == scores.argmax(dim=1).tolist()


@settings(deadline=None, max_examples=30)
@given(
    seeds=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    place=st.integers(0, 10_000),
    top_p=st.sampled_from([0.3, 1.0]),
)
def test_a_draw_depends_on_its_row_seed_and_place_alone(
    seeds: list[int], place: int, top_p: float
) -> None:
    scores = logits(len(seeds)).bfloat16()
    draws = [Draw(Sampling(temperature=0.8, top_p=top_p, seed=seed), place) for seed in seeds]
    together = tokens(scores, draws)
    for row, draw in enumerate(draws):
        assert tokens(scores[row : row + 1], [draw]) == [together[row]]
        neighbours = [Draw(Sampling(), 0), draw, Draw(Sampling(temperature=1, seed=7), 1)]
        assert tokens(scores[[0, row, 0]], neighbours)[1] == together[row]


def test_seeds_and_places_give_different_draws() -> None:
    scores = torch.zeros(400, VOCAB)
    by_seed = tokens(scores, [Draw(Sampling(temperature=1, seed=s), 0) for s in range(400)])
    by_place = tokens(scores, [Draw(Sampling(temperature=1, seed=0), p) for p in range(400)])
    for drawn in (by_seed, by_place):
        assert len(set(drawn)) == VOCAB
    # Seed 1 is not seed 0 a place later.
    shifted = tokens(scores, [Draw(Sampling(temperature=1, seed=1), p) for p in range(400)])
    assert sum(a == b for a, b in zip(by_place[1:], shifted, strict=False)) < 40


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    num, row = 20_000, logits(1)[0, :12]
    draws = [Draw(Sampling(temperature=temperature, seed=s // 100), s % 100) for s in range(num)]
    drawn = torch.tensor(tokens(row.expand(num, -1), draws)).bincount(minlength=12)
    expected = (row.double() / temperature).softmax(0) * num
    # Chi-squared with 11 degrees of freedom is above 31 once in a thousand.
    assert float(((drawn - expected) ** 2 / expected).sum()) < 31


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    probabilities = torch.tensor([0.05, 0.5, 0.15, 0.3])
    scores = probabilities.log().expand(2000, -1)
    for top_p, kept in (
        (0.4, {1}),
        (0.5, {1}),
        (0.51, {1, 3}),
        (0.9, {1, 2, 3}),
        (1.0, {0, 1, 2, 3}),
    ):
        draws = [Draw(Sampling(temperature=1, top_p=top_p, seed=s), 0) for s in range(2000)]
        assert set(tokens(scores, draws)) == kept, top_p


def test_a_batch_may_mix_greedy_drawn_and_nucleus_rows() -> None:
    row = logits(1)[0]
    drawn = Draw(Sampling(temperature=1.5, seed=3), 2)
    nucleus = Draw(Sampling(temperature=1.5, top_p=0.2, seed=3), 2)
    mixed = tokens(row.expand(3, -1), [drawn, Draw(Sampling(), 0), nucleus])
    assert mixed == [*tokens(row[None], [drawn]), int(row.argmax()), *tokens(row[None], [nucleus])]


def test_logprobs_are_those_of_the_model_and_only_for_those_who_ask() -> None:
    scores = logits(3)
    wants = Sampling(temperature=2.0, seed=1, num_logprobs=4)
    first, second, third = choose_tokens(
        scores, [Draw(wants, 0), Draw(Sampling(), 0), Draw(Sampling(num_logprobs=0), 0)]
    )
    assert second.logprob is None
    exact = scores.double().log_softmax(dim=1)
    assert first.logprob is not None
    assert first.logprob.token == first.token
    assert first.logprob.logprob == pytest.approx(float(exact[0, first.token]), abs=1e-5)
    values, ids = exact[0].topk(4)
    assert [token for token, _ in first.logprob.top] == ids.tolist()
    assert [p for _, p in first.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert third.logprob is not None
    assert third.logprob.top == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 .. inf; given: 0"),
        ({"temperature": -0.1}, "temperature must be 0 .. 100"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"top_p": 1.01}, "top_p must be above 0"),
        ({"top_p": math.nan}, "top_p must be above 0"),
        ({"seed": 2**63}, "seed must be"),
        ({"num_logprobs": 21}, "num_logprobs must be 0 .. 20"),
        ({"stop": ("",)}, "stop strings"),
        ({"stop": ("x",) * 17}, "16 stop strings"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Sampling(**wrong)  # type: ignore[arg-type]
