"""The experts of a pool: where factors are, what they cost, and that slots change as a whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorafold.adapter import Adapter, ExpertLora, ExpertShape, ExpertWeights, LoraWeights
from lorafold.errors import AdapterMismatchError, BackendError, RouteError
from lorafold.expert_pool import ExpertPool, expert_pool_bytes, expert_slices
from lorafold.ops.reference import matrix_at
from lorafold.pool import Pool, TargetShape
from tests.peft.folders import factor

# Odd sizes, so that factors do not end at a multiple of 16 bytes, and two kinds of layers.
PLAIN = ExpertShape(num_experts=3, hidden=9, inner=5)
GPT_OSS = ExpertShape(num_experts=4, hidden=9, inner=5, transposed=True, interleaved=True)
SHAPES = {"layers.0.mlp.experts": PLAIN, "layers.1.mlp.experts": GPT_OSS}
MAX_LORAS, MAX_RANK = 3, 6


def weights(
    shape: ExpertShape, kind: Any, rank: int, *, seed: int, gate_rank: int | None = None
) -> ExpertWeights:
    k_in, n_out = shape.features(kind)
    a = factor(shape.num_experts, rank, k_in, seed=seed).bfloat16()
    b = factor(shape.num_experts, n_out, rank, seed=seed + 1).bfloat16()
    return ExpertWeights(a, b, 0.5 + seed, gate_rank)


def both(seed: int = 0, rank: int = 4, gate_rank: int | None = None) -> dict[str, ExpertLora]:
    return {
        module: ExpertLora(
            weights(shape, "experts.gate_up", rank, seed=seed, gate_rank=gate_rank),
            weights(shape, "experts.down", rank - 1, seed=seed + 2),
        )
        for module, shape in SHAPES.items()
    }


def make(**sizes: Any) -> ExpertPool:
    return ExpertPool(SHAPES, **{"max_loras": MAX_LORAS, "max_rank": MAX_RANK} | sizes)


def held(pool: ExpertPool, module: str, name: str, slot: int) -> list[tuple[Tensor, ...] | None]:
    """Per expert A and B (padded, as kernels read them), scale and rank; None if it has nothing."""
    route = getattr(pool.routes(module), name)
    found: list[tuple[Tensor, ...] | None] = []
    for expert in range(route.num_experts):
        key = slot * route.num_experts + expert
        address_a, address_b = int(route.a_table[key]), int(route.b_table[key])
        if not address_a and not address_b:
            assert not route.scale_table[key]
            assert not route.rank_table[key]
            found.append(None)
            continue
        assert address_a % 16 == address_b % 16 == 0
        a = matrix_at(address_a, route.max_rank, route.k_in)
        b = matrix_at(address_b, route.n_out, route.max_rank)
        found.append((a, b, route.scale_table[key], route.rank_table[key]))
    return found


def assert_holds(pool: ExpertPool, slot: int, experts: dict[str, ExpertLora]) -> None:
    """The slot holds these factors, padded with zeros, and nothing else."""
    for module, shape in SHAPES.items():
        parts = expert_slices(experts.get(module, ExpertLora()), shape)
        for name in ("gate", "up", "down"):
            for expert, found in enumerate(held(pool, module, name, slot)):
                if name not in parts:
                    assert found is None
                    continue
                a, b, scale = parts[name]
                rank = a.shape[1]
                assert found is not None
                assert torch.equal(found[0][:rank], a[expert])
                assert torch.equal(found[1][:, :rank], b[expert])
                assert not found[0][rank:].any()
                assert not found[1][:, rank:].any()
                assert (float(found[2]), int(found[3])) == (scale, rank)


@pytest.mark.parametrize("shape", [PLAIN, GPT_OSS])
def test_slices_of_a_shared_a(shape: ExpertShape) -> None:
    part = weights(shape, "experts.gate_up", 4, seed=1)
    slices = expert_slices(ExpertLora(gate_up=part), shape)
    assert list(slices) == ["gate", "up"]
    for number, (a, b, scale) in enumerate(slices.values()):
        rows = part.b[:, number::2] if shape.interleaved else part.b[:, 5 * number : 5 * number + 5]
        assert torch.equal(a, part.a)
        assert torch.equal(b, rows)
        assert scale == part.scale


@given(gate_rank=st.integers(0, 4))
def test_slices_that_come_apart_have_their_own_ranks(gate_rank: int) -> None:
    part = weights(PLAIN, "experts.gate_up", 4, seed=1, gate_rank=gate_rank)
    slices = expert_slices(ExpertLora(gate_up=part), PLAIN)
    ranks = {name: a.shape[1] for name, (a, _, _) in slices.items()}
    want = {"gate": gate_rank, "up": 4 - gate_rank}
    assert ranks == {name: rank for name, rank in want.items() if rank}
    if gate_rank:
        a, b, _ = slices["gate"]
        assert torch.equal(a, part.a[:, :gate_rank])
        assert torch.equal(b, part.b[:, :5, :gate_rank])
    if gate_rank < 4:
        a, b, _ = slices["up"]
        assert torch.equal(a, part.a[:, gate_rank:])
        assert torch.equal(b, part.b[:, 5:, gate_rank:])


@pytest.mark.parametrize("gate_rank", [-1, 5])
def test_a_gate_rank_beyond_the_rank_is_refused(gate_rank: int) -> None:
    with pytest.raises(ValueError, match=f"gate_rank must be 0 .. 4 .* given: {gate_rank}"):
        weights(PLAIN, "experts.gate_up", 4, seed=1, gate_rank=gate_rank)


def test_the_bytes_are_known_without_allocating() -> None:
    pool = make()
    tables = sum(t.nbytes for t in pool._tables.values())
    assert pool.nbytes == pool._memory.nbytes + tables
    assert pool.nbytes == expert_pool_bytes(SHAPES, MAX_LORAS, MAX_RANK)
    # By hand: every factor of every expert, rounded up to 8 elements of 2 bytes.
    elements = 0
    for shape in SHAPES.values():
        for k_in, n_out in ((9, 5), (9, 5), (5, 9)):
            for size in (MAX_RANK * k_in, n_out * MAX_RANK):
                elements += shape.num_experts * (size + -size % 8)
    entries = 3 * (3 + 4)
    assert pool.nbytes == MAX_LORAS * (2 * elements + 24 * entries)


@pytest.mark.parametrize(
    ("shapes", "loras", "rank"),
    [({}, 1, 1), (SHAPES, 0, 1), (SHAPES, 1, 0), ({"e": ExpertShape(0, 8, 8)}, 1, 1)],
)
def test_sizes_below_1_are_refused(shapes: Any, loras: int, rank: int) -> None:
    with pytest.raises(RouteError, match="at least"):
        expert_pool_bytes(shapes, loras, rank)
    with pytest.raises(RouteError, match="at least"):
        ExpertPool(shapes, max_loras=loras, max_rank=rank)


def test_what_is_too_large_is_refused_with_the_figures() -> None:
    needed = expert_pool_bytes(SHAPES, MAX_LORAS, MAX_RANK)
    assert make(max_bytes=needed).nbytes == needed
    with pytest.raises(BackendError, match=f"{needed - 1} bytes are allowed.* {needed} bytes"):
        make(max_bytes=needed - 1)
    qwen3 = {f"layers.{i}.mlp.experts": ExpertShape(128, 2048, 768) for i in range(48)}
    needed = expert_pool_bytes(qwen3, 10_000, 64)
    with pytest.raises(BackendError, match=rf"bytes free, and a pool needs {needed} bytes \(\d+"):
        ExpertPool(qwen3, max_loras=10_000, max_rank=64)


def test_an_allocation_that_fails_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafold.expert_pool.free_bytes", lambda device: None)
    with pytest.raises(BackendError, match="could not allocate"):
        ExpertPool({"e": ExpertShape(8, 1 << 40, 1 << 40)}, max_loras=9, max_rank=64)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_slot_holds_what_was_written_last_and_others_keep_theirs(data: st.DataObject) -> None:
    pool, expected = make(), {slot: dict[str, ExpertLora]() for slot in range(MAX_LORAS)}
    addresses = [pool.routes(m).up.a_table.data_ptr() for m in SHAPES]
    for step in range(data.draw(st.integers(1, 5))):
        slot = data.draw(st.integers(0, MAX_LORAS - 1))
        experts = both(seed=10 * step, rank=data.draw(st.integers(2, 5)))
        for module in data.draw(st.sets(st.sampled_from(sorted(SHAPES)))):
            del experts[module]
        pool.write(slot, experts)
        expected[slot] = experts
    for slot, experts in expected.items():
        assert_holds(pool, slot, experts)
    assert addresses == [pool.routes(m).up.a_table.data_ptr() for m in SHAPES]
    pool.write(0, {})
    assert not pool._memory[0].any()
    assert_holds(pool, 0, {})


def test_no_two_factors_share_memory() -> None:
    pool, spans = make(), []
    for slot in range(MAX_LORAS):
        pool.write(slot, both(seed=slot))
    for module in SHAPES:
        for name in ("gate", "up", "down"):
            route = getattr(pool.routes(module), name)
            for table, size in (
                (route.a_table, route.max_rank * route.k_in),
                (route.b_table, route.n_out * route.max_rank),
            ):
                spans += [(begin, begin + 2 * size) for begin in table.tolist()]
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    first = pool._memory.data_ptr()
    assert spans[0][0] >= first
    assert spans[-1][1] <= first + pool._memory.nbytes


def test_ranks_of_slices_that_come_apart_count_one_by_one() -> None:
    pool = make()
    shape, module = PLAIN, "layers.0.mlp.experts"
    part = weights(shape, "experts.gate_up", 10, seed=1, gate_rank=6)
    adapter = Adapter("a", {}, {module: ExpertLora(gate_up=part)})
    pool.check(adapter)  # 6 and 4, though together 10 are above the 6 of the pool
    pool.write(1, adapter.experts)
    assert_holds(pool, 1, dict(adapter.experts))
    part = weights(shape, "experts.gate_up", 10, seed=1, gate_rank=3)
    with pytest.raises(AdapterMismatchError, match=r"rank 7; .*max_expert_rank 7"):
        pool.check(Adapter("a", {}, {module: ExpertLora(gate_up=part)}))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"layers.2.mlp.experts": both()["layers.0.mlp.experts"]}, "no experts `layers.2"),
        ({"layers.1.mlp.experts": both()["layers.0.mlp.experts"]}, r"given with \(3, 9, 10\)"),
        ({"layers.0.mlp.experts": ExpertLora(None, weights(PLAIN, "experts.gate_up", 2, seed=0))},
         "experts.down is given with"),
        (both(rank=7), "rank 7; experts in the pool have at most 6"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(experts: Any, message: str) -> None:
    with pytest.raises(AdapterMismatchError, match=message):
        make().check(Adapter("a", {}, experts))


def test_routes_of_what_is_not_there() -> None:
    with pytest.raises(RouteError, match=r"no experts `lm_head`; its experts are `layers\.0"):
        make().routes("lm_head")


# Together with the other targets


DENSE = {"q": TargetShape(9, 5)}


def adapter(name: str, seed: int, *, dense: bool = True, experts: bool = True) -> Adapter:
    a, b = factor(2, 9, seed=seed).bfloat16(), factor(5, 2, seed=seed).bfloat16()
    return Adapter(
        name, {"q": LoraWeights(a, b, 1.0)} if dense else {}, both(seed) if experts else {}
    )


def make_both(max_loras: int = 2) -> tuple[Pool, ExpertPool]:
    experts = make(max_loras=max_loras)
    return Pool(DENSE, max_loras=max_loras, max_rank=4, experts=experts), experts


def test_an_adapter_has_one_slot_for_all_its_parts() -> None:
    pool, experts = make_both()
    assert dict(pool.shapes) == {**DENSE, **SHAPES}
    first, second = adapter("first", 1), adapter("second", 2, dense=False)
    assert [pool.place(first), pool.place(second)] == [0, 1]
    assert_holds(experts, 0, dict(first.experts))
    assert_holds(experts, 1, dict(second.experts))
    assert pool.route("q").rank_table.tolist() == [2, 0]
    pool.evict("first")
    assert_holds(experts, 0, {})
    assert_holds(experts, 1, dict(second.experts))
    # Without experts it leaves nothing of those of the one before.
    assert pool.place(adapter("third", 3, experts=False)) == 0
    assert_holds(experts, 0, {})
    assert pool.place(adapter("second", 4)) == 1
    assert_holds(experts, 1, both(4))


def test_an_adapter_in_use_keeps_its_experts_until_it_is_released() -> None:
    pool, experts = make_both()
    pool.place(adapter("a", 1))
    slot = pool.acquire("a")
    pool.evict("a")
    assert_holds(experts, slot, both(1))
    pool.release(slot)
    assert_holds(experts, slot, {})


def test_a_packed_adapter_brings_its_experts() -> None:
    pool, experts = make_both()
    packed = pool.pack(adapter("a", 1))
    assert packed.nbytes == pool.image_bytes + packed.expert_bytes
    assert pool.place(packed) == 0
    assert_holds(experts, 0, both(1))
    written = experts._memory[0].clone()
    experts.write(0, {})
    experts.write(0, packed.experts, experts.pack(packed.experts))
    assert torch.equal(experts._memory[0], written)
    # What was packed for the same targets may still have experts that do not fit.
    with pytest.raises(AdapterMismatchError):
        Pool(DENSE, max_loras=2, max_rank=4).place(packed)


def test_nothing_is_placed_if_the_experts_do_not_fit() -> None:
    pool, experts = make_both()
    pool.place(adapter("a", 1))
    bad = Adapter("a", adapter("a", 5).weights, both(5, rank=7))
    with pytest.raises(AdapterMismatchError, match="rank 7"):
        pool.place(bad)
    assert_holds(experts, 0, both(1))
    without = Pool(DENSE, max_loras=2, max_rank=4)
    with pytest.raises(AdapterMismatchError, match=r"no target `layers\.0\.mlp\.experts`"):
        without.place(adapter("a", 1))


def test_both_parts_must_have_the_same_slots() -> None:
    with pytest.raises(RouteError, match="the experts have 3 slots on cpu, the other targets 2"):
        Pool(DENSE, max_loras=2, max_rank=4, experts=make())


def test_a_pool_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        pool = make()
        pool.write(0, both(1))
    pool.write(0, both(2))
    assert_holds(pool, 0, both(2))
