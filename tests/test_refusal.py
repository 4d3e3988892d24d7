"""Codes and decisions: what may be downgraded, and how a refusal reads."""

from __future__ import annotations

import re

import pytest

from lorafold.errors import AdapterFormatError, AdapterMismatchError
from lorafold.refusal import DOWNGRADABLE, Decisions, Refusal, listed, refuse


def test_codes_are_words_and_differ() -> None:
    codes = [refusal.value for refusal in Refusal]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in codes)
    assert len({refusal.meaning for refusal in Refusal}) == len(codes)


@pytest.mark.parametrize("refusal", Refusal)
def test_every_refusal_is_an_error_with_its_code(refusal: Refusal) -> None:
    error = refuse(refusal, "because", adapter="sql")
    assert isinstance(error, AdapterFormatError | AdapterMismatchError)
    assert str(error) == f"`sql`: because [{refusal.value}]"
    assert (error.code, error.adapter) == (refusal.value, "sql")


@pytest.mark.parametrize("refusal", Refusal)
def test_only_the_downgradable_are_tolerated(refusal: Refusal) -> None:
    lenient = Decisions("sql", strict=False)
    if refusal in DOWNGRADABLE:
        lenient.tolerate(refusal, "because")
        assert lenient.skipped == [f"{refusal.value}: because"]
        with pytest.raises((AdapterFormatError, AdapterMismatchError), match="with strict off"):
            Decisions("sql").tolerate(refusal, "because")
    else:
        with pytest.raises((AdapterFormatError, AdapterMismatchError)):
            lenient.tolerate(refusal, "because")
        assert not lenient.skipped


def test_long_lists_and_names_are_cut() -> None:
    assert listed(["b", "a"]) == "`a`, `b`"
    assert listed(range(20), limit=2) == "`0`, `1` and 18 more"
    assert len(listed(["x" * 1000])) == 202


def test_no_word_of_a_file_reaches_a_terminal_as_it_is() -> None:
    error = refuse(Refusal.UNKNOWN_TENSOR, "`q\x1b[31m\ud800`\nhint: `é`", adapter="s\x00")
    assert str(error) == r"`s\x00`: `q\x1b[31m\ud800`" + "\nhint: `é` [unknown-tensor]"
    lenient = Decisions("sql", strict=False)
    lenient.note("\x9b2J")
    lenient.tolerate(Refusal.UNKNOWN_FIELD, "\ud800")
    assert (lenient.notes, lenient.skipped) == ([r"\x9b2J"], [r"unknown-field: \ud800"])
