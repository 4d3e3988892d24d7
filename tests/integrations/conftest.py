"""What several tests of the vLLM plugin share: folders, and the longest of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> Path:
    """A model and adapters for vLLM."""
    from tests.integrations.vllm_engine import write_folders

    root = tmp_path_factory.mktemp("vllm")
    write_folders(root)
    return root


@pytest.fixture(scope="session")
def two_ranks(folders) -> dict[str, Any]:
    """A run of tensor parallelism over two processes."""
    from tests.integrations.vllm_engine import EACH_ALONE, MANY, MIXED, by_name, generate, run

    results, printed = run(
        folders,
        [
            {"do": "add", "name": "cut"},
            {"do": "add", "name": "all"},
            {"do": "names"},
            {"do": "slot_bytes"},
            *EACH_ALONE,
            generate(MIXED),
            generate(MANY),
        ],
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    refused, added, loaded, slot_bytes, *each, mixed, many = results
    return {
        "refused": refused,
        "added": added,
        "loaded": loaded,
        "slot_bytes": slot_bytes,
        "alone": by_name(each),
        "mixed": mixed,
        "many": many,
        "printed": printed,
    }
