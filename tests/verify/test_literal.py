"""The contract in words against recorded hardware and against the reference."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from lorafold.numerics import HOPPER, SEGMENT
from lorafold.ops import reference
from lorafold.verify import golden, literal
from lorafold.verify.check import compare
from tests.ops.literal import SPECIAL
from tests.verify.test_case import small

RECORDED = "2283196463615fa143e730472e1b3f4f78e5e1ab37190fd5cfa398a70c8a3e63"


def recorded_steps() -> list[str]:
    names = {name.rpartition("/")[0] for name in load_file(golden.RECORDINGS)}
    return sorted(name for name in names if name.startswith("step/"))


@pytest.mark.parametrize("prefix", recorded_steps())
def test_the_contract_in_words_equals_the_recorded_hardware(prefix):
    tensors = load_file(golden.RECORDINGS)
    x, w, c, out = (tensors[f"{prefix}/{name}"][:24] for name in ("x", "w", "c", "out"))
    table = [
        [literal.step(float(c[i, j]), x[i].tolist(), w[j].tolist(), HOPPER) for j in range(24)]
        for i in range(24)
    ]
    assert not compare(
        small(), torch.tensor(table, dtype=torch.float64).float(), out[:, :24]
    ).differences


PATTERNS = st.integers(0, 0xFFFF) | st.sampled_from(SPECIAL)


@given(st.data(), st.sampled_from([1, 7, 8, 9, 30]), st.sampled_from(["gemv", "mma"]))
def test_the_contract_in_words_equals_the_reference(data, k, numerics):
    drawn = data.draw(st.lists(PATTERNS, min_size=2 * k, max_size=2 * k))
    x, w = torch.tensor(drawn).short().view(torch.bfloat16).view(2, 1, k)
    in_words = literal.dot(x[0].tolist(), w[0].tolist(), numerics)
    computed = reference.dot(x, w, numerics)
    expected = torch.tensor([[in_words]], dtype=torch.float64).float()
    assert not compare(small(), computed, expected).differences


@given(PATTERNS, PATTERNS, st.floats(width=32))
def test_the_fold_in_words_equals_the_reference(out, delta, scale):
    both = torch.tensor([out, delta]).short().view(torch.bfloat16)
    in_words = literal.fold(float(both[0]), float(both[1]), scale)
    computed = reference.fold(both[:1], both[1:], scale)
    expected = torch.tensor([in_words], dtype=torch.float64).bfloat16()
    assert not compare(small(), computed, expected).differences


def test_the_recordings_are_those_of_the_h200() -> None:
    assert hashlib.sha256(golden.RECORDINGS.read_bytes()).hexdigest() == RECORDED
    assert len(recorded_steps()) == 13


def test_the_constants_are_those_of_the_contract() -> None:
    """The words, the reference and the kernels share them."""
    assert (HOPPER.step, HOPPER.bits, SEGMENT) == (16, 25, 1024)


def test_chains_of_segments_are_added_apart() -> None:
    """Control: one chain over both segments truncates what two chains keep."""
    x = [1.0] * SEGMENT + [2.0**-5] * 512
    w = [4096.0] * SEGMENT + [1.0] * 512
    assert literal.chain(x, w) != literal.dot(x, w, "mma")
    assert literal.chain(x[:SEGMENT], w[:SEGMENT]) == literal.dot(x[:SEGMENT], w[:SEGMENT], "mma")
