"""Cases: narrowed, written, read back, compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from lorafold.errors import LoraError
from lorafold.verify import replay
from lorafold.verify.case import Case, read_case, smallest, write_case
from lorafold.verify.check import bits, compare
from lorafold.verify.checks import check_of
from lorafold.verify.operands import Shape, dense_case

CPU = torch.device("cpu")


def small(numerics: str = "gemv", **sizes: Any) -> Case:
    shape = {"rows": 6, "k": 20, "cols": 5, "ranks": (3, 0, 4)} | sizes
    return dense_case(Shape(**shape), numerics, 0)


@given(st.data())
def test_a_narrowed_case_means_the_part(data):
    """Whatever is cut off, the rest gives the bits that those rows, columns and slots gave."""
    case = small()
    whole = check_of("slots").sides(case, CPU)[1]
    rows = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
    cols = data.draw(st.tuples(st.integers(0, 2), st.integers(1, 3)))
    part = case.narrowed("rows", *rows).narrowed("cols", *cols)
    narrowed = check_of("slots").sides(part, CPU)[1]
    expected = whole[rows[0] : sum(rows), cols[0] : sum(cols)]
    assert torch.equal(bits(narrowed), bits(expected))
    slot = data.draw(st.integers(0, 2))
    alone = case.narrowed("adapters", slot, 1)
    assert alone["slots"].tolist() == [0 if s == slot else -1 for s in case["slots"].tolist()]
    rank = case.narrowed("rank", 2, 2)
    assert rank["ranks"].tolist() == [1, 0, 2]


@given(st.integers(0, 29), st.integers(0, 16))
def test_the_smallest_case_is_found(row, col):
    x = torch.zeros(30, 17)
    x[row, col] = 1.0
    case = Case({"x": x}, {"x": ("rows", "k")}, "gemv")
    found = smallest(case, lambda each: bool(each["x"].any()))
    assert found["x"].tolist() == [[1.0]]


def test_a_written_case_reads_back(tmp_path):
    case = small("mma")
    write_case(tmp_path / "case", case, {"check": "order", "first": None})
    read, about = read_case(tmp_path / "case")
    assert about == {"check": "order", "first": None}
    assert (read.numerics, read.axes) == ("mma", case.axes)
    assert read.tensors.keys() == case.tensors.keys()
    for name, tensor in case.tensors.items():
        assert torch.equal(bits(read[name]), bits(tensor))


def test_compare_counts_bits_and_not_values():
    case = small()
    zeros = torch.tensor([0.0, 0.0, torch.nan, torch.inf])
    other = torch.tensor([0.0, -0.0, torch.nan, torch.inf])
    other.view(torch.int32)[2] = 0x7FC00001
    outcome = compare(case, zeros, other)
    assert (outcome.elements, outcome.differences) == (4, 1)
    assert outcome.first == {
        "index": [1],
        "computed": "0 (0x00000000)",
        "expected": "-0 (0x80000000)",
    }
    with pytest.raises(ValueError, match="must fit"):
        compare(case, zeros, other[:2])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "must be a case that"),
        ({"format": "lorafold-verify-case-0"}, "given: lorafold-verify-case-0"),
        ({"format": "lorafold-verify-case-1"}, "header of .* is broken"),
        (
            {
                "format": "lorafold-verify-case-1",
                "numerics": "fp8",
                "axes": '{"x": ["rows"]}',
                "about": "{}",
            },
            "do not agree",
        ),
        (
            {
                "format": "lorafold-verify-case-1",
                "numerics": "gemv",
                "axes": '{"x": ["rows", "k"]}',
                "about": "{}",
            },
            "axes of the header",
        ),
        (
            {
                "format": "lorafold-verify-case-1",
                "numerics": "gemv",
                "axes": '{"x": ["rows"]}',
                "about": '{"check": "of another version"}',
            },
            "this version has",
        ),
    ],
)
def test_files_that_are_no_cases_are_refused(header, message, tmp_path):
    file = tmp_path / "case.safetensors"
    save_file({"x": torch.zeros(2)}, file, metadata=header)
    with pytest.raises(LoraError, match=message):
        replay(file)


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(LoraError, match="cannot be read"):
        replay(tmp_path / "nothing")
    (tmp_path / "broken").write_bytes(b"\x00" * 20)
    with pytest.raises(LoraError, match="cannot be read"):
        replay(tmp_path / "broken")
    with pytest.raises(LoraError, match="cannot be written"):
        write_case(tmp_path / "no" / "folder", small(), {})
