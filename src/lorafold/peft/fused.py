"""Fused linear layers: an adapter's fused module cut for a split model, and the reverse.

Cutting shares A and slices the rows of B, and changes no bit of a delta. Joining stacks the A's and
puts the B's on a block diagonal, so the rank is the sum; the scale must be one for all, so scales
that differ by a power of two go into B, where that is exact, and others are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lorafold.adapter import LoraWeights, TargetShape
from lorafold.peft.paths import FUSED
from lorafold.peft.spec import LoraEntry
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["common_scale", "cut", "join"]


def common_scale(
    scales: Sequence[float], factors: Sequence[Tensor], what: str, decisions: Decisions
) -> tuple[float, list[Tensor]]:
    """One scale for several B's, of which some are multiplied by a power of two.

    Args:
        scales: one per factor.
        factors: B's, bfloat16, of any shape.
        what: the target, for messages.
        decisions: carries the adapter's name for messages.

    Returns:
        The scale, and the factors: unchanged where their scale is the common one.

    Raises:
        AdapterFormatError: if scales differ by other than a power of two, or B cannot hold the
            product.

    Example:
        >>> b = torch.ones(2, 2, dtype=torch.bfloat16, device="cpu")
        >>> scale, (first, second) = common_scale([2.0, 1.0], [b, b], "qkv_proj", Decisions("sql"))
        >>> scale, second.max().item()
        (2.0, 0.5)
    """
    common = next((scale for scale in scales if scale), 0.0)
    scaled: list[Tensor] = []
    for scale, factor in zip(scales, factors, strict=True):
        ratio = scale / common if common else 1.0
        exact = factor.double() * ratio
        product = exact.to(torch.bfloat16)
        is_power = ratio == 0.0 or math.frexp(abs(ratio))[0] == 0.5
        if not is_power or not torch.equal(product.double(), exact):
            message = (
                f"the slices of `{what}` have the scales {listed(set(scales))}, which no single "
                "scale expresses exactly"
            )
            raise decisions.refuse(Refusal.FUSED_SCALES, message)
        scaled.append(factor if ratio == 1.0 else product)
    return common, scaled


def cut(
    entry: LoraEntry,
    targets: Sequence[str],
    shapes: Mapping[str, TargetShape],
    decisions: Decisions,
) -> dict[str, LoraWeights]:
    """The slices of a fused module: every target gets A, and its own rows of B.

    Args:
        entry: the fused module.
        targets: the targets in the order of the fused rows.
        shapes: the shapes of the targets.
        decisions: carries the adapter's name for messages.

    Raises:
        AdapterFormatError: if the rows of B are not those of the targets together.
    """
    sizes = [shapes[target].out_features for target in targets]
    if sum(sizes) != entry.b.shape[0]:
        message = (
            f"B of `{entry.path}` has {entry.b.shape[0]} rows; {listed(targets)} have {sizes} "
            "outputs together"
        )
        raise decisions.refuse(Refusal.FUSED_SLICES, message)
    slices = torch.split_with_sizes(entry.b, sizes)
    return {
        target: LoraWeights(entry.a, rows.contiguous(), entry.scale)
        for target, rows in zip(targets, slices, strict=True)
    }


def _row_starts(
    whole: str, parts: Mapping[str, LoraEntry], out_features: int, decisions: Decisions
) -> dict[str, int]:
    """Where each part's rows begin in the fused output."""
    order = FUSED[whole.rpartition(".")[2]]
    sizes = {part: int(entry.b.shape[0]) for part, entry in parts.items()}
    absent = [part for part in order if part not in sizes]
    rest = out_features - sum(sizes.values())
    if len(order) == 2 and len(absent) == 1:
        sizes[absent[0]] = out_features // 2
    elif len(absent) == 1:
        sizes[absent[0]] = rest
    # Keys and values have one size in q, k, v; queries and keys in linear attention.
    twins = ("k_proj", "v_proj") if "k_proj" in order else ("in_proj_q", "in_proj_k")
    is_even = len(order) == 2 or sizes.get(twins[0]) == sizes.get(twins[1])
    if len(absent) > 1 or sum(sizes.values()) != out_features or not is_even:
        message = (
            f"`{whole}` has {out_features} outputs; the adapter has {sizes} of {list(order)}, from "
            "which the borders do not follow"
        )
        raise decisions.refuse(Refusal.FUSED_SLICES, message)
    starts, start = {}, 0
    for part in order:
        starts[part] = start
        start += sizes[part]
    return starts


def join(
    whole: str, parts: Mapping[str, LoraEntry], shape: TargetShape, decisions: Decisions
) -> LoraWeights:
    """One pair for a fused target from the pairs of its slices.

    Args:
        whole: the fused target.
        parts: the slices that the adapter has, by their last segment.
        shape: the shape of the fused target.
        decisions: carries the adapter's name for messages.

    Raises:
        AdapterFormatError: if the borders or a common scale do not follow from the slices.
    """
    starts = _row_starts(whole, parts, shape.out_features, decisions)
    entries = [parts[part] for part in starts if part in parts]
    scale, blocks = common_scale(
        [entry.scale for entry in entries], [entry.b for entry in entries], whole, decisions
    )
    rank = sum(int(entry.a.shape[0]) for entry in entries)
    b = torch.zeros(shape.out_features, rank, dtype=torch.bfloat16, device="cpu")
    column = 0
    for part, block in zip([part for part in starts if part in parts], blocks, strict=True):
        rows, columns = block.shape
        b[starts[part] : starts[part] + rows, column : column + columns] = block
        column += columns
    a = torch.cat([entry.a for entry in entries])
    return LoraWeights(a.contiguous(), b, scale)
