"""The checks of kernels and of tensor-core steps, interpreted where there is no GPU."""

from __future__ import annotations

import torch

from lorafold.numerics import TensorCoreModel
from lorafold.ops import reference
from lorafold.verify import tensor_cores_follow
from lorafold.verify.check import Extent, compare
from lorafold.verify.kernels import tile_sizes
from lorafold.verify.tensor_cores import device_step, step_cases
from tests.verify.test_case import small

CPU = torch.device("cpu")


def test_tiles_do_not_matter_in_the_kernels(device):
    """The check for CUDA devices, on this device's kernels: interpreted where there is no GPU."""
    for numerics in ("gemv", "mma"):
        case = small(numerics, rows=17, k=1032, cols=7, ranks=(3, 2))
        outcome = compare(case, *tile_sizes(case, torch.device(device)))
        assert outcome.elements > 17 * 7 * 5
        assert not outcome.differences, outcome.first


def test_steps_of_the_device_follow_the_model(device):
    """Interpreted, this is the model against itself, and tests the kernel around the step."""
    for case in step_cases(Extent(torch.device(device), quick=True), "mma"):
        part = case.narrowed("tiles", 0, 1).narrowed("cols", 0, 5).narrowed("rows", 0, 21)
        expected = reference.mma_chain(part["x"], part["w"], part["c"])
        for block_rows in (16, 64):
            computed = device_step(part, torch.device(device), block_rows)
            assert not compare(part, computed, expected).differences


def test_step_cases_tell_models_apart():
    """Control: every kind of operands but the trivial ones shows another number of bits."""
    shown = 0
    for case in step_cases(Extent(CPU, quick=True), "mma"):
        one, two = (
            reference.mma_chain(case["x"], case["w"], case["c"], model=TensorCoreModel(16, bits))
            for bits in (25, 24)
        )
        shown += compare(case, one, two).differences > 0
    assert shown >= 9


def test_a_cpu_has_no_tensor_cores_to_follow():
    assert tensor_cores_follow("cpu") is False
