"""The dense operators on a GPU, at the shapes of real models: everything that must not matter.

Eager, CUDA-graph replay with other slots, each row alone, `apply_lora_delta` of one row, and the
CPU reference: all the same bits.
"""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

from lorafold.errors import RouteError
from lorafold.ops import (
    LoraRoute,
    Plan,
    apply_lora_bgmv,
    apply_lora_delta,
    make_plan,
    scratch_bytes,
    tiles,
)
from tests.ops.cases import Case, Layers, assert_same_bits, bits, make_case, poisoned
from tests.ops.test_kernels import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUMERICS = ("gemv", "mma")
RANKS = [64, 16, None, 8, 33, 1, 64, 24]
SITES = [
    pytest.param(4096, [4096], id="o"),
    pytest.param(4096, [4096, 1024, 1024], id="qkv"),
    pytest.param(4096, [14336, 14336], id="gate_up"),
    pytest.param(14336, [4096], id="down"),
    pytest.param(576, [576, 192, 192], id="small-qkv"),
    pytest.param(2880, [201], id="odd-columns"),
]


def build(k_in: int, n_outs: list[int], num_rows: int, seed: int = 0) -> Case:
    return make_case(num_rows, RANKS, k_in, n_outs, 64, device="cuda", out_pad=8, seed=seed)


def call(case: Case, numerics: str, plan: Plan | None = None, scratch=None) -> None:
    apply_lora_bgmv(
        case.routes, case.x, case.outs, case.slots, plan=plan, numerics=numerics, scratch=scratch
    )


def restore(case: Case, start: list[torch.Tensor]) -> None:
    for buffer, old in zip(case.out_buffers, start, strict=True):
        buffer.copy_(old)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("k_in", "n_outs"), SITES)
def test_equal_to_the_reference(numerics, k_in, n_outs):
    case = build(k_in, n_outs, 160)
    expected = case.truth(numerics, by_slot=True)
    call(case, numerics)
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("k_in", "n_outs"), SITES)
def test_replay_with_other_slots(numerics, k_in, n_outs):
    case = build(k_in, n_outs, 64)
    start = [b.clone() for b in case.out_buffers]
    first = case.routes[0]
    plan = make_plan(case.slots, first.max_loras)
    size = scratch_bytes(64, len(n_outs), k_in, first.max_rank)
    scratch = poisoned((size // 2,), "cuda").view(torch.uint8)
    call(case, numerics, plan, scratch)  # compile before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make_plan(case.slots, first.max_loras, plan=plan)
        call(case, numerics, plan, scratch)
    for shift in range(3):
        case.slots.copy_(case.slots.roll(shift * 7 + 1))
        restore(case, start)
        call(case, numerics)
        eager = [b.clone() for b in case.out_buffers]
        restore(case, start)
        graph.replay()
        for buffer, truth in zip(case.out_buffers, eager, strict=True):
            assert_same_bits(buffer, truth)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("k_in", "n_outs"), SITES)
def test_beside_the_base_layer(numerics, k_in, n_outs):
    """Three layers in one graph, each of which changes what the next one reads."""
    layers = Layers([build(k_in, n_outs, 64, seed) for seed in range(3)], numerics)
    slots = layers.slots
    layers.beside()  # not captured: compiles the usual kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.beside()
    for shift in range(4):
        slots.copy_(slots.roll(5 * shift + 1))
        expected = layers.after()
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        for at, (result, truth) in enumerate(zip(captured, expected, strict=True)):
            assert_same_bits(result, truth, f"output {at}")
    assert not torch.equal(bits(captured[0]), bits(layers.starts[0][0]))


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("k_in", "n_outs"), SITES)
def test_repeats_with_one_plan(numerics, k_in, n_outs):
    """Repeats skip what the first call has checked: other addresses, contents and layouts."""
    first = build(k_in, n_outs, 48)
    plan, num_keys = make_plan(first.slots, first.routes[0].max_loras), first.routes[0].max_loras
    cases = [build(k_in, n_outs, 48, seed) for seed in range(5)]
    memory = poisoned((2, 48 * (max(k_in, *n_outs) + 8)), "cuda").flatten()
    misaligned = torch.as_strided(memory, first.x.shape, first.x.stride(), 1)
    for at, new in enumerate([first, *cases]):
        x = misaligned.copy_(new.x) if at == 4 else new.x
        first.slots.copy_(new.slots)
        make_plan(first.slots, num_keys, plan=plan)
        case = dataclasses.replace(first, x=x, outs=new.outs, out_buffers=new.out_buffers)
        expected = case.truth(numerics, by_slot=True)
        call(case, numerics, plan)
        for buffer, truth in zip(case.out_buffers, expected, strict=True):
            assert_same_bits(buffer, truth, f"call {at}")
    x, out = (torch.as_strided(memory, t.shape, t.stride(), 0) for t in (first.x, first.outs[0]))
    overlapping = dataclasses.replace(first, x=x, outs=[out, *first.outs[1:]])
    with pytest.raises(RouteError, match="overlap"):
        call(overlapping, numerics, plan)
    wrong = dataclasses.replace(first, outs=[out.float() for out in first.outs])
    with pytest.raises(RouteError, match="must be bfloat16"):
        call(wrong, numerics, plan)
    small = torch.empty(16, dtype=torch.uint8, device="cuda")
    with pytest.raises(RouteError, match="scratch must be"):
        call(first, numerics, plan, small)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize(("k_in", "n_outs"), SITES)
def test_each_row_alone(numerics, k_in, n_outs):
    case = build(k_in, n_outs, 48)
    start = [b.clone() for b in case.out_buffers]
    call(case, numerics)
    batch = [b.clone() for b in case.out_buffers]
    restore(case, start)
    for i in range(48):
        rows = slice(i, i + 1)
        outs = [out[rows] for out in case.outs]
        apply_lora_bgmv(case.routes, case.x[rows], outs, case.slots[rows], numerics=numerics)
    for buffer, truth in zip(case.out_buffers, batch, strict=True):
        assert_same_bits(buffer, truth, "bgmv of one row")
    restore(case, start)
    for i, slot in enumerate(case.slots.tolist()):
        for pairs, out in zip(case.pairs, case.outs, strict=True):
            pair = pairs[slot] if 0 <= slot < len(pairs) else None
            if pair is not None:
                apply_lora_delta(pair, case.x[i : i + 1], out[i : i + 1], numerics=numerics)
    for buffer, truth in zip(case.out_buffers, batch, strict=True):
        assert_same_bits(buffer, truth, "delta of one row")


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("num_rows", [1, 2, 17, 256, 257, 2048, 8192])
def test_order_and_neighbours(numerics, num_rows):
    """Rows in another order, and beside rows of NaN and infinity, keep their bits."""
    case = make_case(num_rows, RANKS, 4096, [1024], 64, device="cuda")
    start = case.out_buffers[0].clone()
    call(case, numerics)
    batch = case.out_buffers[0].clone()
    order = torch.randperm(num_rows, device="cuda", generator=torch.Generator("cuda"))
    out = start[order].clone()
    apply_lora_bgmv(case.routes[0], case.x[order], out, case.slots[order], numerics=numerics)
    assert_same_bits(out, batch[order], "order")
    odd = torch.arange(num_rows, device="cuda") % 2 == 1
    x = case.x.clone()
    x[odd, ::3], x[odd, 1::3] = float("nan"), float("inf")
    out = start.clone()
    apply_lora_bgmv(case.routes[0], x, out, case.slots, numerics=numerics)
    assert_same_bits(out[~odd], batch[~odd], "neighbours")


@pytest.mark.parametrize("max_rank", [8, 16, 64, 512])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_padding_does_not_enter(numerics, max_rank):
    results = []
    for padded in (8, max_rank):
        case = make_case(33, [8, 3], 2048, [512], padded, device="cuda", seed=5)
        call(case, numerics)
        results.append(case.out_buffers[0])
    assert_same_bits(results[1], results[0])


def all_tiles(numerics: str, tile_rows: int) -> set[tiles.AnyShrinkTile | tiles.AnyExpandTile]:
    """Every tile that the table returns over a dense grid of shapes, for tiles of that height; of
    the many that "gemv"'s rules can return, those of a coarse one.
    """
    if numerics == "gemv":
        counts, rows, ranks, depths = (2, 24, 512), (1, 4, tile_rows), (16, 64, 256), (4096, 14336)
    else:
        counts, rows = (1, 2, 8, 24, 64, 100, 200, 512, 2048), (1,)
        ranks, depths = (8, 16, 32, 64, 128, 256), (512, 4096, 14336)
    return {
        tile
        for num_tiles, rows_of_tile, max_rank, k_in in product(counts, rows, ranks, depths)
        for n_outs in ((256,), (4096, 1024), (14336, 14336))
        for tile in tiles.call_tiles(
            numerics, num_tiles * rows_of_tile, num_tiles, tile_rows, k_in, n_outs, max_rank
        )
    }


def tile_case(tile: tiles.AnyShrinkTile | tiles.AnyExpandTile) -> Case:
    """A case that the tile is for: an expand's blocks hold all ranks up to their size."""
    max_rank = 64
    if isinstance(tile, tiles.ExpandTile):
        max_rank = min(256, tile.block_k)
    elif isinstance(tile, tiles.GemvExpandTile):
        max_rank = min(256, 1024 * tile.num_warps // tile.block_cols)
    ranks = [max(1, max_rank // 2 - 1), max_rank, None, 5]
    return make_case(100, ranks, 4096, [640], max_rank, device="cuda", seed=9)


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("tile_rows", [8, 16, 32, 64])
def test_every_tile_gives_the_same_bits(numerics, tile_rows):
    truths: dict[int, torch.Tensor] = {}
    for tile in sorted(all_tiles(numerics, tile_rows), key=repr):
        case = tile_case(tile)
        max_rank = case.routes[0].max_rank
        if max_rank not in truths:
            truths[max_rank] = case.truth(numerics, by_slot=True)[0]
        is_shrink = isinstance(tile, tiles.ShrinkTile | tiles.GemvShrinkTile)
        run(case, numerics, **{"shrink" if is_shrink else "expand": tile})
        assert_same_bits(case.out_buffers[0], truths[max_rank], repr(tile))


def test_table_addresses_beyond_the_slots_are_never_read():
    """A route over slots of which only one adapts: rows of the others keep their bits."""
    case = make_case(64, [16, None, None], 1024, [512], 16, device="cuda")
    route = case.routes[0]
    poisoned_route = LoraRoute(
        a_table=route.a_table,
        b_table=route.b_table,
        scale_table=torch.full_like(route.scale_table, float("nan")).where(
            route.a_table == 0, route.scale_table
        ),
        rank_table=torch.full_like(route.rank_table, 10**6).where(
            route.a_table == 0, route.rank_table
        ),
        k_in=route.k_in,
        n_out=route.n_out,
        max_rank=route.max_rank,
        storage=route.storage,
    )
    expected = case.truth("mma", by_slot=True)[0]
    apply_lora_bgmv(poisoned_route, case.x, case.outs[0], case.slots, numerics="mma")
    assert_same_bits(case.out_buffers[0], expected)
