"""The command line, used wrongly: exit code 2, and what is said."""

from __future__ import annotations

import pytest

from tests.test_cli import cli


def test_wrong_usage_is_exit_code_2():
    assert "No such command" in cli("unknown", code=2)
    assert "the checks are" in cli("verify", "--only", "nothing", code=2)
    assert "--replay runs one" in cli("verify", "--replay", "x", "--quick", code=2)
    assert "Missing argument" in cli("inspect", code=2)


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["verify"],
        ["bench"],
        ["plan", "--model", "x"],
        ["serve", "--model", "x"],
        ["generate", "x", "w5"],
    ],
    ids=lambda words: words[0],
)
def test_a_device_that_is_not_there_is_wrong_usage(words):
    assert "device `gpu` is not there; devices here: cpu" in cli(*words, "--device", "gpu", code=2)
    assert "is not there" in cli(*words, "--device", "cuda:99", code=2)


@pytest.mark.parametrize("words", [["verify"], ["generate", "x", "w5"]], ids=lambda w: w[0])
@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_that_no_generator_takes_is_wrong_usage(words, seed):
    assert "--seed" in cli(*words, "--seed", seed, code=2)
