"""Block sizes: pure functions whose answers the kernels can run."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafold.ops import Plan, tiles
from lorafold.ops.group import group_triton
from tests.ops.cases import Case, assert_same_bits, make_case
from tests.ops.test_kernels import run

SIZES = {
    "numerics": st.sampled_from(["gemv", "mma"]),
    "num_tiles": st.integers(1, 5000),
    "tile_rows": st.sampled_from([16, 32, 64]),
    "max_rank": st.integers(1, 512),
    "shared_memory": st.sampled_from([60, 95, 160, 220]).map(lambda kib: kib * 1024),
}


def plan_of_height(case: Case, tile_rows: int) -> Plan:
    """A plan of the case's rows in tiles of that height, whatever its size would give."""
    num_rows, num_keys = case.x.shape[0], case.routes[0].max_loras
    num_tiles = tiles.max_tiles(num_rows, num_keys, tile_rows)
    plan = Plan.empty(num_rows, num_keys, case.x.device)
    plan = dataclasses.replace(
        plan,
        block_rows=tile_rows,
        tile_key=plan.tile_key.new_full((num_tiles,), -1),
        tile_rows=plan.tile_rows.new_full((num_tiles * tile_rows,), -1),
    )
    group_triton(case.slots, plan)
    return plan


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@given(**SIZES, num_slices=st.integers(1, 4), k_in=st.integers(1, 40_000))
def test_shrink(numerics, num_tiles, tile_rows, max_rank, shared_memory, num_slices, k_in):
    tile = tiles.shrink_tile(
        numerics, num_tiles, tile_rows, num_slices, k_in, max_rank, shared_memory
    )
    assert tile.tile_rows == tile_rows
    assert tile_rows % tile.block_rows == 0
    assert all(map(is_power_of_two, (tile.block_rows, tile.block_ranks, tile.block_k)))
    if numerics == "mma":
        # A block of K never crosses a border of segments, and a step is 16.
        assert 1024 % tile.block_k == 0
        assert tile.block_k % 16 == 0
        assert tile.num_bytes <= shared_memory
        assert tile.block_ranks >= 16
    else:
        # Lanes hold all vectors of K, or the 64 of the contract, and a tail of seven.
        assert tile.block_k // 8 == 64 or tile.block_k >= k_in
        assert tile.block_k >= 64


@given(**SIZES, columns=st.integers(1, 60_000), segments=st.sampled_from([0, 2, 4, 14, 40]))
def test_expand(numerics, num_tiles, tile_rows, max_rank, shared_memory, columns, segments):
    tile = tiles.expand_tile(
        numerics, num_tiles, tile_rows, columns, max_rank, segments, shared_memory
    )
    assert tile.tile_rows == tile_rows
    assert tile_rows % tile.block_rows == 0
    assert all(map(is_power_of_two, (tile.block_rows, tile.block_cols, tile.block_k)))
    if tile.blocks > 1:  # a run of blocks holds all ranks at once
        assert tile.block_k >= max_rank
    if numerics == "mma":
        assert tile.num_bytes <= shared_memory
        assert tile.block_cols >= 16
    else:
        assert tile.block_k // 8 == 64 or tile.block_k >= max_rank


def test_a_measured_shape_gets_its_own_entry():
    for kernel, entries in tiles._table().items():
        assert len({shape for shape, _ in entries}) == len(entries), kernel
        for shape, sizes in entries:
            assert tiles._nearest(kernel, shape) == sizes


def test_a_shape_gets_the_nearest_entry():
    (_, num_tiles, *_), sizes = tiles._table()["shrink"][0]
    shape = tiles._table()["shrink"][0][0]
    assert tiles._nearest("shrink", (shape[0], num_tiles, *shape[2:4], shape[4] + 1)) == sizes


def table_tiles() -> list[tiles.ShrinkTile | tiles.ExpandTile]:
    table = tiles._table()
    shrinks = {(shape[0], shape[0], *sizes) for shape, sizes in table["shrink"]}
    expands = {
        (shape[0], shape[0], *b[:2], max(16, shape[2]), *b[2:]) for shape, b in table["expand"]
    }
    return [
        *(tiles.ShrinkTile(*sizes) for sizes in sorted(shrinks)),
        *(tiles.ExpandTile(*sizes) for sizes in sorted(expands)),
    ]


@pytest.mark.parametrize("tile", table_tiles(), ids=str)
def test_every_entry_of_the_table_gives_the_same_bits(device, tile):
    shape = (19, [16, None, 7], 1040, [40, 24], 16)
    expected = make_case(*shape, device=device).truth("mma")
    case = make_case(*shape, device=device)
    is_shrink = isinstance(tile, tiles.ShrinkTile)
    plan = plan_of_height(case, tile.tile_rows)
    run(case, "mma", plan=plan, **({"shrink": tile} if is_shrink else {"expand": tile}))
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth, str(tile))


@given(num_rows=st.integers(1, 100_000), num_keys=st.integers(1, 5000), data=st.data())
def test_tiles_suffice_for_any_batch(num_rows, num_keys, data):
    """max_tiles bounds what any split of rows over keys needs."""
    block_rows = tiles.plan_rows(num_rows, num_keys)
    bound = tiles.max_tiles(num_rows, num_keys, block_rows)
    used = min(num_keys, num_rows, data.draw(st.integers(1, 50)))
    # The worst split: all but one key with one row more than a multiple of the block.
    counts = [1] * used
    counts[0] += num_rows - used
    for i in range(1, used):
        if counts[0] > block_rows:
            counts[0] -= block_rows
            counts[i] += block_rows
    assert sum(counts) == num_rows
    assert sum(-(-c // block_rows) for c in counts) <= bound


@given(n=st.integers(1, 10**6))
def test_next_power_of_2(n):
    power = tiles.next_power_of_2(n)
    assert is_power_of_two(power)
    assert power // 2 < n <= power
