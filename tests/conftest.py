"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before Triton loads."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Single-threaded operators leave the second core to the rest of the suite.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernel tests run: the GPU, or the CPU with Triton's interpreter made exact."""
    if torch.cuda.is_available():
        return "cuda"
    from tests import interpreter

    interpreter.install()
    return "cpu"
