"""Adapters for a small pool, and what its slots hold, read through the tables as a kernel would."""

from __future__ import annotations

import torch
from torch import Tensor

from lorafold.adapter import Adapter, LoraWeights
from lorafold.pool import Pool, TargetShape
from tests.peft.folders import factor

SHAPES = {"q": TargetShape(5, 7), "up": TargetShape(16, 3), "head": TargetShape(9, 11)}


def make_adapter(
    name: str, ranks: dict[str, int] | None = None, *, seed: int = 0, scale: float = 4 / 3
) -> Adapter:
    """An adapter of one rank per target, with scales that differ by target."""
    weights = {}
    for number, (target, rank) in enumerate((ranks or {"q": 2, "up": 3}).items()):
        a = factor(rank, SHAPES[target].in_features, seed=seed).to(torch.bfloat16)
        b = factor(SHAPES[target].out_features, rank, seed=seed + 1).to(torch.bfloat16)
        rounded = torch.tensor(scale / (number + 1)).item()
        weights[target] = LoraWeights(a, b, rounded)
    return Adapter(name, weights)


def contents(pool: Pool, slot: int, target: str) -> tuple[Tensor, Tensor, float, int] | None:
    """What the tables and the memory say of one slot, read through the addresses."""
    route, shape = pool.route(target), pool.targets[target]
    a_address, b_address = int(route.a_table[slot]), int(route.b_table[slot])
    scale, rank = float(route.scale_table[slot]), int(route.rank_table[slot])
    if a_address == 0 or b_address == 0:
        assert (a_address, b_address, scale, rank) == (0, 0, 0.0, 0)
        return None
    assert a_address % 16 == b_address % 16 == 0
    [memory] = route.storage
    flat, start = memory.view(-1), memory.data_ptr()
    a_start, b_start = (a_address - start) // 2, (b_address - start) // 2
    a = flat[a_start : a_start + pool.max_rank * shape.in_features].view(pool.max_rank, -1)
    b = flat[b_start : b_start + pool.max_rank * shape.out_features].view(-1, pool.max_rank)
    assert not a[rank:].any()
    assert not b[:, rank:].any()
    return a[:rank], b[:, :rank], scale, rank


def assert_holds(pool: Pool, slot: int, adapter: Adapter) -> None:
    """A slot holds exactly this adapter, and nothing else."""
    total = 0
    for target in pool.targets:
        found, weights = contents(pool, slot, target), adapter.weights.get(target)
        if weights is None:
            assert found is None
            continue
        assert found is not None
        a, b, scale, rank = found
        assert torch.equal(a.view(torch.int16), weights.a.view(torch.int16))
        assert torch.equal(b.contiguous().view(torch.int16), weights.b.view(torch.int16))
        assert (scale, rank) == (weights.scale, weights.rank)
        total += weights.a.count_nonzero() + weights.b.count_nonzero()
    assert pool._memory[slot].count_nonzero() == total


def assert_empty(pool: Pool, slot: int) -> None:
    assert all(contents(pool, slot, target) is None for target in pool.targets)
    assert not pool._memory[slot].any()


def addresses(pool: Pool) -> list[int]:
    routes = [pool.route(target) for target in pool.targets]
    return [pool._memory.data_ptr()] + [
        table.data_ptr()
        for route in routes
        for table in (route.a_table, route.b_table, route.scale_table, route.rank_table)
    ]
