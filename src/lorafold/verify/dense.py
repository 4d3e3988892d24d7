"""Checks of the dense operators: what must not enter a row's bits, and what must not be touched.

Each function computes the two sides of one check, for a case and a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from lorafold import ops
from lorafold.numerics import Numerics
from lorafold.ops import reference
from lorafold.verify import literal
from lorafold.verify.apply import (
    POISON,
    device_tensor,
    fold_rows,
    model_of,
    pair,
    poisoned,
    route,
    truth,
)
from lorafold.verify.case import Case
from lorafold.verify.check import Calls, Sides, bits

__all__ = [
    "chunks",
    "contract",
    "contract_launches",
    "controls",
    "guard_cells",
    "neighbours",
    "one_adapter",
    "order",
    "padding",
    "padding_launches",
    "planned",
    "repeats",
    "row_alone",
    "slot_numbers",
    "together",
    "untouched_rows",
]

_HUGE = 3.0e38


def contract(case: Case, device: torch.device) -> Sides:
    """The operator, and the contract computed number by number."""
    model = model_of(device)
    assert model is not None  # the check needs it
    expected = case["out"].double().tolist()
    x = case["x"].double().tolist()
    for i, slot in enumerate(case["slots"].tolist()):
        rank = int(case["ranks"][slot]) if slot >= 0 else 0
        if rank:
            a = case["a"][slot, :rank].double().tolist()
            b = case["b"][slot, :, :rank].double().tolist()
            scale = float(case["scales"][slot])
            expected[i] = literal.fold_row(expected[i], x[i], a, b, scale, case.numerics, model)
    computed = _padded(case, device, _contract_rank(case))
    return computed, torch.tensor(expected, dtype=torch.float64).bfloat16()


def contract_launches(case: Case, device: torch.device) -> Calls:
    """The operator of `contract`."""
    return (partial(_padded, case, device, _contract_rank(case)),)


def _contract_rank(case: Case) -> int:
    return max(16, case["a"].shape[1])


def _padded(case: Case, device: torch.device, max_rank: int) -> Tensor:
    """The outputs of a pool of the given max_rank."""
    return fold_rows(case, device, tables=route(case, device, max_rank=max_rank))


def row_alone(case: Case, device: torch.device) -> Sides:
    """Every row in a call of its own, and in the batch."""
    tables = route(case, device)
    rows = torch.arange(case["x"].shape[0])
    alone = [fold_rows(case.taken(row[None]), device, tables=tables) for row in rows]
    return torch.cat(alone), fold_rows(case, device, tables=tables)


def order(case: Case, device: torch.device) -> Sides:
    """The rows in another order, and as they are."""
    num_rows = case["x"].shape[0]
    shuffled = torch.randperm(num_rows, generator=torch.Generator().manual_seed(num_rows))
    tables = route(case, device)
    computed = []
    for rows in (shuffled, torch.arange(num_rows).flip(0)):
        folded = torch.empty_like(case["out"])
        folded[rows] = fold_rows(case.taken(rows), device, tables=tables)
        computed.append(folded)
    return torch.stack(computed), fold_rows(case, device, tables=tables).expand(2, -1, -1)


def neighbours(case: Case, device: torch.device) -> Sides:
    """Every other row filled with NaN, infinities and huge numbers, and the rest as in peace."""
    tables = route(case, device)
    expected = fold_rows(case, device, tables=tables)
    computed = torch.empty_like(expected)
    wild = torch.tensor([torch.nan, torch.inf, -torch.inf, _HUGE, -_HUGE]).bfloat16()
    for parity in (0, 1):
        x, out = case["x"].clone(), case["out"].clone()
        for i in range(1 - parity, x.shape[0], 2):
            x[i], out[i] = wild[i % 5], wild[(i + 1) % 5]
            x[i, i % x.shape[1]] = -wild[i % 5]
        folded = fold_rows(case.changed(x=x, out=out), device, tables=tables)
        computed[parity::2] = folded[parity::2]
    return computed, expected


def chunks(case: Case, device: torch.device) -> Sides:
    """The rows in chunks of several sizes, one call each, and all at once."""
    tables = route(case, device)
    expected = fold_rows(case, device, tables=tables)
    rows = torch.arange(case["x"].shape[0])
    computed = []
    for size in (3, 8, 17):
        parts = [case.taken(rows[start : start + size]) for start in range(0, len(rows), size)]
        computed.append(torch.cat([fold_rows(part, device, tables=tables) for part in parts]))
    return torch.stack(computed), expected.expand(3, -1, -1)


def padding(case: Case, device: torch.device) -> Sides:
    """The adapters in pools of larger max_rank, and of the largest rank."""
    computed = [call() for call in padding_launches(case, device)]
    return torch.stack(computed), fold_rows(case, device).expand(len(computed), -1, -1)


def padding_launches(case: Case, device: torch.device) -> list[Callable[[], Tensor]]:
    """A call per larger max_rank."""
    most = case["a"].shape[1]
    ranks = [rank for rank in (most + 1, 64, 160) if rank > most]
    return [partial(_padded, case, device, rank) for rank in ranks]


def slot_numbers(case: Case, device: torch.device) -> Sides:
    """The adapters in other slots, with empty ones between, and as they are."""
    num_slots = case["a"].shape[0]
    places = {slot: 2 * (num_slots - slot) - 1 for slot in range(num_slots)}
    slots = case["slots"]
    moved = torch.tensor([places.get(slot, slot) for slot in slots.tolist()], dtype=torch.int32)
    tables = route(case, device, places=places)
    return fold_rows(case.changed(slots=moved), device, tables=tables), fold_rows(case, device)


def one_adapter(case: Case, device: torch.device) -> Sides:
    """`apply_lora_delta` at the true rank, and `apply_lora_bgmv` with every row on that adapter."""
    slot = int(case["ranks"].argmax())
    rank = case["ranks"][slot]
    alone = pair(case["a"][slot], case["b"][slot], case["scales"][slot], rank, device, int(rank))
    if alone is None:
        raise ValueError("a case needs an adapter")
    x, out = device_tensor(case["x"], device), device_tensor(case["out"], device)
    ops.apply_lora_delta(alone, x, out, numerics=case.numerics)
    everywhere = case.changed(slots=torch.full_like(case["slots"], slot))
    padded = route(case, device, max_rank=max(64, case["a"].shape[1] + 8))
    return out.cpu(), fold_rows(everywhere, device, tables=padded)


def together(case: Case, device: torch.device) -> Sides:
    """Three targets that share x in one call, and in one call each."""
    reversed_case = case.changed(
        a=case["a"].flip(-1).contiguous(),
        b=case["b"].flip(1).contiguous(),
        scales=case["scales"].flip(0),
    )
    narrow = case.narrowed("cols", 0, (case["out"].shape[1] + 1) // 2)
    cases = [case, reversed_case, narrow]
    tables = [route(each, device) for each in cases]
    outs = [device_tensor(each["out"], device) for each in cases]
    x, slots = device_tensor(case["x"], device), case["slots"].to(device)
    ops.apply_lora_bgmv(tables, x, outs, slots, numerics=case.numerics)
    computed = [out.cpu() for out in outs]
    expected = [fold_rows(each, device, tables=t) for each, t in zip(cases, tables, strict=True)]
    return torch.cat(computed, 1), torch.cat(expected, 1)


def planned(case: Case, device: torch.device) -> Sides:
    """With a refilled plan and poisoned scratch of the caller's, and without either."""
    tables = route(case, device)
    x, slots = device_tensor(case["x"], device), case["slots"].to(device)
    out = device_tensor(case["out"], device)
    num_rows = x.shape[0]
    size = ops.scratch_bytes(num_rows, 1, tables.k_in, tables.max_rank)
    scratch = poisoned(size // 2, device=device).view(torch.uint8)
    plan = ops.make_plan(slots.flip(0).contiguous(), tables.max_loras)
    ops.make_plan(slots, tables.max_loras, plan=plan)
    ops.apply_lora_bgmv(tables, x, out, slots, plan=plan, numerics=case.numerics, scratch=scratch)
    return out.cpu(), fold_rows(case, device, tables=tables)


def guard_cells(case: Case, device: torch.device) -> Sides:
    """x and out as views of wider buffers, whose other cells stay as they were."""
    (num_rows, k_in), n_out = case["x"].shape, case["out"].shape[1]
    wide_x = poisoned(num_rows, k_in + 5, device=device)
    wide_out = poisoned(num_rows + 2, n_out + 11, device=device)
    x, out = wide_x[:, 2 : 2 + k_in], wide_out[1:-1, 3 : 3 + n_out]
    x.copy_(case["x"])
    out.copy_(case["out"])
    slots = case["slots"].to(device)
    ops.apply_lora_bgmv(route(case, device), x, out, slots, numerics=case.numerics)
    expected = torch.full(wide_out.shape, POISON, dtype=torch.int16)
    expected[1:-1, 3 : 3 + n_out] = bits(fold_rows(case, device))
    computed = wide_out.cpu().view(torch.int16).clone()
    computed[1:-1, 3 : 3 + n_out] = bits(out.cpu())
    return computed, expected


def untouched_rows(case: Case, device: torch.device) -> Sides:
    """Rows without an adapter after the call, and before it: every pattern, even of a NaN."""
    slots, out = case["slots"], case["out"].clone()
    is_base = torch.tensor([s < 0 or not int(case["ranks"][s]) for s in slots.tolist()])
    patterns = torch.tensor([-0.0, 0.0, torch.inf, 2.0**-133]).bfloat16().view(torch.int16)
    patterns = torch.cat([patterns, torch.tensor([POISON, 0x7F81], dtype=torch.int16)])
    filled = patterns[torch.arange(out.numel()) % len(patterns)].view(out.shape)
    out.view(torch.int16)[is_base] = filled[is_base]
    x = case["x"].clone()
    x[is_base] = torch.nan
    if device.type == "cuda":  # on the CPU a slot beyond the table is an error
        wild = torch.tensor([-1, -7, case["a"].shape[0], 2**31 - 1, -(2**31)], dtype=torch.int32)
        slots = torch.where(slots < 0, wild[torch.arange(len(slots)) % len(wild)], slots)
    folded = fold_rows(case.changed(x=x, out=out, slots=slots), device)
    return folded.view(torch.int16)[is_base], out.view(torch.int16)[is_base]


def repeats(case: Case, device: torch.device) -> Sides:
    """The same call again and again, and the first time."""
    tables = route(case, device)
    expected = fold_rows(case, device, tables=tables)
    again = [fold_rows(case, device, tables=tables) for _ in range(8)]
    return torch.stack(again), expected.expand(8, -1, -1)


def controls(case: Case, device: torch.device) -> Sides:
    """Whether the operands of the other checks would show a mistake: each of these must differ."""
    slot = int(case["ranks"].argmax())
    rank = int(case["ranks"][slot])
    x, a, b = case["x"], case["a"][slot, :rank], case["b"][slot, :, :rank]
    delta, scale = reference.delta_rows(x, a, b, case.numerics), case["scales"][slot]
    shrunk = reference.round_bf16(reference.dot(x, a, case.numerics))
    other: Numerics = "mma" if case.numerics == "gemv" else "gemv"
    # Outputs of the size of the deltas, and enough of them.
    out = torch.cat([delta.roll(n, 1) for n in range(1, 17)])
    delta = delta.repeat(16, 1)
    fused = (out.double() + scale.double() * delta.double()).float().bfloat16()
    pairs = [
        (truth(case), case["out"]),
        (truth(case), truth(replace(case, numerics=other))),
        (reference.fold(out, delta, scale), fused),
        (shrunk, (x.double() @ a.double().T).float().bfloat16()),
        (shrunk, reference.round_bf16(reference.mma_chain(x, a))),  # a chain without segments
    ]
    differ = [not torch.equal(bits(one), bits(two)) for one, two in pairs]
    return torch.tensor(differ), torch.ones(len(pairs), dtype=torch.bool)
