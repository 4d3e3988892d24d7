"""Device functions of numerics "gemv": 64 lanes of eight-element vectors, and the tree over them.

Operands are blocks [weight rows, rows of x, 4 * lanes] of pairs of elements. A thread holds the
four pairs of a lane: loads are 16 bytes wide, an addition needs no other thread, and only the tree
exchanges anything.
Block sizes and warps do not enter the bits.
"""

import triton
import triton.language as tl

__all__ = [
    "add_vectors",
    "after_loads",
    "end_of_tile",
    "keep_lanes",
    "lanes_total",
    "load_tail",
    "load_vectors",
    "rows_at",
    "tile_of",
]


@triton.jit
def tile_of(
    tile_key_ptr,
    tile_rows_ptr,
    num_rows,
    TILE_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Of program_id(0): the key of its tile (-1: no row for it) and its first place in the plan.

    Of a tile's blocks of rows, one of PARTS programs has every PARTS-th.
    """
    tile = tl.program_id(0) // PARTS
    place = tile * TILE_ROWS + tl.program_id(0) % PARTS * BLOCK_ROWS
    if tile_key_ptr is None:
        key = tl.where(place < num_rows, 0, -1)
    else:
        key = tl.load(tile_key_ptr + tile)
        if PARTS > 1:
            # Rows stand at the front of their tile, so later parts may have none.
            key = tl.where(tl.load(tile_rows_ptr + place) < 0, -1, key)
    return key, place


@triton.jit
def end_of_tile(tile_rows_ptr, num_rows, place, TILE_ROWS: tl.constexpr):
    """One past the last place of a tile that has a row, for any place in the tile."""
    begin = place // TILE_ROWS * TILE_ROWS
    if tile_rows_ptr is None:
        end = min(begin + TILE_ROWS, num_rows)
    else:
        rows = tl.load(tile_rows_ptr + begin + tl.arange(0, TILE_ROWS))
        end = begin + tl.sum((rows >= 0).to(tl.int32), axis=0)
    return end


@triton.jit
def rows_at(tile_rows_ptr, place, end, BLOCK_ROWS: tl.constexpr):
    """The rows [BLOCK_ROWS] from a place on, -1 where there is none."""
    places = place + tl.arange(0, BLOCK_ROWS)
    if tile_rows_ptr is None:
        rows = tl.where(places < end, places, -1)
    else:
        rows = tl.load(tile_rows_ptr + places)
    return rows


@triton.jit
def load_vectors(
    ptrs, mask, first, LANES: tl.constexpr, COUNT: tl.constexpr, END, PACKED: tl.constexpr
):
    """COUNT vectors per lane of rows [.., .., 1], from vector `first` on, +0 from vector END on
    unless that is None: a tuple of int32 [.., .., 4 * LANES], each two elements.

    Pairs, because a register that is carried around a loop would else hold one element only.
    PACKED: every row starts at a multiple of 16 bytes.
    """
    pairs = tl.arange(0, 4 * LANES)[None, None, :]
    blocks = ()
    for i in tl.static_range(COUNT):
        vector = first + i * LANES
        # Constant over four, so that loads stay wide.
        wanted = mask if END is None else mask & (pairs // 4 * 4 < (END - vector) * 4)
        if PACKED:
            at = ptrs.to(tl.pointer_type(tl.int32)) + (pairs + vector * 4)
            block = tl.load(at, mask=wanted, other=0)
        else:
            at = ptrs.to(tl.pointer_type(tl.int16)) + (pairs + vector * 4) * 2
            lower = tl.load(at, mask=wanted, other=0).to(tl.int32) & 0xFFFF
            block = lower | (tl.load(at + 1, mask=wanted, other=0).to(tl.int32) << 16)
        blocks += (block,)  # type: ignore[assignment]
    return blocks


@triton.jit
def after_loads(acc, positive_ptr):
    """acc as it is, but not before all loads so far were sent.

    ptxas would move each load down to its use, to save registers, and so wait for one after the
    other. It moves none across a barrier, and the additions not above a load behind the barrier:
    that of a positive int32 which was read before, of whose sign acc is made to depend.
    """
    tl.debug_barrier()
    zero = tl.load(positive_ptr) >> 31
    return (acc.to(tl.int32, bitcast=True) | zero).to(tl.float32, bitcast=True)


@triton.jit
def _eight(block, N: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """The eight elements of each vector of a block [N, M, 4 * LANES] as fp32 [N, M, LANES]."""
    even, odd = tl.split(tl.reshape(block, [N, M, LANES, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return (
        (w0 << 16).to(tl.float32, bitcast=True),
        (w0 & -65536).to(tl.float32, bitcast=True),
        (w1 << 16).to(tl.float32, bitcast=True),
        (w1 & -65536).to(tl.float32, bitcast=True),
        (w2 << 16).to(tl.float32, bitcast=True),
        (w2 & -65536).to(tl.float32, bitcast=True),
        (w3 << 16).to(tl.float32, bitcast=True),
        (w3 & -65536).to(tl.float32, bitcast=True),
    )


@triton.jit
def add_vectors(acc, ws, xs):
    """acc [N, M, LANES] plus the products of blocks w [N, 1, 4 * LANES] and x [1, M, 4 * LANES],
    one element at a time, for a tuple of each.
    """
    for i in tl.static_range(len(ws)):
        w = _eight(ws[i], acc.shape[0], 1, acc.shape[2])
        x = _eight(xs[i], 1, acc.shape[1], acc.shape[2])
        for e in tl.static_range(8):
            acc = tl.fma(w[e], x[e], acc)
    return acc


@triton.jit
def load_tail(ptrs, mask, first, length, LANES: tl.constexpr):
    """Element first + L of rows [.., .., 1] for every lane L below `length`, as fp32
    [.., .., LANES], +0 in the others.
    """
    lanes = tl.arange(0, LANES)[None, None, :]
    return tl.load(ptrs + (first + lanes), mask=mask & (lanes < length), other=0.0).to(tl.float32)


@triton.jit
def keep_lanes(acc, added, length):
    """`added` in the lanes below `length`, acc in the others: a lane without an element is left
    alone, because adding zero would turn its -0 into +0.
    """
    return tl.where(tl.arange(0, acc.shape[2])[None, None, :] < length, added, acc)


@triton.jit
def _halved(t, OUTER: tl.constexpr, HALF: tl.constexpr):
    """t [N, M, OUTER * 2 * HALF]: of each 2 * HALF, element i plus element i + HALF.

    A sum of two has only one order, so `tl.sum` may do it, which moves the least.
    """
    N: tl.constexpr = t.shape[0]
    M: tl.constexpr = t.shape[1]
    halves = tl.reshape(t, [N, M, OUTER, 2, HALF])
    return tl.reshape(tl.sum(halves, axis=3), [N, M, OUTER * HALF])


@triton.jit
def lanes_total(acc):
    """The contract's tree over 64 lanes, of which all but acc's [N, M, LANES] hold +0: [N, M]."""
    HALVES: tl.constexpr = 2 if acc.shape[2] == 64 else 1
    WIDTH: tl.constexpr = acc.shape[2] // HALVES
    if WIDTH >= 32:
        acc = _halved(acc, HALVES, 16)
    if WIDTH >= 16:
        acc = _halved(acc, HALVES, 8)
    if WIDTH >= 8:
        acc = _halved(acc, HALVES, 4)
    if WIDTH >= 4:
        acc = _halved(acc, HALVES, 2)
    if WIDTH >= 2:
        acc = _halved(acc, HALVES, 1)
    if HALVES == 2:
        acc = _halved(acc, 1, 1)
    total = tl.reshape(acc, [acc.shape[0], acc.shape[1]])
    if HALVES == 1:
        # Lanes that hold +0 take part in the contract's sum: they turn -0 into +0.
        total += 0.0
    return total
