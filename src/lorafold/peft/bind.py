"""From what the files say to what a model applies: every module of an adapter gets its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from lorafold.adapter import (
    Adapter,
    BoundTarget,
    ExpertLora,
    ExpertShape,
    ExpertWeights,
    Kind,
    LoadReport,
    LoraWeights,
    TargetShape,
)
from lorafold.peft.config import VOCABULARY_LEAVES
from lorafold.peft.experts import bind_experts
from lorafold.peft.fused import cut, join
from lorafold.peft.layouts import ExpertLayout
from lorafold.peft.paths import Match, mounts, resolve, resolve_flat
from lorafold.peft.spec import AdapterSpec, ExpertEntry, LoraEntry
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["bind"]


def bind(
    spec: AdapterSpec,
    targets: Mapping[str, TargetShape | ExpertShape],
    *,
    name: str | None = None,
    base_tensor: Callable[[str], Tensor | None] | None = None,
    expert_layout: ExpertLayout | None = None,
) -> Adapter:
    """Fit an adapter to the targets of a model.

    Every module of the adapter must be exactly one target, or a slice of one, or several together;
    its factors must have the target's sizes.

    Args:
        spec: what `parse` returned.
        targets: per path in the model, the shape; an `ExpertShape` for a module of routed experts,
            such as "model.layers.0.mlp.experts".
        name: what requests call the adapter; None takes the name of the folder.
        base_tensor: module path in the file (such as "lm_head") -> the base's weight, or None if
            the base has no such module. With it, copies of the vocabulary that equal the base are
            dropped; without it they are refused.
        expert_layout: how folded expert factors are stored; None decides by shapes and version.

    Returns:
        The adapter, with a report of what became of every tensor.

    Raises:
        AdapterMismatchError: if modules have no target, or factors do not fit theirs.
        AdapterFormatError: if a module could be several targets, or the file has what no layer
            applies.

    Example:
        >>> from lorafold.peft.config import read_config
        >>> import torch
        >>> config = read_config(
        ...     b'{"peft_type": "LORA", "r": 2, "lora_alpha": 4}', Decisions("sql")
        ... )
        >>> a, b = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)
        >>> entry = LoraEntry(
        ...     "lm_head", "linear", a, b, 2.0, ("x.lora_A.weight", "x.lora_B.weight")
        ... )
        >>> spec = AdapterSpec("sql", (entry,), (), {}, config)
        >>> bind(spec, {"lm_head": TargetShape(8, 4)}).weights["lm_head"].scale
        2.0
    """
    decisions = Decisions(name or spec.source, strict=spec.strict)
    linears = {path: s for path, s in targets.items() if isinstance(s, TargetShape)}
    _check_embeddings(spec, linears, decisions)
    dropped = _drop_copies(spec, base_tensor, decisions)
    shapes = {path: s for path, s in targets.items() if isinstance(s, ExpertShape)}
    entries, experts = _place_singles(spec, linears)
    matches = _resolve(entries, experts, targets, decisions)
    weights, lines = _bind_linears(entries, matches, linears, spec.config.is_qalora, decisions)
    grouped = _group_experts(experts, matches, shapes, decisions)
    loras = bind_experts(grouped, shapes, spec.config, decisions, layout=expert_layout)
    if not weights and not loras:
        message = "none of its modules is a target of the model"
        raise decisions.refuse(Refusal.UNMATCHED_PATH, message)
    return Adapter(
        name=(Path(spec.source).name or spec.source) if name is None else name,
        weights=weights,
        experts=loras,
        source=spec.source,
        base_model=spec.config.base_model,
        report=LoadReport(
            bound=(*lines, *_expert_lines(loras, grouped)),
            dropped=(*spec.dropped, *dropped),
            decisions=(*spec.decisions, *decisions.notes),
            skipped=(*spec.skipped, *decisions.skipped),
        ),
    )


def _check_embeddings(
    spec: AdapterSpec, linears: Mapping[str, TargetShape], decisions: Decisions
) -> None:
    """Refuse factors of an embedding where no embedding is a target."""
    paths = [entry.path for entry in spec.entries if entry.kind == "embedding"]
    if paths and not any(shape.is_embedding for shape in linears.values()):
        words = ["all-linear", *sorted({path.rpartition(".")[2] for path in paths})]
        message = (
            f"it changes the embedding {listed(paths)}, and no embedding is a target; hint: "
            f"attach with the targets {listed(words)}"
        )
        raise decisions.refuse(Refusal.EMBEDDING, message)


def _drop_copies(
    spec: AdapterSpec,
    base_tensor: Callable[[str], Tensor | None] | None,
    decisions: Decisions,
) -> list[str]:
    """Refuse copies of vocabulary modules that are not, or may not be, equal to the base."""
    dropped: list[str] = []
    for path, copy in spec.copies.items():
        found = map(base_tensor, mounts(path)) if base_tensor is not None else ()
        base = next((tensor for tensor in found if tensor is not None), None)
        if base is None:
            message = (
                f"the file has a full copy of `{path}`, shape {tuple(copy.shape)}; hint: with the "
                "base's weights at hand it is dropped if it equals theirs; or save the adapter "
                "with save_embedding_layers=False"
            )
            raise decisions.refuse(Refusal.MODULES_TO_SAVE, message)
        if base.shape != copy.shape:
            message = (
                f"`{path}` is {tuple(copy.shape)} in the file, {tuple(base.shape)} in the base"
            )
            raise decisions.refuse(Refusal.RESIZED_VOCABULARY, message)
        # The base may be loaded in fewer bits than the copy was saved in.
        if not bool((copy.to(base.dtype) == base.detach().cpu()).all()):
            message = f"the file's copy of `{path}` differs from the base's: it was trained"
            raise decisions.refuse(Refusal.MODULES_TO_SAVE, message)
        dropped.append(f"{path}: a copy that equals the base")
    return dropped


def _place_singles(
    spec: AdapterSpec, linears: Mapping[str, TargetShape]
) -> tuple[list[LoraEntry], list[ExpertEntry]]:
    """Experts that are stored one by one are plain linear layers where the model has them so."""

    def is_expert(path: str) -> bool:
        before, _, after = path.rpartition(".experts.")
        return bool(before) and any(segment.isdecimal() for segment in after.split("."))

    if not any(map(is_expert, linears)):
        return list(spec.entries), list(spec.experts)
    singles = [entry for entry in spec.experts if entry.form == "single"]
    moved = [LoraEntry(e.path, "linear", e.a, e.b, e.scale, e.tensors) for e in singles]
    return [*spec.entries, *moved], [entry for entry in spec.experts if entry.form != "single"]


def _resolve(
    entries: list[LoraEntry],
    experts: list[ExpertEntry],
    targets: Mapping[str, TargetShape | ExpertShape],
    decisions: Decisions,
) -> dict[str, Match]:
    dotted = {entry.path for entry in entries if not entry.is_flat}
    flat = {entry.path for entry in entries if entry.is_flat}
    if flat:
        return resolve_flat(flat, targets, decisions)
    return resolve(dotted | {entry.module for entry in experts}, targets, decisions)


def _check_fit(
    entry: LoraEntry, match: Match, linears: Mapping[str, TargetShape], is_qalora: bool
) -> tuple[Refusal, str] | None:
    """Why the factors of an entry do not fit its targets, None if they do."""
    target = match.targets[0]
    if any(each not in linears for each in match.targets):
        return Refusal.UNMATCHED_PATH, f"`{entry.path}` is linear, `{target}` are experts"
    given_in, given_out = int(entry.a.shape[1]), int(entry.b.shape[0])
    shape, is_embedding = linears[target], entry.kind == "embedding"
    if shape.is_embedding != is_embedding:
        kinds = ("linear", "of an embedding")
        message = (
            f"the factors of `{entry.path}` are {kinds[is_embedding]}, its target `{target}` is "
            f"{'an embedding' if shape.is_embedding else 'linear'}"
        )
        return Refusal.SHAPE_MISMATCH, message
    if given_in != shape.in_features and is_qalora:
        message = f"A of `{entry.path}` has {given_in} inputs, `{target}` has {shape.in_features}"
        return Refusal.QALORA, message
    # Slices are checked where they are cut and joined.
    is_whole = len(match.targets) == 1 and not match.part
    if given_in == shape.in_features and (given_out == shape.out_features or not is_whole):
        return None
    message = (
        f"`{entry.path}` has {given_in} inputs and {given_out} outputs; its target `{target}` has "
        f"{shape.in_features} and {shape.out_features}"
    )
    is_vocabulary = target.rpartition(".")[2] in VOCABULARY_LEAVES
    has_hidden = given_out == shape.out_features if is_embedding else given_in == shape.in_features
    if is_vocabulary and has_hidden:
        return Refusal.RESIZED_VOCABULARY, message
    return Refusal.SHAPE_MISMATCH, message


def _bind_linears(
    entries: list[LoraEntry],
    matches: Mapping[str, Match],
    linears: Mapping[str, TargetShape],
    is_qalora: bool,
    decisions: Decisions,
) -> tuple[dict[str, LoraWeights], list[BoundTarget]]:
    """The weights of every linear target, and a line of the report for each."""
    weights: dict[str, LoraWeights] = {}
    sources: dict[str, list[LoraEntry]] = {}
    slices: dict[str, dict[str, LoraEntry]] = {}
    for entry in entries:
        match = matches.get(entry.path)
        if match is None:
            continue
        misfit = _check_fit(entry, match, linears, is_qalora)
        if misfit is not None:
            raise decisions.refuse(*misfit)
        if match.part:
            slices.setdefault(match.targets[0], {})[match.part] = entry
        elif len(match.targets) > 1:
            weights |= cut(entry, match.targets, linears, decisions)
            decisions.note(f"`{entry.path}` is cut into {listed(match.targets)}")
        else:
            weights[match.targets[0]] = LoraWeights(entry.a, entry.b, entry.scale)
        for target in match.targets:
            sources.setdefault(target, []).append(entry)
    for whole, parts in slices.items():
        weights[whole] = join(whole, parts, linears[whole], decisions)
        decisions.note(f"{listed(parts)} are joined into `{whole}`")
    lines: list[BoundTarget] = []
    for target, bound in weights.items():
        kind: Kind = sources[target][0].kind
        names = tuple(name for entry in sources[target] for name in entry.tensors)
        lines.append(BoundTarget(target, kind, bound.rank, bound.scale, bound.delta_norm, names))
    return weights, lines


def _group_experts(
    experts: list[ExpertEntry],
    matches: Mapping[str, Match],
    shapes: Mapping[str, ExpertShape],
    decisions: Decisions,
) -> dict[str, list[ExpertEntry]]:
    """The expert entries by their target."""
    grouped: dict[str, list[ExpertEntry]] = {}
    for entry in experts:
        match = matches.get(entry.module)
        if match is None:
            continue
        if match.targets[0] not in shapes:
            message = f"`{entry.module}` are experts, `{match.targets[0]}` is linear"
            raise decisions.refuse(Refusal.UNMATCHED_PATH, message)
        grouped.setdefault(match.targets[0], []).append(entry)
    return grouped


def _expert_lines(
    loras: Mapping[str, ExpertLora], grouped: Mapping[str, list[ExpertEntry]]
) -> list[BoundTarget]:
    """A line of the report per experts module and product."""
    lines: list[BoundTarget] = []
    for target, lora in loras.items():
        kinds: tuple[tuple[Kind, ExpertWeights | None], ...] = (
            ("experts.gate_up", lora.gate_up),
            ("experts.down", lora.down),
        )
        for kind, part in kinds:
            if part is None:
                continue
            names = tuple(
                name
                for entry in grouped[target]
                if entry.projection is None
                or (entry.projection == "down") == (kind == "experts.down")
                for name in entry.tensors
            )
            lines.append(BoundTarget(target, kind, part.rank, part.scale, part.delta_norm, names))
    return lines
