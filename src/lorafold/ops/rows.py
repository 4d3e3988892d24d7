"""Device functions: which rows, which key and which slice of a group a program works on."""

import triton
import triton.language as tl

__all__ = ["program_rows", "select"]


@triton.jit
def program_rows(
    tile_key_ptr, tile_rows_ptr, num_rows, TILE_ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr
):
    """The key and the rows [BLOCK_ROWS] (-1: none) of program_id(0): from the plan, or, without
    one (tile_key_ptr None), all rows in order under key 0."""
    part = tl.program_id(0)
    if tile_key_ptr is None:
        key = part * 0
        rows = part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        rows = tl.where(rows < num_rows, rows, -1)
    else:
        key = tl.load(tile_key_ptr + part // (TILE_ROWS // BLOCK_ROWS))
        rows = tl.load(tile_rows_ptr + part * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
    return key, rows


@triton.jit
def select(values, index):
    """values[index] of a tuple of scalars or pointers, for an index known at run time only."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen
