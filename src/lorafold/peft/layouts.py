"""How files store the factors of experts, and how they are read into [experts, ...] factors.

PEFT folds all experts of a parameter into two matrices, differently on the two sides:

    lora_A [experts * rank, in]    row    e * rank + j     is expert e, rank j
    lora_B [out, rank * experts]   column j * experts + e  is expert e, rank j

PEFT before 0.19.1 swapped in and out for parameters stored as [experts, out, in], and Unsloth
grouped the columns of lora_B by expert, all under the same names. The swap shows in the shapes
unless a parameter is square; the grouping never does. What cannot be known is refused, not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from lorafold.peft.config import PeftConfig
from lorafold.refusal import Decisions, Refusal

__all__ = ["ExpertLayout", "choose_swap", "fold", "is_grouped", "stacked", "unfold"]

ExpertLayout = Literal["peft", "peft-0.18", "unsloth", "unsloth-0.18"]
"""Layouts of folded factors: with in and out as they are or ("-0.18") swapped, and with the columns
of lora_B by rank ("peft") or grouped by expert ("unsloth")."""


def unfold(
    a: Tensor, b: Tensor, rank: int, *, swapped: bool, grouped: bool
) -> tuple[Tensor, Tensor]:
    """Per-expert factors from PEFT's folded ones.

    Args:
        a: [num_experts * rank, in], or [.., out] if swapped.
        b: [out, rank * num_experts], or [in, ..] if swapped.
        rank: the rank of one expert.
        swapped: whether in and out are exchanged.
        grouped: whether the columns of b are grouped by expert.

    Returns:
        A [num_experts, rank, in] and B [num_experts, out, rank], as views.

    Example:
        >>> import torch
        >>> a, b = unfold(torch.ones(6, 8), torch.ones(4, 6), 3, swapped=False, grouped=False)
        >>> a.shape, b.shape
        (torch.Size([2, 3, 8]), torch.Size([2, 4, 3]))
    """
    num_experts = a.shape[0] // rank
    rows = a.reshape(num_experts, rank, -1)
    if grouped:
        columns = b.reshape(-1, num_experts, rank).transpose(0, 1)
    else:
        columns = b.reshape(-1, rank, num_experts).permute(2, 0, 1)
    if swapped:
        return columns.transpose(1, 2), rows.transpose(1, 2)
    return rows, columns


def fold(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """PEFT's folded factors from per-expert ones, as PEFT 0.19.1 and later store them.

    Args:
        a: [num_experts, rank, in].
        b: [num_experts, out, rank].

    Returns:
        A [num_experts * rank, in] and B [out, rank * num_experts], contiguous.

    Example:
        >>> import torch
        >>> a, b = torch.rand(2, 3, 8), torch.rand(2, 4, 3)
        >>> again = unfold(*fold(a, b), rank=3, swapped=False, grouped=False)
        >>> torch.equal(again[0], a), torch.equal(again[1], b)
        (True, True)
    """
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def stacked(
    a: Tensor, b: Tensor, rank: int, num_experts: int, features: tuple[int, int]
) -> list[tuple[Tensor, Tensor]]:
    """Every reading of 3-D factors that fits, as A [experts, rank, in] and B [experts, out, rank].

    Tinker and packed files have them so, where 1 expert stands for all; scattered MoE has both
    transposed; Megatron's oriented export has B as [out, rank, experts].

    Args:
        a: the stored A, 3-D.
        b: the stored B, 3-D.
        rank: the rank of one expert.
        num_experts: experts of the layer.
        features: (in, out).

    Example:
        >>> import torch
        >>> [(a, b)] = stacked(torch.ones(1, 2, 8), torch.ones(3, 4, 2), 2, 3, (8, 4))
        >>> a.shape, b.shape
        (torch.Size([3, 2, 8]), torch.Size([3, 4, 2]))
    """
    in_features, out_features = features
    shape_a = (num_experts, rank, in_features)
    shape_b = (num_experts, out_features, rank)
    readings = [
        (a, b),
        (a.transpose(1, 2), b.transpose(1, 2)),
        (a, b.permute(2, 0, 1)),
    ]
    fitting: list[tuple[Tensor, Tensor]] = []
    for read_a, read_b in readings:
        fits_a = read_a.shape[1:] == shape_a[1:] and read_a.shape[0] in (1, num_experts)
        fits_b = read_b.shape[1:] == shape_b[1:] and read_b.shape[0] in (1, num_experts)
        if fits_a and fits_b:
            fitting.append((read_a.expand(shape_a), read_b.expand(shape_b)))
    return fitting


def is_grouped(
    config: PeftConfig, layout: ExpertLayout | None, rank: int, decisions: Decisions
) -> bool:
    """Whether the columns of folded B's are grouped by expert.

    Args:
        config: carries Unsloth's marks.
        layout: what the caller says, None if nothing.
        rank: the largest rank of the folded factors: with rank 1 both orders are one.
        decisions: carries the adapter's name for messages.

    Raises:
        AdapterFormatError: if the file is Unsloth's and does not say.
    """
    if layout is not None:
        return layout.startswith("unsloth")
    words = {"": False, "rank_major": False, "grouped_by_expert": True}
    if config.lora_b_layout not in words:
        message = f"lora_B_layout {config.lora_b_layout!r} is not known; allowed: {sorted(words)}"
        raise decisions.refuse(Refusal.EXPERT_LAYOUT, message)
    if config.is_unsloth and not config.lora_b_layout and rank > 1:
        message = (
            "the file is Unsloth's and does not say how the columns of lora_B are ordered; hint: "
            "expert_layout is `unsloth` if it was saved before September 2026, else `peft`"
        )
        raise decisions.refuse(Refusal.EXPERT_LAYOUT, message)
    return words[config.lora_b_layout]


def choose_swap(
    fitting: Sequence[set[bool]],
    config: PeftConfig,
    layout: ExpertLayout | None,
    *,
    transposed: bool,
    decisions: Decisions,
) -> bool:
    """Whether in and out are exchanged in all folded factors of a file.

    Args:
        fitting: per factor pair, the readings (True for swapped) that fit its target, at least
            one.
        config: carries the version of PEFT.
        layout: what the caller says, None if nothing.
        transposed: whether the base stores [experts, in, out].
        decisions: takes the notes, and carries the adapter's name for messages.

    Raises:
        AdapterFormatError: if neither the shapes nor the version decide, or they contradict.
    """
    common = {True, False}.intersection(*fitting)
    if layout is not None:
        wanted = layout.endswith("-0.18")
        if wanted not in common:
            message = f"expert_layout `{layout}` does not fit the shapes of the factors"
            raise decisions.refuse(Refusal.EXPERT_LAYOUT, message)
        return wanted
    if not common:
        message = "some expert factors have in and out swapped, and others do not"
        raise decisions.refuse(Refusal.EXPERT_LAYOUT, message)
    if len(common) == 1:
        swapped = common.pop()
        if swapped:
            decisions.note(
                "expert factors have in and out swapped, as PEFT before 0.19.1 saved them"
            )
        return swapped
    version = config.peft_version
    if version is not None and version >= (0, 19, 1):
        decisions.note("square expert factors are read as PEFT 0.19.1 and later save them")
        return False
    if transposed and (version is None or version < (0, 19)):
        decisions.note("square expert factors are read as every PEFT saved them for this model")
        return False
    message = (
        "the expert factors are square, and the version of PEFT does not tell whether in and out "
        "are swapped; hint: expert_layout is `peft-0.18` if they are, else `peft`"
    )
    raise decisions.refuse(Refusal.EXPERT_LAYOUT, message)
