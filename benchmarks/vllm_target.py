"""What the vLLM plugin runs for a layer beside vLLM's own kernels, on the tensors vLLM would give.

    python -m benchmarks.vllm_target [--rows 13/16,60/64] [--adapters 8] [--rank 16] [--json [FILE]]

No vLLM is needed. Ours is the plugin's `Punica`, with the slots of a step taken from vLLM's mapping
and the layer's stacked A and B; theirs are the Triton kernels that vLLM's own class launches
(benchmarks/peers, to be fetched first), fed the same tensors, but for B, into which they have the
scale multiplied. The dense layers are those of Qwen3-8B: packed qkv, o, packed gate_up, down. The
experts are those of Qwen3-30B-A3B: gate and up in one call, then down.

As in the engine, a call is captured in a CUDA graph for a padded number of rows: `60/64` is a step
of 60 rows in a graph for 64. Rows are dealt over the base and the adapters. What is captured is
replayed and compared first: sampled rows of ours with the CPU reference, bit for bit, base and
padded rows with what they were; all of theirs with ours, up to bf16 rounding. A time is that of one
layer in a graph of many with weights of their own. Our experts make their keys and plan inside it;
theirs have the sort that they need made before.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.expert_sites import HIDDEN, INNER, NUM_EXPERTS, TOP_K
from benchmarks.record import add_json_option, describe, save
from benchmarks.step import LINEARS
from lorafold.bench import geomean, graph_us, rounded
from lorafold.integrations.vllm.punica import Punica
from lorafold.ops import reference

__all__ = ["Batch", "Dense", "Experts", "main", "measure"]

SCALE = 4 / 3
MODES = {"vllm": False, "vllm_bi": True}
"""Column -> whether the kernels are those of the batch-invariant mode."""


class Batch:
    """The rows of a step, told to the plugin as vLLM tells them.

    Args:
        num_rows: rows of the step.
        padded: rows of the captured graph.
        num_adapters: adapters in as many slots.
        rank: of all adapters.
        device: where it runs.
    """

    def __init__(
        self, num_rows: int, padded: int, num_adapters: int, rank: int, device: str = "cuda"
    ) -> None:
        self.padded, self.num_adapters, self.rank, self.device = padded, num_adapters, rank, device
        config = SimpleNamespace(max_loras=num_adapters, fully_sharded_loras=False)
        self.punica = Punica(padded, padded, device, lora_config=config)
        ids = [i % (num_adapters + 1) for i in range(num_rows)]  # 0 is the base
        mapping = SimpleNamespace(index_mapping=ids, prompt_mapping=())
        self.punica.update_metadata(mapping, list(range(1, num_adapters + 1)), num_adapters + 1, 1)
        self.slots = torch.tensor([i - 1 for i in ids] + [-1] * (padded - num_rows)).int()
        # Two with an adapter, one base, one padded, as far as there are such.
        wanted = (1, num_rows - 1, 0, padded - 1)
        self.samples = list(dict.fromkeys(row for row in wanted if 0 <= row < padded))
        self._generator = torch.Generator(device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(
            shape, generator=self._generator, device=self.device, dtype=torch.bfloat16
        )

    def factors(self, experts: int, k_in: int, n_outs: Sequence[int]) -> tuple[Any, Any]:
        """Stacked A and B, one per slice: [slots, experts, rank, k_in] and [.., n_out, rank]."""
        slots = self.num_adapters
        a = tuple(self.random(slots, experts, self.rank, k_in) / k_in**0.5 for _ in n_outs)
        b = tuple(self.random(slots, experts, n, self.rank) for n in n_outs)
        return a, b

    def place_all(self, tables: Any) -> None:
        """Say of every slot that it adapts every slice."""
        for slot in range(self.num_adapters):
            for part in range(len(tables.n_outs)):
                tables.place(slot, part, self.rank, SCALE)


def delta(x: Tensor, a: Tensor, b: Tensor, numerics: str) -> Tensor:
    """One row [k_in] and the factors of one adapter -> the unscaled delta [1, n_out]."""
    return reference.delta_rows(x.cpu().unsqueeze(0), a.cpu(), b.cpu(), numerics)


@dataclass(frozen=True)
class _Linear:
    """One layer: its stacked factors, the plugin's view of it, and its rows."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    target: Any
    x: Tensor
    y: Tensor


class Dense:
    """Layers of one shape."""

    def __init__(self, name: str, k_in: int, n_outs: Sequence[int], batch: Batch, layers: int):
        self.name, self._n_outs, self._batch = name, tuple(n_outs), batch
        self._layers = [self._layer(k_in) for _ in range(layers)]
        self.outputs = (self._layers[0].y,)

    def _layer(self, k_in: int) -> _Linear:
        batch = self._batch
        a, b = batch.factors(1, k_in, self._n_outs)
        target = batch.punica.target(SimpleNamespace(lora_a_stacked=a, lora_b_stacked=b))
        batch.place_all(target.tables)
        rows = batch.padded
        return _Linear(
            a, b, target, batch.random(rows, k_in), batch.random(rows, sum(self._n_outs))
        )

    def ours(self) -> list[Callable[[], None]]:
        return [
            partial(at.target.add_lora_linear, at.y, at.x, at.a, at.b, 1.0, self._n_outs)
            for at in self._layers
        ]

    def theirs(self, *, invariant: bool) -> list[Callable[[], None]]:
        from benchmarks.peers.vllm import add_lora, kernels, metadata_of, scaled

        code = kernels(invariant)
        code.forget_addresses()
        metadata = metadata_of(
            code, self._batch.slots.to(self._batch.device), len(self._layers[0].a[0])
        )
        return [
            partial(
                add_lora, code, at.x, at.y, at.a, tuple(scaled(b, SCALE) for b in at.b), metadata
            )
            for at in self._layers
        ]

    def truth(self, before: Sequence[Tensor], row: int) -> list[Tensor]:
        """A row of each output of the first layer after the call, from its rows before."""
        at, slot = self._layers[0], int(self._batch.slots[row])
        start = before[0][row].cpu()
        if slot < 0:
            return [start]
        numerics = self._batch.punica.numerics
        deltas = [
            delta(at.x[row], a[slot, 0], b[slot, 0], numerics)
            for a, b in zip(at.a, at.b, strict=True)
        ]
        return [reference.fold(start.unsqueeze(0), torch.cat(deltas, 1), SCALE)[0]]


@dataclass(frozen=True)
class _Moe:
    """One layer of experts: stacked factors, the plugin's view, the router's choice, its rows."""

    w13: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    w2: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    target: Any
    ids: Tensor
    weights: Tensor
    x13: Tensor
    x2: Tensor
    y13: Tensor
    y2: Tensor


class Experts:
    """Layers of experts; the routing weights are 1."""

    name = "experts"

    def __init__(
        self, batch: Batch, layers: int, hidden: int = HIDDEN, inner: int = INNER,
        num_experts: int = NUM_EXPERTS, top_k: int = TOP_K,
    ) -> None:  # fmt: skip
        self._batch, self._inner = batch, inner
        sizes = (hidden, inner, num_experts, top_k)
        self._layers = [self._layer(*sizes) for _ in range(layers)]
        self.outputs = (self._layers[0].y13, self._layers[0].y2)

    def _layer(self, hidden: int, inner: int, num_experts: int, top_k: int) -> _Moe:
        batch, tokens = self._batch, self._batch.padded
        w13 = batch.factors(num_experts, hidden, (inner, inner))
        w2 = batch.factors(num_experts, inner, (hidden,))
        stacked = SimpleNamespace(
            w13_lora_a_stacked=w13[0], w13_lora_b_stacked=w13[1],
            w2_lora_a_stacked=w2[0], w2_lora_b_stacked=w2[1],
        )  # fmt: skip
        target = batch.punica.target(stacked)
        for tables in (target.w13, target.w2):
            batch.place_all(tables)
        return _Moe(
            w13, w2, target,
            ids=batch.random(tokens, num_experts).float().topk(top_k).indices.int(),
            weights=torch.ones(tokens, top_k, device=batch.device),
            x13=batch.random(tokens, hidden),
            x2=batch.random(tokens * top_k, inner),
            y13=batch.random(tokens, top_k, 2 * inner),
            y2=batch.random(tokens, top_k, hidden),
        )  # fmt: skip

    def ours(self) -> list[Callable[[], None]]:
        def call(at: _Moe) -> None:
            handed = at.target.add_lora_w13(at.y13, at.x13, *at.w13, at.ids, at.weights, None)
            at.target.add_lora_w2(at.y2, at.x2, *at.w2, at.weights, *handed)

        return [partial(call, at) for at in self._layers]

    def theirs(self, *, invariant: bool) -> list[Callable[[], None]]:
        from benchmarks.peers.vllm import scaled
        from benchmarks.peers.vllm_experts import ExpertOperands, expert_calls

        slots = self._batch.slots.to(self._batch.device)
        repetitions = []
        for at in self._layers:
            for x, out, (a, b), is_down in (
                (at.x13, at.y13, at.w13, False),
                (at.x2, at.y2, at.w2, True),
            ):
                b_scaled = tuple(scaled(each, SCALE) for each in b)
                repetitions.append(ExpertOperands(x, out, a, b_scaled, at.ids, slots, is_down))
        calls = expert_calls(repetitions, self._inner, invariant=invariant)

        def both(first: Callable[[], None], second: Callable[[], None]) -> None:
            first()
            second()

        return [partial(both, *pair) for pair in zip(calls[::2], calls[1::2], strict=True)]

    def truth(self, before: Sequence[Tensor], row: int) -> list[Tensor]:
        """A token's last choice: its row of gate and up, and of down; as `Dense.truth`."""
        at, slot, top_k = self._layers[0], int(self._batch.slots[row]), self._layers[0].ids.shape[1]
        y13, y2 = (each[row].cpu().clone() for each in before)
        if slot < 0:
            return [y13, y2]
        numerics = self._batch.punica.numerics
        for choice, expert in enumerate(at.ids[row].tolist()):
            a13, b13 = at.w13
            deltas = [
                delta(at.x13[row], a[slot, expert], b[slot, expert], numerics)
                for a, b in zip(a13, b13, strict=True)
            ]
            y13[choice] = reference.fold(y13[choice : choice + 1], torch.cat(deltas, 1), SCALE)[0]
            (a,), (b,) = at.w2
            down = delta(at.x2[row * top_k + choice], a[slot, expert], b[slot, expert], numerics)
            weighted = reference.fold(torch.zeros_like(down), down, SCALE)[0]
            y2[choice] = (y2[choice].float() + weighted.float()).bfloat16()
        return [y13, y2]


def replayed(call: Callable[[], None], outputs: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Run a call on outputs that are as before: on a GPU, captured in a graph."""

    def reset() -> None:
        for output, start in zip(outputs, before, strict=True):
            output.copy_(start)

    if outputs[0].is_cuda:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    reset()
    call()


def check(site: Dense | Experts, batch: Batch) -> tuple[int, list[Tensor], list[Tensor]]:
    """Our bits on sampled rows; how many elements, the outputs before, and ours after."""
    before = [output.clone() for output in site.outputs]
    replayed(site.ours()[0], site.outputs, before)
    compared = 0
    for row in batch.samples:
        for output, start, truth in zip(site.outputs, before, site.truth(before, row), strict=True):
            if not torch.equal(output[row].cpu().view(torch.int16), truth.view(torch.int16)):
                raise SystemExit(f"{site.name} row {row}: bits differ")
            if batch.slots[row] >= 0 and torch.equal(output[row], start[row]):
                raise SystemExit(f"{site.name} row {row}: the adapter changes nothing")
            compared += truth.numel()
    return compared, before, [output.clone() for output in site.outputs]


def worst(
    site: Dense | Experts,
    before: Sequence[Tensor],
    ours: Sequence[Tensor],
    call: Callable[[], None],
) -> float:
    """How far their results are from ours, in units of what rounding explains."""
    from benchmarks.peers.agreement import worst_error

    replayed(call, site.outputs, before)
    flat = (
        (t.view(-1, t.shape[-1]) for t in all_of)
        for all_of in zip(before, ours, site.outputs, strict=True)
    )
    return max(worst_error(*three) for three in flat)


def measure(site: Dense | Experts, batch: Batch) -> dict[str, Any]:
    """Microseconds of a layer, ours and theirs; a word where theirs has no time."""
    from benchmarks.peers.contest import gated_us

    compared, before, ours = check(site, batch)
    row: dict[str, Any] = {"layer": site.name, "elements": compared}
    row["ours_us"] = rounded(graph_us(site.ours()))
    for column, invariant in MODES.items():
        theirs = gated_us(
            partial(site.theirs, invariant=invariant), partial(worst, site, before, ours)
        )
        row[f"{column}_us"] = theirs
        row[f"of_{column}"] = (
            rounded(row["ours_us"] / theirs) if isinstance(theirs, float) else None
        )
    return row


def sites(batch: Batch, layers: int, expert_layers: int) -> list[Callable[[], Dense | Experts]]:
    """What is measured, made one after the other so that one at a time takes memory."""
    makers: list[Callable[[], Dense | Experts]] = [
        partial(Dense, name, k_in, n_outs, batch, layers)
        for name, (k_in, n_outs) in LINEARS.items()
    ]
    return [*makers, partial(Experts, batch, expert_layers)] if expert_layers else makers


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="13/16,60/64", help="rows of the step/of the graph")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=36, help="dense layers in a graph")
    parser.add_argument("--expert-layers", type=int, default=3, help="0 leaves experts out")
    add_json_option(parser, "vllm_target")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    from benchmarks.peers.fetch import VERSIONS

    args = parse(arguments)
    rows: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    for load in args.rows.split(","):
        num_rows, padded = map(int, load.split("/"))
        batch = Batch(num_rows, padded, args.adapters, args.rank)
        for make in sites(batch, args.layers, args.expert_layers):
            row = {"rows": load, "adapters": args.adapters, "rank": args.rank}
            row |= measure(make(), batch)
            rows.append(row)
            print(*(f"{name} {value!s:<8}" for name, value in row.items()), flush=True)
            record = describe(
                "vllm_target", rows, geomean=means(rows), peer_versions={"vllm": VERSIONS["vllm"]}
            )
            save(record, args.json)
    print(f"geometric means of our time over theirs: {means(rows)}")
    print(json.dumps(record))


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Our time over theirs, over the rows that have both.

    Example:
        >>> means([{"of_vllm": 0.5, "of_vllm_bi": None}, {"of_vllm": 2.0, "of_vllm_bi": None}])
        {'vllm': 1.0, 'vllm_bi': None}
    """
    return {c: geomean([row[f"of_{c}"] for row in rows if row[f"of_{c}"]]) for c in MODES}


if __name__ == "__main__":
    main()
