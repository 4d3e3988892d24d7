"""One LoRA as checked tensors, bound to the targets of a model; and the shapes of targets.

Nothing here reads files or knows slots: `lorafold.peft` builds an `Adapter`, `lorafold.pool` places
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lorafold.refusal import Refusal, refuse

__all__ = [
    "Adapter",
    "BoundTarget",
    "ExpertLora",
    "ExpertShape",
    "ExpertWeights",
    "Kind",
    "LoadReport",
    "LoraWeights",
    "TargetShape",
]

Kind = Literal["linear", "embedding", "router", "experts.gate_up", "experts.down"]
"""What an adapted module is."""


@dataclass(frozen=True)
class TargetShape:
    """The sizes of a linear layer, a router or an embedding.

    Args:
        in_features: columns of A; the number of tokens of an embedding.
        out_features: rows of B.
        is_embedding: whether the target looks tokens up instead of multiplying by its input. Takes
            no part in comparisons: memory does not depend on it.

    Example:
        >>> TargetShape(in_features=64, out_features=32)
        TargetShape(in_features=64, out_features=32)
    """

    in_features: int
    out_features: int
    is_embedding: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True)
class ExpertShape:
    """The sizes and storage order of the routed experts of one layer.

    Args:
        num_experts: experts of the layer.
        hidden: features of the residual stream: the input of gate_up, the output of down.
        inner: features between: half the output of gate_up, the input of down.
        transposed: True where the base stores [experts, in, out] (GPT-OSS).
        interleaved: True where the outputs of gate_up alternate gate, up, gate, up (GPT-OSS),
            False where all gates come first.

    Example:
        >>> shape = ExpertShape(num_experts=4, hidden=64, inner=24)
        >>> shape.features("experts.gate_up"), shape.features("experts.down")
        ((64, 48), (24, 64))
    """

    num_experts: int
    hidden: int
    inner: int
    transposed: bool = False
    interleaved: bool = False

    def features(self, kind: Kind) -> tuple[int, int]:
        """(in features, out features) of "experts.gate_up" or "experts.down"."""
        if kind == "experts.gate_up":
            return self.hidden, 2 * self.inner
        return self.inner, self.hidden


def _check_factors(a: Tensor, b: Tensor, scale: float, axes: int) -> None:
    """Refuse factors that are not contiguous bfloat16 on the CPU, or that do not fit together.

    Of a linear B only the rows must be contiguous.
    """
    for name, factor in (("a", a), ("b", b)):
        is_plain = factor.dtype == torch.bfloat16 and factor.device.type == "cpu"
        is_dense = factor.is_contiguous() or (name == "b" and axes == 2 and factor.stride(-1) == 1)
        if factor.dim() != axes or not (is_plain and is_dense):
            message = (
                f"`{name}` must be a contiguous {axes}-D bfloat16 tensor on the CPU; given: "
                f"{tuple(factor.shape)} {factor.dtype} on {factor.device}"
            )
            raise refuse(Refusal.SHAPE, message, adapter="")
        if factor.numel() == 0:
            message = f"`{name}` has an axis of size 0: {tuple(factor.shape)}"
            raise refuse(Refusal.EMPTY_FACTOR, message, adapter="")
    if a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
        message = f"a and b disagree on the rank: {tuple(a.shape)} and {tuple(b.shape)}"
        raise refuse(Refusal.SHAPE, message, adapter="")
    if not math.isfinite(scale):
        raise refuse(Refusal.BAD_CONFIG, f"scale must be finite; given: {scale}", adapter="")


def _delta_norm(a: Tensor, b: Tensor, scale: float) -> float:
    """Frobenius norm of scale * B A, in float64, without forming the product."""
    a, b = a.double(), b.double()
    squares = (b.mT @ b * (a @ a.mT)).sum()
    return abs(scale) * math.sqrt(max(float(squares), 0.0))


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """A, B and scale of one linear target, router or embedding.

    Args:
        a: [rank, in_features] bfloat16 on the CPU, contiguous.
        b: [out_features, rank] bfloat16 on the CPU; rows may be any distance apart, columns are
            contiguous.
        scale: the factor of the delta, a float32 value.

    Raises:
        AdapterFormatError: if the factors do not fit together.

    Example:
        >>> a, b = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
        >>> LoraWeights(a, b, scale=2.0).rank
        4
    """

    a: Tensor
    b: Tensor
    scale: float

    def __post_init__(self) -> None:
        _check_factors(self.a, self.b, self.scale, axes=2)

    @property
    def rank(self) -> int:
        """Rows of A."""
        return int(self.a.shape[0])

    @property
    def in_features(self) -> int:
        """Columns of A."""
        return int(self.a.shape[1])

    @property
    def out_features(self) -> int:
        """Rows of B."""
        return int(self.b.shape[0])

    @property
    def delta_norm(self) -> float:
        """Frobenius norm of scale * B A."""
        return _delta_norm(self.a, self.b, self.scale)


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """A, B and scale of one projection of every expert of a layer.

    Args:
        a: [num_experts, rank, in_features] bfloat16 on the CPU, contiguous.
        b: [num_experts, out_features, rank] bfloat16 on the CPU, contiguous; the rows in the order
            of the base's outputs (`ExpertShape.interleaved`).
        scale: the factor of the delta, a float32 value.
        gate_rank: for gate_up, where gate and up have an A of their own: how many rows of A, and
            columns of B, are gate's; the others are up's. None where they share A.

    Raises:
        AdapterFormatError: if the factors do not fit together.

    Example:
        >>> a = torch.ones(2, 4, 16, dtype=torch.bfloat16)
        >>> b = torch.ones(2, 8, 4, dtype=torch.bfloat16)
        >>> ExpertWeights(a, b, scale=2.0).num_experts
        2
    """

    a: Tensor
    b: Tensor
    scale: float
    gate_rank: int | None = None

    def __post_init__(self) -> None:
        _check_factors(self.a, self.b, self.scale, axes=3)
        if self.gate_rank is not None and not 0 <= self.gate_rank <= self.rank:
            message = f"gate_rank must be 0 .. {self.rank} (the rank); given: {self.gate_rank}"
            raise refuse(Refusal.SHAPE, message, adapter="")

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return int(self.a.shape[0])

    @property
    def rank(self) -> int:
        """Rows of each expert's A; zero rows pad the experts of a lower rank."""
        return int(self.a.shape[1])

    @property
    def in_features(self) -> int:
        """Columns of A."""
        return int(self.a.shape[2])

    @property
    def out_features(self) -> int:
        """Rows of B."""
        return int(self.b.shape[1])

    @property
    def delta_norm(self) -> float:
        """Frobenius norm of scale * B A, over all experts."""
        return _delta_norm(self.a, self.b, self.scale)


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """What an adapter changes in the experts of one layer; None where it changes nothing.

    Example:
        >>> ExpertLora().down is None
        True
    """

    gate_up: ExpertWeights | None = None
    down: ExpertWeights | None = None


@dataclass(frozen=True)
class BoundTarget:
    """One line of a `LoadReport`: a target, and what was bound to it.

    Args:
        target: the path in the model.
        kind: what the target is.
        rank: the rank after binding (a fused target has the sum of its slices' ranks).
        scale: the factor of the delta.
        delta_norm: Frobenius norm of scale * B A; over all experts for expert kinds.
        tensors: the names of the tensors in the file.

    Example:
        >>> BoundTarget(
        ...     "lm_head", "linear", 8, 2.0, 0.5, ("x.lora_A.weight", "x.lora_B.weight")
        ... ).rank
        8
    """

    target: str
    kind: Kind
    rank: int
    scale: float
    delta_norm: float
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of an adapter's file.

    Args:
        bound: one line per target and kind.
        dropped: names of tensors that are not needed for inference, with the reason.
        decisions: choices that were made, as sentences.
        skipped: what `strict=False` let pass, each with its code.

    Example:
        >>> LoadReport().num_tensors
        0
    """

    bound: tuple[BoundTarget, ...] = ()
    dropped: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def num_tensors(self) -> int:
        """Tensors of the file that took part in the result."""
        return len({name for line in self.bound for name in line.tensors})


@dataclass(frozen=True, eq=False)
class Adapter:
    """One LoRA, bound to the targets of a model.

    Args:
        name: what requests call it.
        weights: per linear target, router and embedding (path in the model, such as
            "model.layers.0.self_attn.q_proj").
        experts: per experts module (such as "model.layers.0.mlp.experts").
        source: the folder it was read from, "" if it was not read.
        base_model: what the config says it was trained on; never checked, as it is often a path.
        report: what became of every tensor of the file.

    Raises:
        AdapterFormatError: if there is no name, or nothing to apply.

    Example:
        >>> a, b = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
        >>> adapter = Adapter("sql", {"lm_head": LoraWeights(a, b, scale=2.0)})
        >>> adapter.rank
        4
    """

    name: str
    weights: Mapping[str, LoraWeights]
    experts: Mapping[str, ExpertLora] = field(default_factory=dict)
    source: str = ""
    base_model: str | None = None
    report: LoadReport = field(default_factory=LoadReport, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise refuse(Refusal.BAD_CONFIG, "an adapter needs a name; given: ''", adapter="")
        if not self.weights and not self.experts:
            message = "an adapter needs at least one target; given: none"
            raise refuse(Refusal.EMPTY_ADAPTER, message, adapter=self.name)
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))
        object.__setattr__(self, "experts", MappingProxyType(dict(self.experts)))

    @property
    def rank(self) -> int:
        """The largest rank of all targets."""
        ranks = [weights.rank for weights in self.weights.values()]
        for lora in self.experts.values():
            ranks += [part.rank for part in (lora.gate_up, lora.down) if part is not None]
        return max(ranks)

    @property
    def expert_bytes(self) -> int:
        """Bytes of host memory that the factors of experts take."""
        parts = [part for lora in self.experts.values() for part in (lora.gate_up, lora.down)]
        return sum(part.a.nbytes + part.b.nbytes for part in parts if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that all factors take."""
        return self.expert_bytes + sum(w.a.nbytes + w.b.nbytes for w in self.weights.values())
