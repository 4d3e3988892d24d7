"""Device functions that kernels share: a program's rows, its slice, the fold, and the wait."""

import triton
import triton.language as tl

__all__ = [
    "fold",
    "let_next_start",
    "prefetch",
    "program_rows",
    "select",
    "slice_of",
    "wait_for_predecessor",
]


@triton.jit
def program_rows(tile_key_ptr, tile_rows_ptr, num_rows, TILE_ROWS: tl.constexpr):
    """The key (-1: nothing to do) and rows (-1: none) of program_id(0): from the plan, or, without
    one (tile_key_ptr None), all rows in order under key 0.
    """
    tile = tl.program_id(0)
    if tile_key_ptr is None:
        key = tile * 0
        rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
        rows = tl.where(rows < num_rows, rows, -1)
    else:
        key = tl.load(tile_key_ptr + tile)
        rows = tl.load(tile_rows_ptr + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
    return key, rows


@triton.jit
def select(values, index):
    """values[index] of a tuple of scalars or pointers, for an index known at run time only."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def slice_of(program, n_outs, width):
    """The slice whose columns a program works on, and that slice's first program."""
    slice_id = program * 0
    first = program * 0
    border = program * 0
    for i in tl.static_range(1, len(n_outs)):
        border += tl.cdiv(n_outs[i - 1], width)
        slice_id = tl.where(program >= border, i, slice_id)
        first = tl.where(program >= border, border, first)
    return slice_id, first


@triton.jit
def fold(out, delta, scale):
    """The contract's last rounding: the scaled sum to bf16."""
    return (out.to(tl.float32) + scale * delta.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start now: all that it reads before its own wait is there already."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait until the kernel before this one is complete.

    Every path of every program must do so: then no kernel is complete before its predecessor, and
    the wait is one for all kernels before.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptrs, num_bytes, mask, PDL: tl.constexpr):
    """Start to bring num_bytes (a multiple of 16) at each of ptrs into the L2.

    All of a device share it, so this may come before the wait, whoever is still to write there.
    """
    if PDL:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $3, 0; "
            "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;}",
            "=r,l,r,r",
            [ptrs.to(tl.int64), num_bytes, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
