"""Whether a device is there, and what it has left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lorafold.device import free_bytes, usable_device
from lorafold.errors import BackendError


def test_a_device_that_is_there(device: str) -> None:
    assert usable_device(device) == torch.device(device)
    assert usable_device(torch.device("cpu")) == torch.device("cpu")
    assert usable_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "", "cpu:x"])
def test_one_that_is_not(name: str) -> None:
    with pytest.raises(BackendError, match=f"device `{name}` is not there; devices here: cpu"):
        usable_device(name)


def test_free_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_bytes(torch.device(device))
    assert free is None or free > 1 << 20

    def unreadable(_: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert free_bytes(torch.device("cpu")) is None
