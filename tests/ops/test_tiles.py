"""Block sizes: pure functions whose answers the kernels can run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lorafold.ops import tiles

SIZES = {
    "numerics": st.sampled_from(["gemv", "mma"]),
    "num_tiles": st.integers(1, 5000),
    "tile_rows": st.sampled_from([16, 32, 64]),
    "max_rank": st.integers(1, 512),
}


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@given(**SIZES, num_slices=st.integers(1, 4), k_in=st.integers(1, 40_000))
def test_shrink(numerics, num_tiles, tile_rows, max_rank, num_slices, k_in):
    tile = tiles.shrink_tile(numerics, num_tiles, tile_rows, num_slices, k_in, max_rank)
    assert tile.tile_rows == tile_rows
    assert tile_rows % tile.block_rows == 0
    assert all(map(is_power_of_two, (tile.block_rows, tile.block_ranks, tile.block_k)))
    if numerics == "mma":
        # A block of K never crosses a border of segments, and a step is 16.
        assert 1024 % tile.block_k == 0
        assert tile.block_k % 16 == 0
        in_flight = (tile.block_ranks + tile.block_rows) * tile.block_k * 2 * tile.num_stages
        assert in_flight <= tiles.SHARED_MEMORY
    else:
        # Lanes hold all vectors of K, or the 64 of the contract, and a tail of seven.
        assert tile.block_k // 8 == 64 or tile.block_k >= k_in
        assert tile.block_k >= 64


@given(**SIZES, columns=st.integers(1, 60_000), segments=st.sampled_from([0, 2, 4, 14, 40]))
def test_expand(numerics, num_tiles, tile_rows, max_rank, columns, segments):
    tile = tiles.expand_tile(numerics, num_tiles, tile_rows, columns, max_rank, segments)
    assert tile.tile_rows == tile_rows
    assert tile_rows % tile.block_rows == 0
    assert all(map(is_power_of_two, (tile.block_rows, tile.block_cols, tile.block_k)))
    if tile.blocks > 1:  # a run of blocks holds all ranks at once
        assert tile.block_k >= max_rank
        in_flight = tile.num_stages * tile.block_cols * 2 * (tile.block_k + tile_rows)
        assert in_flight <= tiles.SHARED_MEMORY
    if numerics == "gemv":
        assert tile.block_k // 8 == 64 or tile.block_k >= max_rank


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
