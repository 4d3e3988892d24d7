"""Which target of a model a module of an adapter means.

Names differ by what wrapped the model when it was trained. All modules under one list of layers
move together, and there must be exactly one place in the model where all of them fit: two are
refused, so that no adapter of a language model ends up in a vision tower.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from lorafold.refusal import Decisions, Refusal, listed

__all__ = [
    "FUSED",
    "HEAD",
    "Match",
    "core",
    "ends",
    "is_head",
    "mounts",
    "resolve",
    "resolve_flat",
]

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
}
"""Linear layers whose outputs are those of several others, one after the other."""

HEAD = "lm_head"
"""What transformers calls the output head."""

_HEADS = (HEAD, "unembed_tokens")

# Segments that wrappers of a language model add or leave out.
_CONTAINERS = frozenset({"model", "language_model", "backbone"})
_MOUNTS = (
    "", "model", "language_model", "model.language_model", "language_model.model", "backbone",
)  # fmt: skip
# Segments that other tools, or older versions of transformers, use for the same module.
_ALIASES = {"block_sparse_moe": "mlp", "attn": "self_attn", "unembed_tokens": HEAD}
_FLAT_PREFIXES = ("lora_transformer_", "lora_unet_", "lora_te1_", "lora_te2_", "lora_te_", "lora_")


@dataclass(frozen=True)
class Match:
    """Where a module of an adapter belongs.

    Args:
        targets: one target; or the slices that a fused module of the adapter is cut into.
        part: the slice of the one target that this module is, "" for all of it.

    Example:
        >>> Match(("model.layers.0.self_attn.qkv_proj",), part="q_proj").part
        'q_proj'
    """

    targets: tuple[str, ...]
    part: str = ""


def core(path: str) -> str:
    """A path without the segments that wrappers of a language model add or leave out.

    Example:
        >>> core("model.language_model.layers.0.mlp.up_proj")
        'layers.0.mlp.up_proj'
    """
    return ".".join(segment for segment in path.split(".") if segment not in _CONTAINERS)


def ends(path: str, separator: str) -> Iterator[str]:
    """A path, and what is left of it after each of its separators.

    Example:
        >>> list(ends("mlp.up_proj", "."))
        ['mlp.up_proj', 'up_proj']
    """
    segments = path.split(separator)
    return (separator.join(segments[at:]) for at in range(len(segments)))


def is_head(path: str) -> bool:
    """Whether a module is the output head, also where its path has underscores for dots.

    Example:
        >>> is_head("model.lm_head"), is_head("lora_te_lm_head"), is_head("mlm_head")
        (True, True, False)
    """
    leaf = path.rpartition(".")[2]
    return f"_{leaf}".endswith(tuple(f"_{name}" for name in _HEADS))


def mounts(path: str) -> tuple[str, ...]:
    """The places where wrappers of a language model may have put a module; its own path first.

    Example:
        >>> mounts("language_model.lm_head")[:3]
        ('language_model.lm_head', 'lm_head', 'model.lm_head')
    """
    places = [_join(root, core(path)) for root in _MOUNTS]
    return tuple(dict.fromkeys((path, *places)))


def _split_root(path: str) -> tuple[str, str]:
    """(list of layers or parent module, rest of the path)."""
    segments = path.split(".")
    numbers = [i for i, segment in enumerate(segments) if segment.isdecimal()]
    at = numbers[0] if numbers else len(segments) - 1
    return ".".join(segments[:at]), ".".join(segments[at:])


def _join(root: str, rest: str) -> str:
    return f"{root}.{rest}" if root else rest


def _is_related(root: str, other: str) -> bool:
    """Whether two roots may be one place: they differ in containers only, or one ends the other."""
    if core(root) == core(other) or not root or not other:
        return True
    return f".{root}".endswith(f".{other}") or f".{other}".endswith(f".{root}")


def _find(path: str, targets: Collection[str]) -> Match | None:
    """The target of exactly this name, whole, as slices of it, or as a slice of another."""
    if path in targets:
        return Match((path,))
    parent, _, leaf = path.rpartition(".")
    slices = tuple(_join(parent, part) for part in FUSED.get(leaf, ()))
    if slices and all(target in targets for target in slices):
        return Match(slices)
    for whole, parts in FUSED.items():
        siblings = [_join(parent, part) for part in parts]
        is_split = any(sibling in targets for sibling in siblings)
        if leaf in parts and _join(parent, whole) in targets and not is_split:
            return Match((_join(parent, whole),), part=leaf)
    return None


def _find_aliased(root: str, rest: str, targets: Collection[str]) -> Match | None:
    aliased = ".".join(_ALIASES.get(segment, segment) for segment in rest.split("."))
    return _find(_join(root, rest), targets) or _find(_join(root, aliased), targets)


def resolve(
    paths: Iterable[str], targets: Collection[str], decisions: Decisions
) -> dict[str, Match]:
    """The targets of the modules of an adapter.

    Args:
        paths: modules as the adapter names them, without prefixes.
        targets: paths of the targets in the model.
        decisions: takes the notes; decides what `strict=False` lets pass.

    Returns:
        Per path its match; without the paths that `strict=False` skips.

    Raises:
        AdapterMismatchError: if a module has no target.
        AdapterFormatError: if it could have several, or two modules have the same.

    Example:
        >>> path, targets = (
        ...     "model.layers.0.mlp.up_proj",
        ...     ["model.language_model.layers.0.mlp.up_proj"],
        ... )
        >>> resolve([path], targets, Decisions("sql"))[path].targets
        ('model.language_model.layers.0.mlp.up_proj',)
    """
    roots = {_split_root(target)[0] for target in targets}
    groups: dict[str, list[str]] = {}
    for path in sorted(paths):
        root, rest = _split_root(path)
        # Without a number there is no list to keep together: each such module stands alone.
        key = root if rest[0].isdecimal() else path
        groups.setdefault(key, []).append(path)
    found: dict[str, Match] = {}
    for members in groups.values():
        found |= _resolve_group(members, roots, targets, decisions)
    missing = [path for members in groups.values() for path in members if path not in found]
    if missing:
        given = listed(targets, limit=3)
        message = f"no target of the model is {listed(missing)}; targets are {given}"
        if any(map(is_head, missing)):
            message += f"; hint: attach with the targets `all-linear`, `{HEAD}`"
        decisions.tolerate(Refusal.UNMATCHED_PATH, message)
    _check_distinct(found, decisions)
    return found


def _resolve_group(
    members: list[str], roots: set[str], targets: Collection[str], decisions: Decisions
) -> dict[str, Match]:
    """The targets of the modules of one list of layers: all in one place of the model.

    If no place has all of them, those that are found in the only place that has any.
    """
    root, first = _split_root(members[0])
    rests = {path: _split_root(path)[1] for path in members}
    is_list = first[0].isdecimal()
    related = sorted(other for other in roots | {root} if _is_related(root, other))
    candidates = [root] if root in roots and is_list else related
    fits: dict[str, dict[str, Match]] = {}
    for other in candidates:
        matches = {path: _find_aliased(other, rest, targets) for path, rest in rests.items()}
        fits[other] = {path: match for path, match in matches.items() if match is not None}
    complete = [other for other, fit in fits.items() if len(fit) == len(members)]
    if root in complete:
        complete = [root]
    if len(complete) > 1:
        places = listed(_join(other, rests[members[0]]) for other in complete)
        message = f"`{members[0]}` could be {places}; hint: name one of them in the file"
        raise decisions.refuse(Refusal.AMBIGUOUS_PATH, message)
    if complete:
        if complete[0] != root:
            decisions.note(f"`{root}` in the file is `{complete[0]}` in the model")
        return fits[complete[0]]
    partial = [fit for fit in fits.values() if fit]
    return partial[0] if len(partial) == 1 else {}


def resolve_flat(
    paths: Iterable[str], targets: Collection[str], decisions: Decisions
) -> dict[str, Match]:
    """The targets of modules whose names have underscores for dots (kohya).

    Args:
        paths: names such as "lora_unet_model_layers_0_self_attn_q_proj".
        targets: paths of the targets in the model.
        decisions: takes the notes; decides what `strict=False` lets pass.

    Raises:
        AdapterMismatchError: if a module has no target.
        AdapterFormatError: if it could have several, or two modules have the same.

    Example:
        >>> resolve_flat(["lora_te_lm_head"], ["lm_head"], Decisions("sql"))[
        ...     "lora_te_lm_head"
        ... ].targets
        ('lm_head',)
    """
    whole: dict[str, list[str]] = {}
    ending: dict[str, list[str]] = {}
    for target in set(targets):
        name = target.replace(".", "_")
        whole.setdefault(name, []).append(target)
        for end in ends(name, "_"):
            ending.setdefault(end, []).append(target)
    found: dict[str, Match] = {}
    missing: list[str] = []
    for path in sorted(paths):
        prefix = next((p for p in _FLAT_PREFIXES if path.startswith(p)), "")
        bare = path[len(prefix) :]
        hits = whole.get(bare) or ending.get(bare, [])
        if len(hits) > 1:
            message = f"`{path}` could be {listed(hits)}; hint: name the module in full"
            raise decisions.refuse(Refusal.AMBIGUOUS_PATH, message)
        if hits:
            found[path] = Match((hits[0],))
        else:
            missing.append(path)
    if missing:
        decisions.tolerate(Refusal.UNMATCHED_PATH, f"no target of the model is {listed(missing)}")
    _check_distinct(found, decisions)
    return found


def _check_distinct(found: dict[str, Match], decisions: Decisions) -> None:
    """Refuse two modules with the same target, or a target both whole and in slices."""
    owners: dict[str, dict[str, str]] = {}
    for path, match in found.items():
        for target in match.targets:
            parts = owners.setdefault(target, {})
            if match.part in parts or ("" in parts) or (parts and not match.part):
                both = listed([path, next(iter(parts.values()))])
                message = f"{both} are both the target `{target}`"
                raise decisions.refuse(Refusal.AMBIGUOUS_PATH, message)
            parts[match.part] = path
