"""Without a GPU, kernels run in Triton's interpreter, which must be chosen before Triton loads."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# CI draws the same examples each time; elsewhere every run looks for new ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")
# Single-threaded operators leave the second core to the rest of the suite.
torch.set_num_threads(min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many elements were compared bit for bit, by test function."""
    from tests.ops.cases import compared

    totals: dict[str, int] = {}
    for test, count in compared.items():
        name = test.split("::")[-1].split("[")[0]
        totals[name] = totals.get(name, 0) + count
    if totals and terminalreporter.config.getoption("verbose") > 0:
        terminalreporter.section("elements compared bit for bit")
        for name, count in sorted(totals.items()):
            terminalreporter.write_line(f"{count:>14,}  {name}")
        terminalreporter.write_line(f"{sum(totals.values()):>14,}  in all")


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernel tests run: the GPU, or the CPU with Triton's interpreter made exact."""
    if torch.cuda.is_available():
        return "cuda"
    from tests import interpreter

    interpreter.install()
    return "cpu"
