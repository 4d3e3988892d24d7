"""Random operands that show what they should: any other order of additions, any missing rounding.

In plain Gaussian sums the last bits of fp32 vanish when the result is rounded to bf16. So in
"cancelling" operands large terms cancel pairwise, over a distance, and what is left is a few small
terms and the rounding errors of the large ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lorafold.numerics import Numerics
from lorafold.verify.case import Case
from lorafold.verify.check import Extent

__all__ = [
    "Kind",
    "Shape",
    "all_cases",
    "cancelling",
    "dense_case",
    "dense_cases",
    "expert_cases",
    "small_cases",
]

_SMALL = 2.0**-18  # terms that stand alone among cancelling ones
_SCALES = (4 / 3, -1.3, 1.7)  # scales at which a fused fold shows in some 0.4 % of elements
_SPECIAL = (0.0, -0.0, 2.0**-133, -(2.0**-127), 3.3e38, -3.3e38, torch.inf, torch.nan)

Kind = Literal["cancelling", "plain", "wild", "spoilt"]
"""Large terms that cancel; Gaussian; any exponents, with special values; Gaussian with small A, and
one infinity or NaN in every other row."""

_DENSE_AXES = {
    "x": ("rows", "k"),
    "out": ("rows", "cols"),
    "slots": ("rows",),
    "a": ("adapters", "rank", "k"),
    "b": ("adapters", "cols", "rank"),
    "scales": ("adapters",),
    "ranks": ("adapters",),
}
_EXPERT_AXES = {
    "x": ("rows", "choices", "k"),
    "out": ("rows", "choices", "cols"),
    "slots": ("rows",),
    "chosen": ("rows", "choices"),
    "a": ("adapters", "experts", "rank", "k"),
    "b": ("adapters", "experts", "cols", "rank"),
    "scales": ("adapters",),
    "ranks": ("adapters",),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a case; ranks per slot, 0 where a slot does not adapt the target."""

    rows: int
    k: int
    cols: int
    ranks: tuple[int, ...]


def cancelling(t: Tensor, *, mirrored: bool) -> Tensor:
    """Make the last axis of t [..., n] float32 cancel against a mirrored operand, as bf16.

    The second half of the axis repeats the first where `mirrored`, else it is its negative, but for
    every fifth element, which is small and stands alone.
    """
    half = t.shape[-1] // 2
    first, second = t[..., :half], t[..., half : 2 * half]
    if mirrored:
        second.copy_(first)
        return t.bfloat16()
    alone = torch.arange(half) % 5 == 4
    first[..., alone] *= _SMALL
    second.copy_(-first)
    second[..., alone] = 0
    if half:
        t[..., 2 * half :] *= _SMALL
    return t.bfloat16()


def _drawn(generator: torch.Generator, *shape: int, kind: Kind, cancels: bool = True) -> Tensor:
    """bf16 of a kind; as a factor of an adapter where it `cancels`."""
    values = torch.randn(*shape, generator=generator)
    if kind == "wild":
        values *= 2.0 ** (8.0 * torch.randn(*shape, generator=generator))
    if kind == "cancelling" and cancels:
        return cancelling(values, mirrored=False)
    if kind == "spoilt" and cancels:
        values *= 2.0**-60
    return values.bfloat16()


def _factors(
    generator: torch.Generator, lead: tuple[int, ...], shape: Shape, kind: Kind
) -> tuple[Tensor, Tensor]:
    """A [*lead, rank, k] and B [*lead, cols, rank], zero beyond each slot's rank."""
    most = max(shape.ranks)
    a = torch.zeros(*lead, most, shape.k, dtype=torch.bfloat16)
    b = torch.zeros(*lead, shape.cols, most, dtype=torch.bfloat16)
    for slot, rank in enumerate(shape.ranks):
        a_slot = _drawn(generator, *lead[1:], rank, shape.k, kind=kind)
        if kind == "cancelling":
            # Equal rows of A give equal elements of xa, over which the columns of B cancel.
            half = rank // 2
            a_slot[..., half : 2 * half, :] = a_slot[..., :half, :]
        a[slot, ..., :rank, :] = a_slot
        b[slot, ..., :rank] = _drawn(generator, *lead[1:], shape.cols, rank, kind=kind)
    return a, b


def _rows(
    generator: torch.Generator, lead: tuple[int, ...], shape: Shape, kind: Kind
) -> tuple[Tensor, Tensor]:
    """x [*lead, k] and base outputs [*lead, cols], about as large as the deltas that are added."""
    x = torch.randn(*lead, shape.k, generator=generator)
    out = _drawn(generator, *lead, shape.cols, kind=kind, cancels=False)
    if kind == "cancelling":
        return cancelling(x, mirrored=True), out * 2.0**-33
    if kind == "plain":
        return x.bfloat16(), out * 2.0 ** (shape.k.bit_length() / 2)
    if kind == "spoilt":
        x = x.bfloat16()
        x.view(-1, shape.k)[::2, shape.k // 2] = torch.inf
        x.view(-1, shape.k)[::4, shape.k // 2] = torch.nan
        return x, out
    x = (x * 2.0 ** (8.0 * torch.randn(x.shape, generator=generator))).bfloat16()
    special = torch.tensor(_SPECIAL).bfloat16()
    flat = x.view(-1, shape.k)
    for i in range(0, len(flat), 3):
        flat[i, i % shape.k] = special[i // 3 % len(special)]
    out.view(-1, shape.cols)[:, 0] = special[torch.arange(len(flat)) % len(special)]
    return x, out


def dense_case(shape: Shape, numerics: Numerics, seed: int, kind: Kind = "cancelling") -> Case:
    """Rows of several adapters and of the base in one batch.

    Args:
        shape: the sizes.
        numerics: how dot products are summed.
        seed: of the random numbers.
        kind: what the numbers are like.
    """
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(shape.ranks)
    a, b = _factors(generator, (num_slots,), shape, kind)
    x, out = _rows(generator, (shape.rows,), shape, kind)
    # Three rows in four have an adapter.
    slots = torch.randint(0, 4 * num_slots, (shape.rows,), generator=generator)
    slots = torch.where(slots < 3 * num_slots, slots % num_slots, -1).int()
    operands = {"x": x, "out": out, "slots": slots, "a": a, "b": b}
    return Case(operands | _per_slot(shape), _DENSE_AXES, numerics)


def _per_slot(shape: Shape) -> dict[str, Tensor]:
    scales = [_SCALES[i % len(_SCALES)] for i in range(len(shape.ranks))]
    return {
        "scales": torch.tensor(scales, dtype=torch.float32),
        "ranks": torch.tensor(shape.ranks, dtype=torch.int32),
    }


_CPU_SHAPES = (Shape(12, 2100, 40, (16, 0, 5, 24)), Shape(9, 75, 21, (4, 0, 7)))
_CPU_MORE = (
    Shape(33, 1031, 96, (8, 0, 13, 3)),
    Shape(9, 7, 9, (2, 1)),
    Shape(48, 4096, 384, (64, 8, 0, 16)),
)
# Kernels are compiled per kind of shape, which takes most of the time: --quick has one kind only.
_CUDA_SHAPES = (Shape(40, 4096, 512, (16, 0, 8, 5)),) * 2
_CUDA_MORE = (
    Shape(9, 75, 21, (4, 0, 7)),
    Shape(300, 2048, 640, (64, 0, 16)),
    Shape(17, 1031, 96, (8, 0, 13, 3)),
    Shape(24, 14336, 1024, (16, 8)),
)
_SMALL_SHAPES = (Shape(4, 1050, 11, (5, 0, 9)), Shape(7, 39, 160, (3, 8)), Shape(3, 5, 7, (2, 1)))
_SMALL_CUDA_SHAPE = Shape(3, 4096, 32, (3, 0, 2))
# The second number is that of the experts, the third that of the choices of a token.
_EXPERT_CUDA_SHAPE = (Shape(21, 4096, 64, (16, 0, 5)), 5, 2)
_EXPERT_SHAPES = (
    (Shape(21, 256, 48, (8, 0, 5)), 5, 2),
    (Shape(40, 1040, 96, (16, 4)), 8, 4),
    (Shape(7, 75, 21, (3, 2)), 3, 1),
)


def dense_cases(extent: Extent, numerics: Numerics) -> Iterator[Case]:
    """The cases of the checks on dense targets: cancelling and plain operands in turn."""
    shapes, more = (_CUDA_SHAPES, _CUDA_MORE) if extent.is_cuda else (_CPU_SHAPES, _CPU_MORE)
    for i, shape in enumerate(shapes if extent.quick else shapes + more):
        kind: Kind = "plain" if i % 2 else "cancelling"
        yield dense_case(shape, numerics, 100 * extent.seed + i, kind)


def all_cases(extent: Extent, numerics: Numerics) -> Iterator[Case]:
    """The dense cases, and shapes of theirs with operands of the other kinds."""
    yield from dense_cases(extent, numerics)
    others: tuple[Kind, ...] = ("wild", "spoilt")
    for kind in others:
        for shape in (_CUDA_SHAPES[0], _CUDA_MORE[0])[: 1 if extent.quick else 2]:
            yield dense_case(shape, numerics, 100 * extent.seed + 50, kind)


def small_cases(extent: Extent, numerics: Numerics) -> Iterator[Case]:
    """Cases of every kind, small enough for arithmetic in Python's own numbers."""
    kinds: tuple[Kind, ...] = ("cancelling", "plain", "wild", "spoilt")
    shapes = _SMALL_SHAPES[:2] if extent.quick else _SMALL_SHAPES
    if extent.is_cuda:
        shapes = (_SMALL_CUDA_SHAPE,) if extent.quick else (_SMALL_CUDA_SHAPE, *shapes)
    for i, shape in enumerate(shapes):
        for kind in kinds:
            yield dense_case(shape, numerics, 100 * extent.seed + i, kind)


def expert_cases(extent: Extent, numerics: Numerics) -> Iterator[Case]:
    """Tokens whose choices of experts, and whose adapters, are drawn at random."""
    shapes = _EXPERT_SHAPES[:1] if extent.quick else _EXPERT_SHAPES
    if extent.is_cuda:
        shapes = (_EXPERT_CUDA_SHAPE,) if extent.quick else (_EXPERT_CUDA_SHAPE, *shapes)
    for i, (shape, num_experts, top_k) in enumerate(shapes):
        generator = torch.Generator().manual_seed(100 * extent.seed + i)
        lead = (len(shape.ranks), num_experts)
        a, b = _factors(generator, lead, shape, "cancelling")
        x, out = _rows(generator, (shape.rows, top_k), shape, "cancelling")
        draws = torch.rand(shape.rows, num_experts, generator=generator)
        slots = torch.randint(-1, len(shape.ranks), (shape.rows,), generator=generator)
        yield Case(
            {
                "x": x,
                "out": out,
                "slots": slots.int(),
                "chosen": draws.argsort(1)[:, :top_k].int().contiguous(),
                "a": a,
                "b": b,
                **_per_slot(shape),
            },
            _EXPERT_AXES,
            numerics,
        )
