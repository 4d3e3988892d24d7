"""A base whose rows do not depend on the batch, so that an answer alone equals one among others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tiny_models import make_model, write_adapter

TARGETS = (["q_proj", "v_proj"], ["o_proj", "up_proj"], ["k_proj", "gate_proj", "down_proj"])


@pytest.fixture
def exact_base() -> Iterator[None]:
    """PyTorch's own CPU products instead of oneDNN's.

    Each row of a product is then computed by itself (test_packed.py checks it), where oneDNN takes
    another way for a single row. All else in a packed step is per row, or per request.
    """
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(True)


@pytest.fixture(scope="session")
def plain() -> nn.Module:
    return make_model("llama")


@pytest.fixture(scope="session")
def folders(plain: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Six adapters of different targets, ranks and scales."""
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(plain, root / f"a{i}", TARGETS[i % 3], rank=2 + i, alpha=4.0 + i, seed=i)
        for i in range(6)
    ]
