"""Expert factors of a file, bound to a model: one A and one B for all experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lorafold.adapter import ExpertLora, ExpertShape, ExpertWeights, Kind
from lorafold.peft.config import PeftConfig
from lorafold.peft.fused import common_scale
from lorafold.peft.layouts import ExpertLayout, choose_swap, is_grouped, stacked, unfold
from lorafold.peft.spec import ExpertEntry, Projection
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["bind_experts"]

Whole = Literal["gate_up", "down"]


@dataclass(frozen=True, eq=False)
class _Part:
    """The factors of one projection for all experts: A [E, rank, in], B [E, out, rank]."""

    a: Tensor
    b: Tensor
    scale: float
    gate_rank: int | None = None


def _features(projection: Projection, shape: ExpertShape) -> tuple[int, int]:
    if projection in ("gate", "up"):
        return shape.hidden, shape.inner
    kind: Kind = "experts.down" if projection == "down" else "experts.gate_up"
    return shape.features(kind)


def _readings(entry: ExpertEntry, shape: ExpertShape) -> set[tuple[Whole, bool]]:
    """The (parameter, swapped) readings of a folded entry that fit the shapes."""
    wholes: tuple[Whole, ...] = ("gate_up", "down")
    stored = (entry.a.shape[1], entry.b.shape[0])
    found: set[tuple[Whole, bool]] = set()
    for whole in wholes:
        features = _features(whole, shape)
        if entry.projection in (None, whole):
            found |= {(whole, False)} if stored == features else set()
            found |= {(whole, True)} if stored == features[::-1] else set()
    return found


class _Experts:
    """Binds the expert entries of one adapter."""

    def __init__(
        self, config: PeftConfig, layout: ExpertLayout | None, decisions: Decisions
    ) -> None:
        self._config = config
        self._layout = layout
        self._decisions = decisions
        self._swapped = False
        self._grouped = False

    def choose_layout(self, folded: Sequence[tuple[ExpertEntry, ExpertShape]]) -> None:
        """Decide how all folded factors of the file are read."""
        if not folded:
            return
        for entry, shape in folded:
            rows, columns = entry.a.shape[0], entry.b.shape[1]
            if not rows == columns == shape.num_experts * entry.rank:
                message = (
                    f"`{entry.path}` has {rows} rows of A and {columns} columns of B; "
                    f"{shape.num_experts} experts of rank {entry.rank} need "
                    f"{shape.num_experts * entry.rank}"
                )
                raise self._decisions.refuse(Refusal.RANK_MISMATCH, message)
            if not _readings(entry, shape):
                raise self._misfit(entry, shape)
        self._swapped = choose_swap(
            [{swapped for _, swapped in _readings(entry, shape)} for entry, shape in folded],
            self._config,
            self._layout,
            transposed=folded[0][1].transposed,
            decisions=self._decisions,
        )
        largest = max(entry.rank for entry, _ in folded)
        self._grouped = is_grouped(self._config, self._layout, largest, self._decisions)

    def _misfit(self, entry: ExpertEntry, shape: ExpertShape) -> Exception:
        message = (
            f"`{entry.path}` has factors of {tuple(entry.a.shape)} and {tuple(entry.b.shape)} at "
            f"rank {entry.rank}, which fit no projection of {shape}"
        )
        return self._decisions.refuse(Refusal.SHAPE_MISMATCH, message)

    def folded(self, entry: ExpertEntry, shape: ExpertShape) -> tuple[Projection, _Part]:
        """The part of a folded entry."""
        wholes = {whole for whole, swapped in _readings(entry, shape) if swapped == self._swapped}
        if len(wholes) != 1:
            message = (
                f"`{entry.path}` could be gate_up_proj or down_proj; hint: set target_parameters"
            )
            raise self._decisions.refuse(Refusal.EXPERT_LAYOUT, message)
        a, b = unfold(entry.a, entry.b, entry.rank, swapped=self._swapped, grouped=self._grouped)
        return wholes.pop(), _Part(a, b, entry.scale)

    def stacked(self, entry: ExpertEntry, shape: ExpertShape) -> tuple[Projection, _Part]:
        """The part of a 3-D entry."""
        projections: list[Projection] = (
            ["gate_up", "down"] if entry.projection is None else [entry.projection]
        )
        found = [
            (projection, _Part(a, b, entry.scale))
            for projection in projections
            for a, b in stacked(
                entry.a, entry.b, entry.rank, shape.num_experts, _features(projection, shape)
            )
        ]
        if not found:
            raise self._misfit(entry, shape)
        if len(found) > 1:
            message = f"the 3-D factors of `{entry.path}` can be read in {len(found)} ways"
            raise self._decisions.refuse(Refusal.EXPERT_LAYOUT, message)
        return found[0]

    def singles(
        self, projection: Projection, entries: Sequence[ExpertEntry], shape: ExpertShape
    ) -> _Part:
        """The part of one projection that is stored expert by expert."""
        in_features, out_features = _features(projection, shape)
        by_expert = {entry.expert: entry for entry in entries}
        if len(by_expert) != len(entries):
            message = f"`{entries[0].module}` has several factors for one expert's {projection}"
            raise self._decisions.refuse(Refusal.DUPLICATE_TENSOR, message)
        for entry in entries:
            fits = entry.a.shape[1] == in_features and entry.b.shape[0] == out_features
            is_known = entry.expert is not None and entry.expert < shape.num_experts
            if not fits or not is_known or entry.b.shape[1] != entry.rank:
                raise self._misfit(entry, shape)
        absent = set(range(shape.num_experts)) - by_expert.keys()
        if absent:
            message = f"`{entries[0].module}` has no {projection} for the experts {listed(absent)}"
            self._decisions.tolerate(Refusal.INCOMPLETE_EXPERTS, message)
        scale, factors = common_scale(
            [entry.scale for entry in entries],
            [entry.b for entry in entries],
            entries[0].module,
            self._decisions,
        )
        rank = max(entry.rank for entry in entries)
        a = torch.zeros(shape.num_experts, rank, in_features, dtype=torch.bfloat16, device="cpu")
        b = torch.zeros(shape.num_experts, out_features, rank, dtype=torch.bfloat16, device="cpu")
        for entry, factor in zip(entries, factors, strict=True):
            a[entry.expert, : entry.rank] = entry.a
            b[entry.expert, :, : entry.rank] = factor
        return _Part(a, b, scale)

    def gate_up(self, parts: Mapping[Projection, _Part], shape: ExpertShape, module: str) -> _Part:
        """Gate and up in one: A's stacked, B's in the rows and columns of their own."""
        halves: tuple[Projection, Projection] = ("gate", "up")
        absent = [half for half in halves if half not in parts]
        if absent:
            message = f"`{module}` has no factors for {listed(absent)}"
            self._decisions.tolerate(Refusal.INCOMPLETE_EXPERTS, message)
        present = [half for half in halves if half in parts]
        scale, factors = common_scale(
            [parts[half].scale for half in present],
            [parts[half].b for half in present],
            module,
            self._decisions,
        )
        a = torch.cat([parts[half].a for half in present], dim=1)
        b = torch.zeros(
            shape.num_experts, 2 * shape.inner, a.shape[1], dtype=torch.bfloat16, device="cpu"
        )
        column = 0
        for half, factor in zip(present, factors, strict=True):
            second = half == "up"
            if shape.interleaved:
                rows = slice(int(second), None, 2)
            else:
                rows = slice(shape.inner, None) if second else slice(0, shape.inner)
            b[:, rows, column : column + factor.shape[2]] = factor
            column += factor.shape[2]
        gate_rank = int(parts["gate"].a.shape[1]) if "gate" in parts else 0
        return _Part(a, b, scale, gate_rank)

    def module(self, module: str, entries: Sequence[ExpertEntry], shape: ExpertShape) -> ExpertLora:
        """All entries of the experts of one layer."""
        parts: dict[Projection, _Part] = {}
        singles: dict[Projection, list[ExpertEntry]] = {}
        found: list[tuple[Projection, _Part]] = []
        for entry in entries:
            if entry.form == "folded":
                found.append(self.folded(entry, shape))
            elif entry.form == "stacked":
                found.append(self.stacked(entry, shape))
            elif entry.projection is not None:
                singles.setdefault(entry.projection, []).append(entry)
        found += [(p, self.singles(p, group, shape)) for p, group in singles.items()]
        for projection, part in found:
            if projection in parts:
                message = f"`{module}` has {projection} in more than one form"
                raise self._decisions.refuse(Refusal.DUPLICATE_TENSOR, message)
            parts[projection] = part
        if {"gate", "up"} & parts.keys():
            if "gate_up" in parts:
                message = f"`{module}` has gate_up and also gate or up"
                raise self._decisions.refuse(Refusal.DUPLICATE_TENSOR, message)
            parts["gate_up"] = self.gate_up(parts, shape, module)
        return ExpertLora(*(_weights(parts.get(whole)) for whole in ("gate_up", "down")))


def _weights(part: _Part | None) -> ExpertWeights | None:
    if part is None:
        return None
    a, b = part.a.contiguous(), part.b.contiguous()
    return ExpertWeights(a, b, part.scale, part.gate_rank)


def bind_experts(
    entries: Mapping[str, Sequence[ExpertEntry]],
    shapes: Mapping[str, ExpertShape],
    config: PeftConfig,
    decisions: Decisions,
    *,
    layout: ExpertLayout | None = None,
) -> dict[str, ExpertLora]:
    """The factors of every layer's experts, in the order of the base's outputs.

    Args:
        entries: per target, the entries that belong to it.
        shapes: the shapes of the targets.
        config: carries the marks of the tools that wrote the file.
        decisions: takes the notes; decides what `strict=False` lets pass.
        layout: the layout of folded factors, None to decide by shapes and version.

    Returns:
        Per target its factors; gate and up that come apart are joined, with the sum of their ranks.

    Raises:
        AdapterFormatError: if the layout is ambiguous, or factors are missing or contradict.
        AdapterMismatchError: if factors do not fit the experts.
    """
    experts = _Experts(config, layout, decisions)
    experts.choose_layout(
        [
            (entry, shapes[target])
            for target, group in entries.items()
            for entry in group
            if entry.form == "folded"
        ]
    )
    return {
        target: experts.module(target, group, shapes[target]) for target, group in entries.items()
    }
