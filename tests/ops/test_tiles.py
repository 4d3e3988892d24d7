"""Block sizes: pure functions whose answers the kernels can run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorafold.numerics import Numerics
from lorafold.ops import tiles
from tests.ops.cases import assert_same_bits, make_case
from tests.ops.test_kernels import run

SIZES = {
    "num_tiles": st.integers(1, 5000),
    "tile_rows": st.sampled_from(tiles.HEIGHTS),
    "max_rank": st.integers(1, 512),
    "shared_memory": st.sampled_from([60, 95, 160, 220]).map(lambda kib: kib * 1024),
}


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@given(**SIZES, num_slices=st.integers(1, 4), k_in=st.integers(1, 40_000))
def test_shrink(num_tiles, tile_rows, max_rank, shared_memory, num_slices, k_in):
    tile = tiles.shrink_tile(num_tiles, tile_rows, num_slices, k_in, max_rank, shared_memory)
    assert tile.tile_rows == tile_rows
    assert all(map(is_power_of_two, (tile.tile_rows, tile.block_ranks, tile.block_k)))
    # A block of K never crosses a border of segments, and a step is 16.
    assert 1024 % tile.block_k == 0
    assert tile.block_k % 16 == 0
    assert tile.num_bytes <= shared_memory
    assert tile.block_ranks >= 16


@given(**SIZES, columns=st.integers(1, 60_000), segments=st.sampled_from([0, 2, 4, 14, 40]))
def test_expand(num_tiles, tile_rows, max_rank, shared_memory, columns, segments):
    tile = tiles.expand_tile(num_tiles, tile_rows, columns, max_rank, segments, shared_memory)
    assert tile.tile_rows == tile_rows
    assert all(map(is_power_of_two, (tile.tile_rows, tile.block_cols, tile.block_k)))
    if tile.blocks > 1:  # a run of blocks holds all ranks at once
        assert tile.block_k >= max_rank
    assert tile.num_bytes <= shared_memory
    assert tile.block_cols >= 16


@given(
    tile_rows=SIZES["tile_rows"],
    k_in=st.integers(1, 40_000),
    max_rank=SIZES["max_rank"],
    shared_memory=SIZES["shared_memory"],
)
def test_beside(tile_rows, k_in, max_rank, shared_memory):
    shrink, expand = tiles.beside_tiles(tile_rows, k_in, max_rank, shared_memory)
    for tile in (shrink, expand):
        assert tile.tile_rows == tile_rows
        assert tile.num_bytes <= shared_memory
    assert all(map(is_power_of_two, (shrink.block_ranks, shrink.block_k, expand.block_cols)))
    assert 1024 % shrink.block_k == 0
    assert shrink.block_k % 16 == 0
    assert not shrink.early  # a program that waits would stand where the base layer's should
    if expand.blocks > 1:
        assert expand.block_k >= max_rank


@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("tile_rows", tiles.HEIGHTS)
def test_those_beside_a_base_layer_give_the_same_bits(device, tile_rows, max_rank):
    shape = (19, [max_rank, None, 7], 1040, [136, 24], max_rank)
    expected = make_case(*shape, device=device).truth("mma")
    case = make_case(*shape, device=device)
    shrink, expand = tiles.beside_tiles(tile_rows, 1040, max_rank)
    run(case, "mma", shrink=shrink, expand=expand)
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth)


def test_only_few_rows_have_sizes_of_their_own_beside_a_base_layer():
    def both(num_rows: int, numerics: Numerics = "mma") -> list[object]:
        call = numerics, num_rows, num_rows, 16, 4096, (4096,), 16
        return [tiles.call_tiles(*call, is_beside=is_beside) for is_beside in (True, False)]

    assert both(128)[0] == tiles.beside_tiles(16, 4096, 16) != both(128)[1]
    for own, usual in (both(129), both(64, "gemv")):
        assert own == usual


@given(
    num_rows=st.integers(1, 20_000),
    num_keys=st.integers(1, 3000),
    num_slices=st.integers(1, 4),
    k_in=st.integers(1, 60_000),
    columns=st.integers(1, 60_000),
    max_rank=st.integers(1, 1024),
)
def test_gemv(num_rows, num_keys, num_slices, k_in, columns, max_rank):
    tile_rows = tiles.plan_rows(num_rows, num_keys)
    fixed = num_rows, tiles.max_tiles(num_rows, num_keys, tile_rows), tile_rows
    shrink = tiles.gemv_shrink_tile(*fixed, num_slices, k_in, max_rank)
    expand = tiles.gemv_expand_tile(*fixed, columns, max_rank)
    for tile in (shrink, expand):
        assert tile.tile_rows == tile_rows
        assert is_power_of_two(tile.block_rows)
        assert tile.block_rows * tile.parts <= tile_rows
    assert is_power_of_two(shrink.block_ranks)
    # Registers for one group of loads, and of several groups for two.
    loads = shrink.block_rows + shrink.block_ranks
    groups = k_in // (512 * shrink.vectors)
    assert 1 <= shrink.vectors <= max(1, k_in // 512)
    assert loads * shrink.vectors * min(2, max(1, groups)) <= 56
    # Four vectors per thread, of which ranks of a tail need room for half of eight lanes.
    lanes = min(64, tiles.next_power_of_2(tiles.cdiv(max_rank, 8)))
    assert is_power_of_two(expand.block_cols)
    assert expand.block_cols * lanes == 128 * expand.num_warps
    assert expand.block_cols * lanes >= 2 * max(8, lanes)


@pytest.mark.parametrize(
    ("rows", "keys", "of_key"), [(1, 8, 1), (8, 8, 1), (64, 8, 8), (64, 64, 1), (2048, 8, 64)]
)
def test_gemv_programs_take_as_many_rows_as_a_key_has(rows, keys, of_key):
    tile_rows = tiles.plan_rows(rows, keys)
    num_tiles = tiles.max_tiles(rows, keys, tile_rows)
    for tile in tiles.call_tiles("gemv", rows, num_tiles, tile_rows, 4096, (4096,), 16):
        assert isinstance(tile, tiles.GemvShrinkTile | tiles.GemvExpandTile)
        assert tile.block_rows * tile.parts == of_key


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
    shrinks = {(shape[0], *sizes) for shape, sizes in table["shrink"]}
    expands = {(shape[0], *b[:2], max(16, shape[2]), *b[2:]) for shape, b in table["expand"]}
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
    run(case, "mma", **({"shrink": tile} if is_shrink else {"expand": tile}))
    for buffer, truth in zip(case.out_buffers, expected, strict=True):
        assert_same_bits(buffer, truth, str(tile))


@given(num_rows=st.integers(1, 100_000), num_keys=st.integers(1, 5000), data=st.data())
def test_tiles_suffice_for_any_batch(num_rows, num_keys, data):
    """max_tiles bounds what any split of rows over keys needs."""
    block_rows = tiles.plan_rows(num_rows, num_keys)
    assert block_rows in tiles.HEIGHTS
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
