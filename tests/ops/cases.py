"""Cases for the operators: operands with everything that may go wrong around them, and the truth.

The truth of a row is the CPU reference on that row alone, at the adapter's true rank.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.ops import (
    LoraPair,
    LoraRoute,
    apply_lora_beside,
    apply_lora_bgmv,
    make_plan,
    reference,
)

compared: Counter[str] = Counter()
"""Elements compared bit for bit, by test; the summary of a run shows them."""

POISON = 0x7FC1  # a NaN whose pattern nothing computes


def bits(t: Tensor) -> Tensor:
    """bf16 as integers, with every NaN as one value."""
    t = t.detach().cpu()
    return torch.where(t.isnan(), torch.tensor(0x7FC0, dtype=torch.int16), t.view(torch.int16))


def poisoned(shape: Sequence[int], device: str) -> Tensor:
    return torch.full(tuple(shape), POISON, dtype=torch.int16, device=device).view(torch.bfloat16)


def _cancelling(t: Tensor, dim: int) -> Tensor:
    """The second half the negative of the first, but for a few small entries that stand alone: over
    equal halves of the other operand the large terms cancel, and what is left is rounding error,
    whose bits show any other order of additions."""
    half = t.shape[dim] // 2
    first, second = t.narrow(dim, 0, half), t.narrow(dim, half, half)
    lonely = torch.arange(half) % 3 == 0
    first[:, lonely] *= 2.0**-18
    second.copy_(-first)
    second[:, lonely] = 0
    if half == 0:
        return t.bfloat16()
    t[:, 2 * half :] *= 2.0**-18
    return t.bfloat16()


@dataclass
class Case:
    """One call: routes that share x, slots per row, and views with guard cells around them."""

    routes: list[LoraRoute]
    pairs: list[list[LoraPair | None]]  # per route, per slot
    x: Tensor
    out_buffers: list[Tensor]  # the whole memory of each output, guard cells included
    outs: list[Tensor]
    slots: Tensor

    def truth(self, numerics: str, *, by_slot: bool = False) -> list[Tensor]:
        """What out_buffers must hold afterwards, on the CPU: row by row, or all rows of a slot in
        one call of the reference, whose rows are independent."""
        expected = []
        for pairs, buffer, out in zip(self.pairs, self.out_buffers, self.outs, strict=True):
            whole = buffer.detach().cpu().clone()
            view = torch.as_strided(whole, out.shape, out.stride(), out.storage_offset())
            x, slots = self.x.cpu(), self.slots.cpu()
            for slot, pair in enumerate(pairs):
                if pair is None:
                    continue
                a, b = pair.a.cpu()[: pair.rank], pair.b.cpu()[:, : pair.rank]
                rows = (slots == slot).nonzero().squeeze(1)
                for part in [rows] if by_slot else rows.split(1):
                    delta = reference.delta_rows(x[part], a, b, numerics)
                    view[part] = reference.fold(view[part], delta, pair.scale)
            expected.append(whole)
        return expected


def make_pair(
    generator: torch.Generator,
    k_in: int,
    n_out: int,
    rank: int,
    max_rank: int,
    device: str,
    scale: float = 4 / 3,
) -> LoraPair:
    a = torch.zeros(max_rank, k_in, dtype=torch.bfloat16)
    b = torch.zeros(n_out, max_rank, dtype=torch.bfloat16)
    a[:rank] = _cancelling(torch.randn(rank, k_in, generator=generator), dim=1)
    # Equal rows of A make equal xa, so that opposite columns of B cancel too.
    half = rank // 2
    a[half : 2 * half] = a[:half]
    b[:, :rank] = _cancelling(torch.randn(n_out, rank, generator=generator), dim=1)
    return LoraPair(a.to(device), b.to(device), scale=scale, rank=rank)


def make_case(
    num_rows: int,
    ranks: Sequence[int | None],
    k_in: int,
    n_outs: Sequence[int],
    max_rank: int,
    *,
    device: str,
    seed: int = 0,
    x_pad: int = 0,
    out_pad: int = 0,
    slots: Sequence[int] | None = None,
) -> Case:
    """`ranks` per slot, None where a slot does not adapt; rows draw slots, base and wild values."""
    generator = torch.Generator().manual_seed(seed)
    pairs: list[list[LoraPair | None]] = [
        [
            None if r is None else make_pair(generator, k_in, n_out, r, max_rank, device)
            for r in ranks
        ]
        for n_out in n_outs
    ]
    half = k_in // 2
    x = torch.randn(num_rows, k_in + x_pad, generator=generator).bfloat16()
    x[:, half : 2 * half] = x[:, :half]
    x = x.to(device)[:, :k_in]
    buffers, outs = [], []
    for n_out in n_outs:
        buffer = poisoned((num_rows, n_out + 2 * out_pad), device)
        out = buffer[:, out_pad : out_pad + n_out]
        # As small as the deltas, so that the fold does not hide their last bits.
        out.copy_((torch.randn(num_rows, n_out, generator=generator) * 2.0**-36).bfloat16())
        buffers.append(buffer)
        outs.append(out)
    if slots is None:
        wild = [-1, -7, len(ranks), 2**31 - 1, -(2**31)] if device == "cuda" else [-1, -7]
        choices = torch.tensor([*range(len(ranks))] * 3 + wild, dtype=torch.int64)
        slots = choices[torch.randint(len(choices), (num_rows,), generator=generator)].tolist()
    return Case(
        routes=[LoraRoute.from_pairs(p) for p in pairs],
        pairs=pairs,
        x=x,
        out_buffers=buffers,
        outs=outs,
        slots=torch.tensor(slots, dtype=torch.int32, device=device),
    )


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    a, e = bits(actual), bits(expected)
    compared[os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]] += a.numel()
    wrong = (a != e).nonzero()
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {a.numel()} differ, first at {wrong[0].tolist()}: "
        f"{actual.cpu()[tuple(wrong[0])]} instead of {expected.cpu()[tuple(wrong[0])]}"
    )


class Layers:
    """A layer per case, each of which changes what the next one reads, and one plan for all.

    `starts` are what the base layers return.
    """

    def __init__(self, cases: Sequence[Case], numerics: Numerics) -> None:
        self.slots, self._num_keys = cases[0].slots, cases[0].routes[0].max_loras
        self.plan = make_plan(self.slots, self._num_keys)
        self.starts = [[out.clone() for out in case.outs] for case in cases]
        self._cases, self._numerics = cases, numerics

    def after(self) -> list[Tensor]:
        """Outs of all layers, deltas after the base layers."""

        def layer(routes: Sequence[LoraRoute], x: Tensor, start: list[Tensor]) -> list[Tensor]:
            outs = [out.clone() for out in start]
            apply_lora_bgmv(routes, x, outs, self.slots, plan=self.plan, numerics=self._numerics)
            return outs

        return self._forward(layer)

    def beside(self) -> list[Tensor]:
        """Outs of all layers, deltas beside the base layers."""

        def layer(routes: Sequence[LoraRoute], x: Tensor, start: list[Tensor]) -> Sequence[Tensor]:
            def base() -> list[Tensor]:
                return [out.clone() for out in start]

            return apply_lora_beside(
                routes, x, base, self.slots, plan=self.plan, numerics=self._numerics
            )

        return self._forward(layer)

    def _forward(
        self, layer: Callable[[Sequence[LoraRoute], Tensor, list[Tensor]], Sequence[Tensor]]
    ) -> list[Tensor]:
        make_plan(self.slots, self._num_keys, plan=self.plan)
        results, x = list[Tensor](), self._cases[0].x
        for case, start in zip(self._cases, self.starts, strict=True):
            outs = layer(case.routes, x, start)
            results += outs
            x = case.x + outs[0].float().mean(1, keepdim=True).bfloat16()
        return results
