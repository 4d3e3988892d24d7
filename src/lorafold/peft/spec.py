"""What an adapter's files say, before any model is known.

The result of `lorafold.peft.parse`: factors in bfloat16, with their scales and the names they had.
Which targets they belong to is decided by `lorafold.peft.bind.bind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lorafold.adapter import Kind
from lorafold.peft.config import PeftConfig

__all__ = ["AdapterSpec", "ExpertEntry", "Form", "LoraEntry", "Projection"]

Projection = Literal["gate", "up", "gate_up", "down"]
"""A part of an expert: half of the first product, all of it, or the second."""

Form = Literal["single", "stacked", "folded"]
"""How expert factors are stored: one expert per tensor, 3-D, or PEFT's 2-D with all folded in."""


@dataclass(frozen=True, eq=False)
class LoraEntry:
    """The factors of one module that is not an expert.

    Args:
        path: the module, without prefixes; with underscores for dots if `is_flat`.
        kind: "linear", "router" or "embedding".
        a: [rank, in] bfloat16; [rank, vocabulary] for an embedding.
        b: [out, rank] bfloat16; [hidden, rank] for an embedding.
        scale: the factor of the delta, a float32 value.
        tensors: the names in the file.
        is_flat: whether the path is kohya's.
    """

    path: str
    kind: Kind
    a: Tensor
    b: Tensor
    scale: float
    tensors: tuple[str, ...]
    is_flat: bool = False


@dataclass(frozen=True, eq=False)
class ExpertEntry:
    """The factors of experts, as the file has them.

    Args:
        path: the module that the tensors name.
        module: the experts module: `path` up to and including "experts".
        form: how the experts are stored.
        projection: which part of the experts; None if only the shapes can tell.
        expert: the index of the expert, for the form "single".
        a: bfloat16, as stored: [rank, in], 3-D, or folded 2-D.
        b: bfloat16, as stored.
        rank: the rank of one expert.
        scale: the factor of the delta, a float32 value.
        tensors: the names in the file.
    """

    path: str
    module: str
    form: Form
    projection: Projection | None
    expert: int | None
    a: Tensor
    b: Tensor
    rank: int
    scale: float
    tensors: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AdapterSpec:
    """One adapter as its files describe it.

    Args:
        source: the folder.
        entries: linear targets, routers and embeddings.
        experts: factors of routed experts.
        copies: full copies of vocabulary modules, as stored; to be compared with the base.
        config: what the config says about the maths.
        strict: whether downgradable refusals are raised, here and when binding.
        decisions: choices that were made, as sentences.
        skipped: what `strict=False` let pass, each with its code.
        dropped: tensors that inference does not need, with the reason.
    """

    source: str
    entries: tuple[LoraEntry, ...]
    experts: tuple[ExpertEntry, ...]
    copies: Mapping[str, Tensor]
    config: PeftConfig
    strict: bool = True
    decisions: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def __fspath__(self) -> str:
        """The folder: what takes an adapter's folder takes the parsed adapter too."""
        return self.source

    @property
    def num_tensors(self) -> int:
        """Tensors of the file that are factors."""
        groups = [entry.tensors for entry in self.entries] + [e.tensors for e in self.experts]
        return sum(map(len, groups))
