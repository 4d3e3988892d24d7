"""The list of all checks. A new one is a function of a case and a device, and an entry here."""

from __future__ import annotations

from collections.abc import Iterator

from lorafold.numerics import Numerics
from lorafold.verify import dense, experts, golden, kernels, tensor_cores
from lorafold.verify.case import Case
from lorafold.verify.check import Check, Extent
from lorafold.verify.operands import all_cases, dense_cases, expert_cases, small_cases

__all__ = ["CHECKS", "check_of"]


def _first_case(extent: Extent, numerics: Numerics) -> Iterator[Case]:
    """The first dense case: cancelling, with more than one segment."""
    yield next(dense_cases(extent, numerics))


CHECKS: tuple[Check, ...] = (
    Check(
        "recordings",
        "the CPU's tensor-core model gives what an H200 gave",
        golden.recorded,
        golden.recordings,
        numerics=("mma",),
    ),
    Check(
        "tensor cores",
        "this device's tensor cores follow the model, step by step",
        tensor_cores.steps,
        tensor_cores.step_cases,
        numerics=("mma",),
        needs_cuda=True,
        needs_model=True,
        launches=tensor_cores.step_launches,
    ),
    Check(
        "controls",
        "the operands below would show a wrong order, a missing segment, a fused fold",
        dense.controls,
        _first_case,
    ),
    Check(
        "contract",
        "the operator gives what the contract gives, number by number",
        dense.contract,
        small_cases,
        needs_model=True,
        launches=dense.contract_launches,
    ),
    Check(
        "device is CPU",
        "the kernels give the bits of the CPU reference",
        kernels.device_is_cpu,
        all_cases,
        needs_cuda=True,
        needs_model=True,
        launches=kernels.plain_launches,
    ),
    Check("row alone", "a row alone is the row in a batch", dense.row_alone, dense_cases),
    Check("order", "the order of rows does not matter", dense.order, dense_cases),
    Check(
        "neighbours",
        "NaN, infinities and huge numbers stay in their own rows",
        dense.neighbours,
        dense_cases,
    ),
    Check("chunks", "a prefill in chunks is the whole prefill", dense.chunks, dense_cases),
    Check(
        "padding",
        "max_rank of the pool does not matter",
        dense.padding,
        dense_cases,
        launches=dense.padding_launches,
    ),
    Check("slots", "the slot of an adapter does not matter", dense.slot_numbers, dense_cases),
    Check(
        "one adapter",
        "a batch of one adapter is that adapter alone, unpadded",
        dense.one_adapter,
        dense_cases,
    ),
    Check("together", "targets that share x can share a call", dense.together, dense_cases),
    Check("planned", "a plan and scratch of the caller do not matter", dense.planned, dense_cases),
    Check(
        "guard cells",
        "strided views leave the cells around them alone",
        dense.guard_cells,
        dense_cases,
    ),
    Check("base rows", "rows without an adapter keep every bit", dense.untouched_rows, dense_cases),
    Check("repeats", "a call gives the same bits every time", dense.repeats, _first_case),
    Check(
        "tiles",
        "block sizes, warps and stages do not matter",
        kernels.tile_sizes,
        _first_case,
        needs_cuda=True,
        in_quick=False,  # each candidate is a kernel to compile
        launches=kernels.tile_launches,
    ),
    Check(
        "graph",
        "replays of a CUDA graph read new slots and rows",
        kernels.graph_replays,
        dense_cases,
        needs_cuda=True,
        is_exclusive=True,
    ),
    Check("windows", "windows of expert rows do not matter", experts.windows, expert_cases),
    Check(
        "grouped",
        "expert rows sorted are expert rows gathered",
        experts.grouped_is_gathered,
        expert_cases,
    ),
    Check(
        "gathered",
        "expert rows are dense rows of a slot per expert",
        experts.gathered_is_dense,
        expert_cases,
    ),
)
"""All checks, in the order in which they run."""


def check_of(name: str) -> Check | None:
    """The check of a name, None if there is none."""
    return next((check for check in CHECKS if check.name == name), None)
