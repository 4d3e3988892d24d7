"""The soak run in small: benchmarks/soak.py with fewer requests, adapters and slots."""

from __future__ import annotations

from benchmarks.soak import Soak, run_soak


def test_answers_stay_right_while_everything_comes_and_goes() -> None:
    soak = run_soak(requests=150, adapters=9, slots=3, clients=12)
    assert soak.wrong == []
    assert soak.num_voices == 10
    assert soak.is_empty
    assert soak.is_memory_flat, soak.memory_bytes
    assert soak.outcomes["equal"] > 80
    assert soak.outcomes["left"] > 10
    assert min(soak.operations[verb] for verb in ("load", "replace", "unload")) >= 5
    assert soak.is_good


def test_a_run_that_went_wrong_says_so() -> None:
    good = {"is_empty": True, "num_voices": 13, "num_models": 13}
    assert Soak(**good, memory_bytes=[100 << 20] * 8).is_good
    assert not Soak(**good, wrong=["a0: other text"]).is_good
    assert not Soak(**good | {"is_empty": False}).is_good
    assert not Soak(**good | {"num_voices": 5}).is_good
    grown = [(100 + 10 * at) << 20 for at in range(8)]
    assert not Soak(**good, memory_bytes=grown).is_good
