"""Which numerics a call uses: never by its batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lorafold.errors import BackendError
from lorafold.numerics import (
    HOPPER,
    TensorCoreModel,
    _is_measured,
    default_numerics,
    device_model,
    resolve,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_cpu_sums_in_plain_fp32():
    assert default_numerics(CPU) == "gemv"
    assert resolve(None, CPU) == "gemv"
    assert device_model(CPU) is None


@pytest.fixture(autouse=True)
def forget_devices() -> Iterator[None]:
    """What a device can do is asked once; these tests change it."""
    _is_measured.cache_clear()
    yield
    _is_measured.cache_clear()


@pytest.mark.parametrize(
    ("capability", "default", "model"),
    [
        ((9, 0), "mma", HOPPER),
        ((10, 0), "gemv", HOPPER),  # published, not measured
        ((8, 6), "gemv", TensorCoreModel(step=8, bits=24)),
        ((7, 5), "gemv", None),
    ],
)
def test_tensor_cores_serve_where_they_were_measured(monkeypatch, capability, default, model):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert default_numerics(CUDA) == default
    assert device_model(CUDA) == model
    assert resolve("mma", CUDA) == "mma"


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("LORAFOLD_NUMERICS", " MMA ")
    assert default_numerics(CPU) == "mma"
    assert resolve("gemv", CPU) == "gemv"  # an argument decides before it
    monkeypatch.setenv("LORAFOLD_NUMERICS", "fast")
    with pytest.raises(
        BackendError, match=r'"gemv" or "mma", or None for the default; given: \'fast'
    ):
        default_numerics(CPU)
