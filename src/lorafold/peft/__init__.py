"""Adapters from PEFT folders: files -> `AdapterSpec` -> `Adapter`.

`parse` reads and checks the files and needs no model; `bind` fits the result to the targets of one.
What is accepted and what is refused is listed in docs/formats.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lorafold.adapter import Adapter, ExpertShape, TargetShape
from lorafold.peft.bind import bind
from lorafold.peft.config import PeftConfig, read_config
from lorafold.peft.factors import build_entries
from lorafold.peft.files import Folder, open_folder
from lorafold.peft.layouts import ExpertLayout
from lorafold.peft.names import TensorName, read_names
from lorafold.peft.paths import HEAD, core, ends, is_head
from lorafold.peft.scale import ScaleRule
from lorafold.peft.spec import AdapterSpec, ExpertEntry, LoraEntry, Projection
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["AdapterSpec", "bind", "load_adapter", "parse", "ranks_of", "targets_of"]

# What a config may call the part of the experts that a tensor adapts.
_EXPERT_WORDS: dict[Projection | None, tuple[str, ...]] = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3"),
    "gate_up": ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3"),
    "down": ("down_proj", "w2"),
    None: ("gate_up_proj", "gate_proj", "up_proj", "w1", "w3", "down_proj", "w2"),
}


def load_adapter(
    folder: str | os.PathLike[str],
    targets: Mapping[str, TargetShape | ExpertShape],
    *,
    name: str | None = None,
    strict: bool = True,
    allow_inert: bool = False,
    base_tensor: Callable[[str], Tensor | None] | None = None,
    expert_layout: ExpertLayout | None = None,
) -> Adapter:
    """`parse` and `bind` in one call.

    Args:
        folder: as in `parse`; or what `parse` returned, which is not read again and keeps the
            `strict` and `allow_inert` it was parsed with.
        targets: as in `bind`.
        name: as in `bind`.
        strict: as in `parse`.
        allow_inert: as in `parse`.
        base_tensor: as in `bind`.
        expert_layout: as in `bind`.

    Raises:
        AdapterFormatError: if the files are broken, or use what is not supported.
        AdapterMismatchError: if the adapter does not fit the targets.

    Example:
        >>> load_adapter("no/such/folder", {})
        Traceback (most recent call last):
        lorafold.errors.AdapterFormatError: `no/such/folder`: there is no such folder ...
    """
    spec = folder
    if not isinstance(spec, AdapterSpec):
        spec = parse(folder, strict=strict, allow_inert=allow_inert)
    return bind(spec, targets, name=name, base_tensor=base_tensor, expert_layout=expert_layout)


def parse(
    folder: str | os.PathLike[str], *, strict: bool = True, allow_inert: bool = False
) -> AdapterSpec:
    """Read an adapter's folder and check everything that can be checked without a model.

    Every tensor of the file is part of the result, or is known to be needed in training only, or
    the adapter is refused. Factors are rounded to bfloat16, to nearest even.

    Args:
        folder: holds adapter_config.json and adapter_model.safetensors (or its shards and their
            index). Files in kohya's format need no config.
        strict: False turns the refusals of `lorafold.refusal.DOWNGRADABLE` into lines of the
            report.
        allow_inert: accept an adapter that changes nothing, such as an untrained one.

    Raises:
        AdapterFormatError: if the files are broken, or use what is not supported; `.code` says
            which of the reasons of `lorafold.refusal.Refusal` it is.

    Example:
        >>> parse("no/such/folder")
        Traceback (most recent call last):
        lorafold.errors.AdapterFormatError: `no/such/folder`: there is no such folder ...
    """
    source = os.fspath(folder)
    decisions = Decisions(source, strict=strict)
    with open_folder(Path(folder), decisions) as files:
        config = _config(files, decisions)
        names = read_names(files.infos, decisions)
        entries, experts = build_entries(names, tensors := files.read(), config, decisions)
    _check_targets(config, entries, experts, names, decisions)
    if not allow_inert:
        _check_inert(entries, experts, decisions)
    return AdapterSpec(
        source=source,
        entries=tuple(entries),
        experts=tuple(experts),
        copies={name.path: tensors[name.raw] for name in names if name.role == "copy"},
        config=config,
        strict=strict,
        decisions=tuple(decisions.notes),
        skipped=tuple(decisions.skipped),
        dropped=tuple(f"{n.raw}: training only" for n in names if n.role == "dropped"),
    )


def _config(files: Folder, decisions: Decisions) -> PeftConfig:
    if files.config is not None:
        return read_config(files.config, decisions)
    if not any(".lora_down." in name for name in files.infos):
        message = "`adapter_config.json` is not there, and the scale is in it"
        raise decisions.refuse(Refusal.MISSING_FILE, message)
    decisions.note(
        "no adapter_config.json: scales are from the alpha tensors, 1 where there is none"
    )
    return PeftConfig(ScaleRule(None, None, False, {}, {}, decisions))


def ranks_of(specs: Iterable[AdapterSpec]) -> tuple[int, int | None]:
    """The ranks that a pool needs for some adapters: (of linear layers, of routed experts).

    Args:
        specs: what `parse` read.

    Returns:
        The largest rank, at least 1; and that of experts: 0 for routers alone, None where no
        adapter has any. They are what `lorafold.attach` takes.

    Example:
        >>> ranks_of([])
        (1, None)
    """
    specs = list(specs)
    entries = [entry for spec in specs for entry in spec.entries]
    experts = [expert.rank for spec in specs for expert in spec.experts]
    has_router = any(entry.kind == "router" for entry in entries)
    expert_rank = max([0, *experts]) if experts or has_router else None
    return max([1, *(int(entry.a.shape[0]) for entry in entries)]), expert_rank


def targets_of(specs: Iterable[AdapterSpec]) -> list[str] | None:
    """The `targets` that `lorafold.attach` needs for some adapters.

    Args:
        specs: what `parse` read.

    Returns:
        "all-linear" and the names of the embeddings and heads that the adapters change; None where
        they change none, so that the default serves.

    Example:
        >>> targets_of([]) is None
        True
    """
    entries = [entry for spec in specs for entry in spec.entries]
    words = {e.path.rpartition(".")[2] for e in entries if e.kind == "embedding"}
    words |= {HEAD for e in entries if is_head(e.path)}
    return ["all-linear", *sorted(words)] if words else None


def _check_targets(
    config: PeftConfig,
    entries: list[LoraEntry],
    experts: list[ExpertEntry],
    names: list[TensorName],
    decisions: Decisions,
) -> None:
    """Refuse a config that speaks of modules for which the file has no tensors."""
    config.scale_rule.check_used()
    known = {name.path for name in names}
    known |= {f"{entry.path}.weight" for entry in entries}
    for entry in experts:
        known.add(entry.module)
        known |= {f"{entry.module}.{word}" for word in _EXPERT_WORDS[entry.projection]}
    # Tools that rename tensors leave the config: containers of the model are not compared.
    asked = {*config.target_modules, *config.target_parameters} - {"all-linear"}
    wanted = {core(name) for name in asked} - {""}
    found = {""} | {end for path in known for end in ends(core(path), ".") if end in wanted}
    absent = [name for name in asked if core(name) not in found]
    if absent and not any(entry.is_flat for entry in entries):
        message = f"the config targets {listed(absent)}, for which the file has no tensors"
        decisions.tolerate(Refusal.UNMATCHED_TARGET, message)


def _check_inert(
    entries: list[LoraEntry], experts: list[ExpertEntry], decisions: Decisions
) -> None:
    """Refuse an adapter whose every delta is zero."""
    acting = [entry.scale and bool(entry.b.any()) and bool(entry.a.any()) for entry in entries]
    acting += [entry.scale and bool(entry.b.any()) and bool(entry.a.any()) for entry in experts]
    if not any(acting):
        message = (
            "every B, every A or every scale is zero, so the adapter changes nothing; hint: was it "
            "saved before training? allow_inert accepts it"
        )
        raise decisions.refuse(Refusal.INERT, message)
