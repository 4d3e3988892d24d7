"""LoRA on the experts of Qwen3-30B-A3B: device time of the projections, of a layer, and of vLLM.

    python -m benchmarks.experts [--ranks 16,64] [--adapters 1,8] [--peers] [--json [FILE]]

128 experts, 8 per token, hidden size 2048, inner size 768; the tokens choose at random. Each
projection is first checked bit for bit against the CPU reference on sampled rows. `gate_up` is one
fused target with one A (how transformers 5 holds these experts); `gate+up` are two targets, each
with its own A, one operator call each; the table of other engines uses the latter. Our layer is the
plan, gate_up and down; vLLM's two kernels are timed without the sort that they need. The floor
counts each (adapter, expert) pair in use once, x once, outputs read and written once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.expert_sites import INNER, PROJECTIONS, SCALE, ExpertLoad
from benchmarks.record import add_json_option, describe, save
from lorafold.bench import geomean, graph_us, rounded
from lorafold.numerics import default_numerics
from lorafold.ops import Plan

__all__ = ["check", "main"]

TOKENS = (1, 8, 64, 256, 2048)


def check(load: ExpertLoad, rows: int = 2) -> int:
    """Compare sampled rows of the first call with the reference; how many elements that were."""
    numerics = default_numerics(load.slots.device)
    num_rows = load.num_tokens * load.top_k
    sample = torch.linspace(0, num_rows - 1, rows).int().tolist()
    expected = {row: load.truth(row, numerics) for row in sample}
    load.run(0)
    out = load.calls[0].out
    for row, truth in expected.items():
        if not torch.equal(out[row].cpu().view(torch.int16), truth.view(torch.int16)):
            raise SystemExit(f"{load.projection.name} R{load.rank} row {row}: bits differ")
    return sum(truth.numel() for truth in expected.values())


def layer(gate_up: ExpertLoad, down: ExpertLoad, plan: Plan, index: int) -> None:
    """What one layer of a model runs: a plan from the router's choice, then both projections."""
    call = gate_up.calls[index % gate_up.repetitions]
    gate_up.make_plan(call.routes[0], call.experts, plan)
    for load in (gate_up, down):
        load.run(index, choice=(call.experts, plan))


def measure(rank: int, num_tokens: int, adapters: int, peers: bool) -> dict[str, Any]:
    """One row of the table."""
    loads = {p.name: ExpertLoad(p, rank, num_tokens, adapters) for p in PROJECTIONS}
    gate_up, down = loads["gate_up"], loads["down"]
    record: dict[str, Any] = {
        "rank": rank,
        "adapters": adapters,
        "tokens": num_tokens,
        "pairs": gate_up.num_pairs,
        "elements": sum(check(load) for load in loads.values()),
    }
    num_keys = gate_up.calls[0].routes[0].num_keys
    plan = Plan.empty(num_tokens * gate_up.top_k, num_keys, gate_up.device)
    record["plan_us"] = rounded(
        graph_us([partial(gate_up.make_plan, c.routes[0], c.experts, plan) for c in gate_up.calls])
    )
    for load in loads.values():
        name = load.projection.name
        record[f"{name} floor_us"] = rounded(load.floor_us)
        record[f"{name} us"] = rounded(graph_us(load.timed()))
        if peers:
            record |= {f"{name} {k}": v for k, v in measure_vllm(load).items()}
    repetitions = range(max(gate_up.repetitions, down.repetitions))
    record["layer floor_us"] = rounded(gate_up.floor_us + down.floor_us)
    record["layer us"] = rounded(
        graph_us([partial(layer, gate_up, down, plan, i) for i in repetitions])
    )
    if peers:
        for mode in ("vllm_us", "vllm_bi_us"):
            parts = (record[f"gate_up {mode}"], record[f"down {mode}"])
            timed = all(isinstance(part, float) for part in parts)
            record[f"layer {mode}"] = rounded(sum(parts)) if timed else None
    return record


def measure_vllm(load: ExpertLoad) -> dict[str, float | str]:
    """vLLM's fused kernels on the same operands, in both modes, or a word on why not."""
    from benchmarks.peers.contest import gated_us
    from benchmarks.peers.vllm_experts import expert_calls

    before = load.calls[0].out.clone()
    ours = before.clone()
    load.run(0, out=ours)
    repetitions = vllm_operands(load)
    return {
        column: gated_us(
            partial(expert_calls, repetitions, INNER, invariant=invariant),
            partial(_error, load, before, ours),
        )
        for column, invariant in (("vllm_us", False), ("vllm_bi_us", True))
    }


def vllm_operands(load: ExpertLoad) -> list[Any]:
    """Each repetition's operands in vLLM's layout; only B, times the scale, is a copy."""
    from benchmarks.peers.vllm import scaled
    from benchmarks.peers.vllm_experts import ExpertOperands

    b = [scaled(pool, SCALE) for pool in load.b]
    shape = (load.num_tokens, load.top_k)
    experts = {call.experts.data_ptr(): call.experts.view(shape) for call in load.calls}
    repetitions = []
    for call in load.calls:
        window = slice(call.first, call.first + load.num_adapters)
        repetitions.append(
            ExpertOperands(
                x=call.x,
                out=call.out.view(*shape, -1),
                a=tuple(pool[window] for pool in load.a),
                b=tuple(pool[window] for pool in b),
                experts=experts[call.experts.data_ptr()],
                slots=load.slots,
                is_down=load.projection.is_down,
            )
        )
    return repetitions


def _error(load: ExpertLoad, before: Tensor, ours: Tensor, call: Callable[[], None]) -> float:
    from benchmarks.peers.agreement import worst_error

    out = load.calls[0].out
    out.copy_(before)
    call()
    return worst_error(before, ours, out)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--adapters", default="1,8")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--peers", action="store_true", help="also time vLLM's kernels")
    add_json_option(parser, "experts")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for rank in map(int, args.ranks.split(",")):
        for adapters in map(int, args.adapters.split(",")):
            for num_tokens in map(int, args.tokens.split(",")):
                row = measure(rank, num_tokens, adapters, args.peers)
                rows.append(row)
                print(" | ".join(f"{k} {v}" for k, v in row.items()), flush=True)
                record = describe("experts", rows, geomean=means(rows), **_versions(args.peers))
                save(record, args.json)
    print(f"geometric means of our time over: {means(rows)}")
    print(json.dumps(record))


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Geometric means over the rows that have both: our time over the floor's and vLLM's.

    Example:
        >>> means([{"layer us": 3.0, "layer floor_us": 1.5, "layer vllm_us": None}])
        {'layer floor_us': 2.0}
    """
    names = [*(p.name for p in PROJECTIONS), "layer"]
    columns = [f"{n} {c}" for n in names for c in ("floor_us", "vllm_us", "vllm_bi_us")]
    ratios = {
        column: geomean(
            [
                row[f"{column.rpartition(' ')[0]} us"] / row[column]
                for row in rows
                if isinstance(row.get(column), float)
            ]
        )
        for column in columns
    }
    return {column: ratio for column, ratio in ratios.items() if ratio is not None}


def _versions(peers: bool) -> dict[str, Any]:
    if not peers:
        return {}
    from benchmarks.peers.fetch import VERSIONS

    return {"peer_versions": {"vllm": VERSIONS["vllm"]}}


if __name__ == "__main__":
    main()
