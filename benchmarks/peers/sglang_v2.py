"""SGLang 0.5.23's dense LoRA back end `triton_v2`, site by site.

As in the engine: its runner, its plan table for sm_90 (which picks among three shrinks, two expands
and several splits of K by rows, rank and widths) and its routes, built once per batch and therefore
outside the timed part. Up to 256 rows count as decoding, more as a prefill. The plans let the
shrink of decoding run beside the base GEMM on a second stream; here, where there is no base GEMM,
the shrink and the expand follow each other. Routes of more than 512 rows come from its Triton
builder for large batches instead of a compiled extension, in the extension's sizes.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.operands import Operands, PeerCalls
from benchmarks.peers.sglang import kernels, packed

__all__ = ["v2_calls"]

_DECODING_ROWS = 256
_SMALL_ROUTE_ROWS = 512
_ARCHITECTURE = "sm90"


def v2_calls(operands: Operands) -> PeerCalls:
    """The site's calls through the back end `triton_v2`."""
    code = kernels()
    runner = _runner(code, operands)
    offsets = (0, *torch.tensor(operands.n_outs).cumsum(0).tolist())
    plan = runner.plan_for(
        code.plan.DenseLoraKind.LINEAR,
        operands.rank,
        operands.k_in,
        offsets[-1],
        num_tokens=operands.num_rows,
    )
    a, b = packed(operands)
    return [
        partial(_call, runner, x, operands.window(a, i), operands.window(b, i), out, plan, offsets)
        for i, (x, out) in enumerate(zip(operands.xs, operands.outs, strict=True))
    ]


def _call(
    runner: Any, x: Tensor, a: Tensor, b: Tensor, out: Tensor, plan: Any, offsets: tuple[int, ...]
) -> None:
    bridge = runner.run_a(x, a, stack=len(offsets) - 1, plan=plan)
    runner.run_b(bridge, b, out, offsets=offsets, plan=plan)


def _runner(code: SimpleNamespace, operands: Operands) -> Any:
    """A runner that has begun a batch of these rows, with storage that graphs may use."""
    rows, slots = operands.num_rows, operands.num_adapters
    code.runner.build_route = (
        partial(_large_route, code) if rows > _SMALL_ROUTE_ROWS else code.routing.build_route
    )
    device = operands.slots.device
    runner = code.runner.DenseLoraRunner(
        code.workspace.LoraWorkspace(), max_loras=slots, device=device, architecture=_ARCHITECTURE
    )
    decoding = rows <= _DECODING_ROWS
    runner.begin_batch(
        token_slots=operands.slots,
        lora_ranks=torch.full((slots,), operands.rank, dtype=torch.int32, device=device),
        scalings=torch.full((slots,), operands.scale, dtype=torch.float32, device=device),
        num_tokens=rows,
        phase=code.utils.Phase.DECODE if decoding else code.utils.Phase.PREFILL,
        graph_mode=True,
        is_prefill_graph=not decoding,
    )
    return runner


def _large_route(
    code: SimpleNamespace, token_slots: Tensor, *, max_loras: int, block_size: int, **more: Any
) -> Any:
    """A route of many rows, reserved as for the extension: one bucket more than slots."""
    capacity = token_slots.numel() + (max_loras + 1) * (block_size - 1)
    return code.routing.build_route(
        token_slots, max_loras=max_loras, block_size=block_size, capacity=capacity, **more
    )
