"""Patterns and scales: PEFT's own matching rule, and what is refused of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from lorafold.errors import AdapterFormatError
from lorafold.peft.scale import ScaleRule, round_scale
from lorafold.refusal import Decisions

PATHS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.qq_proj", "mlp.experts.gate_up_proj", "mlp.gate")
] + ["lm_head", "q_proj"]
KEYS = [
    "q_proj", "self_attn.q_proj", "layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj",
    "^model.layers.0.self_attn.q_proj", "^q_proj", r".*\.gate_up_proj", "lm_head", "0.mlp.gate",
    r"layers\.\d+\.mlp\.gate", "(q_proj|gate)", "q.proj", ".*q_proj", "q_proj$", "proj", "",
]  # fmt: skip


def rule(rank_pattern: Any = None, alpha_pattern: Any = None, **settings: Any) -> ScaleRule:
    fields = {"rank": 8, "alpha": 16.0, "use_rslora": False} | settings
    decisions = Decisions("sql", strict=fields.pop("strict", True))
    return ScaleRule(
        **fields,
        rank_pattern=rank_pattern or {},
        alpha_pattern=alpha_pattern or {},
        decisions=decisions,
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("path", PATHS)
def test_one_pattern_matches_where_peft_matches_it(key: str, path: str) -> None:
    matched = get_pattern_key([key], path) == key
    rank, alpha = rule({key: 4}, {key: 3}).of([path])
    assert rank == (4 if matched else 8)
    assert alpha == (3 if matched else 16)


@given(
    st.dictionaries(st.sampled_from(KEYS), st.integers(1, 3), max_size=4), st.sampled_from(PATHS)
)
def test_patterns_give_what_peft_gives_in_every_order_or_are_refused(
    pattern: dict[str, int], path: str
) -> None:
    orders = [dict(pattern), dict(reversed(pattern.items())), dict(sorted(pattern.items()))]
    results = {order.get(get_pattern_key(order.keys(), path), 8) for order in orders}
    if len({v for k, v in pattern.items() if get_pattern_key([k], path) == k}) > 1:
        with pytest.raises(AdapterFormatError) as caught:
            rule(pattern).of([path])
        assert caught.value.code == "ambiguous-scale"
    else:
        assert results == {rule(pattern).of([path])[0]}


def test_names_that_stand_for_one_another_must_agree() -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert rule({"mlp.experts.*": 4}).of(names) == (4, 16)
    with pytest.raises(AdapterFormatError, match="which of") as caught:
        rule(alpha_pattern={"down_proj": 4}).of(names)
    assert caught.value.code == "ambiguous-scale"


def test_unmatched_patterns_are_refused_with_a_hint() -> None:
    prefixed = rule({"base_model.model.model.layers.0.self_attn.q_proj": 4})
    prefixed.of(["model.layers.0.self_attn.q_proj"])
    with pytest.raises(AdapterFormatError, match=r"without `base_model\.model\.`"):
        prefixed.check_used()
    lenient = rule({"k_proj": 4}, strict=False)
    lenient.of(["q_proj"])
    lenient.check_used()
    used = rule({"q_proj": 4})
    used.of(["q_proj"])
    used.check_used()


@pytest.mark.parametrize(
    ("alpha", "rank", "use_rslora", "scale"),
    [
        (16.0, 8, False, 2.0),
        (16.0, 12, False, 1.3333333730697632),
        (16.0, 8, True, 5.656854152679443),
        (None, 8, False, 1.0),
        (-3.0, 2, False, -1.5),
    ],
)
def test_scales(alpha: float | None, rank: int, use_rslora: bool, scale: float) -> None:
    assert rule(use_rslora=use_rslora).scale(alpha, rank) == scale


@given(st.floats(1e-30, 1e30), st.integers(1, 4096))
def test_a_scale_is_the_nearest_float32(alpha: float, rank: int) -> None:
    scale = rule().scale(alpha, rank)
    assert round_scale(scale) == scale
    assume(scale > 1e-37)
    assert abs(scale - alpha / rank) <= alpha / rank * 2**-24


def test_a_scale_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(AdapterFormatError) as caught:
        rule().scale(1e39, 1)
    assert caught.value.code == "bad-config"


@pytest.mark.parametrize(
    "key",
    [
        "(a+)+",
        "(a|a)*b",
        "(?:a+)+",
        r"(a)\1",
        ".*.*.*.*",
        "(a*){9}",
        "a{1,9}{1,9}{1,9}{1,9}",
        "a?" * 30 + "a" * 30,
        "(a|a)" * 30 + "b",
        "((a|b)|(a|b))" * 8,
        "(a[])]|a)" * 30,
        r"(a[\]]|a|a)" * 30,
        ".*.*" + "(a|b)" * 9,
        "x" * 513,
    ],
)
def test_patterns_that_could_take_for_ever_are_refused(key: str) -> None:
    with pytest.raises(AdapterFormatError) as caught:
        rule({key: 4})
    assert caught.value.code == "unsafe-pattern"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (".*a.*a.*ab", "a" * 256),
        ("a?" * 21 + "a" * 21 + "b", ("a" * 21 + ".") * 11 + "a"),
        ("(a|a)" * 21 + "b", "a" * 21 + "c"),
    ],
    ids=["repeats", "optional parts", "alternatives"],
)
def test_the_slowest_patterns_that_are_allowed_end(key: str, name: str) -> None:
    started = time.monotonic()
    assert rule({key: 4}).of([name])[0] == 8
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "key",
    [
        rf"model\.layers\.({'|'.join(map(str, range(64)))})\.(self_attn|mlp)\.(q|k|v|up)_proj",
        r".*\.(0|1|2|3)\..*(q|k)_proj",
        r"layers\.[0-9]+\.mlp\.(gate_proj|up_proj|down_proj)",
        r"visual\.blocks\.\d+\.attn\.qkv?",
    ],
)
def test_patterns_as_people_write_them_are_allowed(key: str) -> None:
    rule({key: 4})


def test_many_patterns_on_many_modules_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafold.peft.scale._MATCH_SECONDS", 0.0)
    with pytest.raises(AdapterFormatError, match="took longer") as caught:
        rule({"q_proj": 4}).of(["q_proj"])
    assert caught.value.code == "unsafe-pattern"
