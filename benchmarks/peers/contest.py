"""Who is measured beside us on a dense site, how each is called, and the gate before a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.peers.agreement import worst_error
from benchmarks.peers.operands import Operands, PeerCalls, stack
from benchmarks.peers.sglang import csgmv_calls, triton_calls
from benchmarks.peers.sglang_v2 import v2_calls
from benchmarks.peers.vllm import site_calls
from lorafold.bench import Workload, graph_us, rounded
from lorafold.ops import apply_lora_bgmv

__all__ = ["CONTESTANTS", "Contestant", "gated_us", "measure_peers", "our_result", "run_peers_once"]


@dataclass(frozen=True)
class Contestant:
    """One way of one engine."""

    name: str
    column: str
    prepare: Callable[[Operands], PeerCalls]


CONTESTANTS = (
    Contestant("vllm", "vllm_us", partial(site_calls, invariant=False)),
    Contestant("vllm-bi", "vllm_bi_us", partial(site_calls, invariant=True)),
    Contestant("triton", "sglang_us", triton_calls),
    Contestant("csgmv", "sglang_us", partial(csgmv_calls, max_chunk=16)),
    Contestant("csgmv-128", "sglang_us", partial(csgmv_calls, max_chunk=128)),
    Contestant("triton_v2", "sglang_us", v2_calls),
)
"""In a column with several, the fastest counts."""


def measure_peers(load: Workload, numerics: str) -> dict[str, Any]:
    """Each column's time, or None where nothing in it was right.

    Returns:
        The columns, `sglang` (the back end that was fastest), and `peers`: by name what was
        measured, in microseconds, or a word on why there is no time.
    """
    operands = stack(load)
    before = operands.outs[0].clone()
    ours = our_result(load, before, numerics)
    results: dict[str, float | str] = {}
    record: dict[str, Any] = dict.fromkeys((c.column for c in CONTESTANTS), None)
    record["sglang"] = None
    for contestant in CONTESTANTS:
        check = partial(_error, operands, before, ours)
        result = gated_us(partial(contestant.prepare, operands), check)
        results[contestant.name] = result
        best = record[contestant.column]
        if isinstance(result, float) and (best is None or result < best):
            record[contestant.column] = result
            if contestant.column == "sglang_us":
                record["sglang"] = contestant.name
    record["peers"] = results
    return record


def run_peers_once(load: Workload) -> None:
    """Call everybody once, so that all is compiled; what breaks here breaks again when measured."""
    operands = stack(load)
    for contestant in CONTESTANTS:
        with contextlib.suppress(Exception):
            contestant.prepare(operands)[0]()


def gated_us(
    prepare: Callable[[], PeerCalls], error: Callable[[Callable[[], None]], float]
) -> float | str:
    """Microseconds per call if the first call is right; else a word on what is not."""
    try:
        calls = prepare()
        worst = error(calls[0])
        if not worst <= 1:
            return f"wrong: off by {worst:.3g} times the tolerance"
        for call in calls:  # caches of the engines, which a capture could not fill
            call()
        torch.cuda.synchronize()
        return rounded(graph_us(calls))
    except Exception as problem:  # a peer that breaks must not end the run: its row says so
        return f"failed: {type(problem).__name__}: {problem}".splitlines()[0][:200]


def our_result(
    load: Workload, before: torch.Tensor, numerics: str, repetition: int = 0
) -> torch.Tensor:
    """Our result of one call on the packed output `before`, packed."""
    call = load.calls[repetition]
    ours = before.clone()
    outs = ours.split([out.shape[1] for out in call.outs], dim=1)
    apply_lora_bgmv(
        call.routes, call.x, outs, load.slots,
        plan=load.plan, numerics=numerics, scratch=load.scratch,
    )  # fmt: skip
    return ours


def _error(
    operands: Operands, before: torch.Tensor, ours: torch.Tensor, call: Callable[[], None]
) -> float:
    out = operands.outs[0]
    out.copy_(before)
    call()
    return worst_error(before, ours, out)
