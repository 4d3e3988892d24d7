"""A decode step's linear layers with the shapes of Qwen3-8B: what LoRA adds to a step.

    python -m benchmarks.step [--rows 64] [--adapters 8] [--rank 16] [--json [FILE]]

36 layers of qkv (4096 to 4096 + 1024 + 1024), o (4096 to 4096), gate_up (4096 to 2 x 12288) and
down (12288 to 4096), weights of their own in each, base layers through
`torch.nn.functional.linear` with packed weights, no attention, norms or activations: each base
layer's input is the output of the one before it. A step is one CUDA graph, and makes the plan of
its rows once. Timed are

    base     the base layers alone
    add      likewise, each followed by the addition of a ready tensor: the least that a kernel of
             any kind costs between two base layers
    after    each base layer followed by one operator call for the projections that it packs
    beside   deltas computed on a second stream beside the base layer, which the fold follows

Before anything is timed, a sampled row of each of one layer's outputs is compared with the CPU
reference, bit for bit; afterwards, all outputs of the last layer of `beside` with `after`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.record import add_json_option, describe, save
from lorafold.bench import H200_COPY_BYTES_PER_US, graph_us
from lorafold.numerics import default_numerics
from lorafold.ops import (
    LoraPair,
    LoraRoute,
    Plan,
    apply_lora_beside,
    apply_lora_bgmv,
    make_plan,
    reference,
    scratch_bytes,
)

__all__ = ["LINEARS", "Step", "check", "main"]

LINEARS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
"""Per base layer: input features, and the output features of the projections that it packs."""

SCALE = 4 / 3


@dataclass(frozen=True)
class Linear:
    """One base layer and the adapters of its projections.

    Args:
        weight: [sum of n_out, k_in].
        pairs: per projection and slot.
        routes: per projection.
    """

    weight: Tensor
    pairs: tuple[tuple[LoraPair, ...], ...]
    routes: tuple[LoraRoute, ...]

    @property
    def n_outs(self) -> list[int]:
        return [route.n_out for route in self.routes]

    @property
    def adapter_bytes(self) -> int:
        return sum(2 * (p.a.numel() + p.b.numel()) for slots in self.pairs for p in slots)


class Step:
    """All layers and one batch of rows."""

    def __init__(
        self,
        num_rows: int,
        num_adapters: int,
        rank: int,
        num_layers: int,
        *,
        device: str = "cuda",
        linears: dict[str, tuple[int, tuple[int, ...]]] = LINEARS,
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._device = device
        self.layers = [
            [self._linear(k, ns, num_adapters, rank) for k, ns in linears.values()]
            for _ in range(num_layers)
        ]
        self.x = self._random(num_rows, next(iter(linears.values()))[0])
        self.slots = (torch.arange(num_rows, device=device) % num_adapters).int()
        self.plan = Plan.empty(num_rows, num_adapters, device)
        size = max(scratch_bytes(num_rows, len(ns), k, rank) for k, ns in linears.values())
        self.scratch = torch.empty(size, dtype=torch.uint8, device=device)
        widest = max(sum(ns) for _, ns in linears.values())
        self._deltas = torch.zeros(num_rows * widest, dtype=torch.bfloat16, device=device)
        self.last = self.x
        every = [linear for layer in self.layers for linear in layer]
        self.base_bytes = sum(2 * linear.weight.numel() for linear in every)
        self.adapter_bytes = sum(linear.adapter_bytes for linear in every)

    def base(self) -> None:
        """The base model's layers alone."""
        self._run(lambda linear, x: F.linear(x, linear.weight))

    def add(self) -> None:
        """The base layers, and an addition to the output of each."""

        def layer(linear: Linear, x: Tensor) -> Tensor:
            out = F.linear(x, linear.weight)
            return out.add_(self._deltas[: out.numel()].view_as(out), alpha=SCALE)

        self._run(layer)

    def after(self) -> None:
        """The plan, then each base layer and its adapters, one after the other."""
        make_plan(self.slots, self.plan.num_keys, plan=self.plan)

        def layer(linear: Linear, x: Tensor) -> Tensor:
            out = F.linear(x, linear.weight)
            self.fold(linear, x, out)
            return out

        self._run(layer)

    def beside(self) -> None:
        """The plan, then each base layer with its adapters on a second stream."""
        make_plan(self.slots, self.plan.num_keys, plan=self.plan)

        def layer(linear: Linear, x: Tensor) -> Tensor:
            outs: list[Tensor] = []

            def base() -> tuple[Tensor, ...]:
                outs.append(F.linear(x, linear.weight))
                return outs[0].split(linear.n_outs, dim=1)

            apply_lora_beside(linear.routes, x, base, self.slots, plan=self.plan)
            return outs[0]

        self._run(layer)

    def _run(self, apply: Callable[[Linear, Tensor], Tensor]) -> None:
        x = self.x
        for layer in self.layers:
            for linear in layer:
                x = apply(linear, x[:, : linear.weight.shape[1]])
        self.last = x

    def fold(self, linear: Linear, x: Tensor, out: Tensor) -> None:
        """The adapters of one base layer, into its packed output."""
        outs = out.split(linear.n_outs, dim=1)
        apply_lora_bgmv(linear.routes, x, outs, self.slots, plan=self.plan, scratch=self.scratch)

    def _linear(self, k_in: int, n_outs: Sequence[int], num_adapters: int, rank: int) -> Linear:
        pairs = tuple(
            tuple(
                LoraPair(
                    self._random(rank, k_in) / k_in**0.5,
                    self._random(n_out, rank) * (0.1 / rank**0.5),
                    SCALE,
                )
                for _ in range(num_adapters)
            )
            for n_out in n_outs
        )
        routes = tuple(LoraRoute.from_pairs(slots) for slots in pairs)
        return Linear(self._random(sum(n_outs), k_in) / k_in**0.5, pairs, routes)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(
            shape, generator=self._generator, device=self._device, dtype=torch.bfloat16
        )


def check(step: Step, row: int = 0) -> int:
    """Compare one row of each output of the first layer; the number of elements compared."""
    numerics = default_numerics(step.slots.device)
    make_plan(step.slots, step.plan.num_keys, plan=step.plan)
    slot = int(step.slots[row])
    compared = 0
    x = step.x
    for linear in step.layers[0]:
        x = x[:, : linear.weight.shape[1]]
        out = F.linear(x, linear.weight)
        base = out[row : row + 1].clone().cpu()
        step.fold(linear, x, out)
        deltas = [
            reference.delta_rows(
                x[row : row + 1].cpu(), slots[slot].a.cpu(), slots[slot].b.cpu(), numerics
            )
            for slots in linear.pairs
        ]
        truth = reference.fold(base, torch.cat(deltas, 1), SCALE)[0]
        if not torch.equal(out[row].cpu().view(torch.int16), truth.view(torch.int16)):
            raise SystemExit(f"{linear.n_outs} row {row}: bits differ")
        compared += truth.numel()
        x = out
    return compared


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64, help="dealt over the adapters")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=36)
    add_json_option(parser, "step")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    step = Step(args.rows, args.adapters, args.rank, args.layers)
    compared = check(step, row=args.rows - 1)
    variants: dict[str, Callable[[], None]] = {
        "base": step.base,
        "add": step.add,
        "after": step.after,
        "beside": step.beside,
    }
    times, last = {}, {}
    with torch.inference_mode():
        for name, run in variants.items():
            times[name] = graph_us([run])
            last[name] = step.last.clone()
    if not torch.equal(last["after"].view(torch.int16), last["beside"].view(torch.int16)):
        raise SystemExit("`beside` and `after` differ in bits")
    base = times["base"]
    row = {
        "rows": args.rows,
        "adapters": args.adapters,
        "rank": args.rank,
        "layers": args.layers,
        "elements": compared,
        "base_floor_us": round(step.base_bytes / H200_COPY_BYTES_PER_US, 1),
        "lora_floor_us": round(step.adapter_bytes / H200_COPY_BYTES_PER_US, 1),
        **{f"{name}_us": round(us, 1) for name, us in times.items()},
        **{
            f"{name}_percent": round(100 * (us / base - 1), 1)
            for name, us in times.items()
            if name != "base"
        },
    }
    print(*(f"{k} {v}" for k, v in row.items()), sep="\n")
    record = describe("step", [row])
    save(record, args.json)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
