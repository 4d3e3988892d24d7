"""From named tensors to factors: paired, checked, rounded to bfloat16 and scaled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafold.adapter import Kind
from lorafold.peft.config import PeftConfig
from lorafold.peft.names import Role, TensorName
from lorafold.peft.paths import ends
from lorafold.peft.spec import ExpertEntry, Form, LoraEntry, Projection
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["build_entries", "to_bfloat16"]

_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_ROUTER_LEAVES = frozenset({"gate", "router"})
_PROJECTIONS: dict[str, Projection] = {
    "gate_proj": "gate", "w1": "gate",
    "up_proj": "up", "w3": "up",
    "down_proj": "down", "w2": "down", "down_projs": "down",
    "gate_up_proj": "gate_up", "gate_up_projs": "gate_up",
}  # fmt: skip


def to_bfloat16(tensor: Tensor, name: str, decisions: Decisions) -> Tensor:
    """Round a factor to bfloat16, to nearest even; float8 and bfloat16 are exact.

    Args:
        tensor: float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, any shape.
        name: the tensor's name in the file, for messages.
        decisions: carries the adapter's name for messages.

    Raises:
        AdapterFormatError: if the dtype is another, or a value is not finite before or after.

    Example:
        >>> to_bfloat16(torch.tensor([1.00390625]), "x", Decisions("sql")).item()
        1.0
    """
    if tensor.dtype not in _DTYPES:
        message = f"`{name}` is {tensor.dtype}; allowed: {', '.join(map(str, _DTYPES))}"
        raise decisions.refuse(Refusal.DTYPE, message)
    exact = tensor.float()  # bfloat16, float16 and float8 values are all float32 values
    rounded = exact.to(torch.bfloat16)
    if bool(torch.isfinite(rounded).all()):  # so they were before: NaN and infinity stay
        return rounded.contiguous()
    if not bool(torch.isfinite(exact).all()):
        message = f"`{name}` holds NaN or infinity; hint: the training may have diverged"
        raise decisions.refuse(Refusal.NON_FINITE, message)
    message = f"`{name}` holds {float(exact.abs().max())}, which is infinite in bfloat16"
    raise decisions.refuse(Refusal.OVERFLOW, message)


@dataclass
class _Module:
    """All tensors of one module, by the part they play."""

    path: str
    depth: int
    is_flat: bool
    names: dict[Role, str] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names in the file, sorted."""
        return tuple(sorted(self.names.values()))


def _gather(names: Iterable[TensorName], decisions: Decisions) -> list[_Module]:
    """Group the factors by module, in pairs."""
    modules: dict[tuple[str, int, bool], _Module] = {}
    for name in names:
        if name.role in ("copy", "dropped"):
            continue
        is_embedding = name.role.startswith("embedding")
        key = (name.path, name.depth, is_embedding)
        module = modules.setdefault(key, _Module(name.path, name.depth, name.is_flat))
        if name.role in module.names:
            message = f"{listed([module.names[name.role], name.raw])} are the same factor"
            raise decisions.refuse(Refusal.DUPLICATE_TENSOR, message)
        module.names[name.role] = name.raw
    for module in modules.values():
        roles = module.names.keys() - {"alpha"}
        if roles not in ({"a", "b"}, {"embedding_a", "embedding_b"}):
            message = f"{listed(module.names.values())}: A and B must both be there"
            raise decisions.refuse(Refusal.UNPAIRED_TENSOR, message)
    return list(modules.values())


def _expert_of(path: str) -> tuple[str, Projection | None, int | None] | None:
    """(experts module, projection, expert) of a path inside routed experts, else None."""
    segments = path.split(".")
    if "experts" not in segments:
        return None
    at = len(segments) - segments[::-1].index("experts")
    module, tail = ".".join(segments[:at]), segments[at:]
    if not tail:
        return module, None, None
    index = next((int(segment) for segment in tail if segment.isdecimal()), None)
    words = [segment for segment in tail if not segment.isdecimal()]
    if len(words) != 1 or words[0] not in _PROJECTIONS or len(tail) > 2:
        return None
    return module, _PROJECTIONS[words[0]], index


class _Builder:
    """Turns the modules of one file into entries."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        config: PeftConfig,
        modules: list[_Module],
        decisions: Decisions,
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._target_parameters = frozenset(config.target_parameters)
        self._decisions = decisions
        self._depths: dict[str, set[int]] = {}
        for module in modules:
            self._depths.setdefault(module.path, set()).add(module.depth)

    def factors(self, module: _Module) -> tuple[Tensor, Tensor]:
        """A and B in bfloat16."""
        name_a = module.names.get("a") or module.names["embedding_a"]
        name_b = module.names.get("b") or module.names["embedding_b"]
        for name in (name_a, name_b):
            shape = tuple(self._tensors[name].shape)
            if 0 in shape:
                message = f"`{name}` has the shape {shape}; hint: gather the shards before saving"
                raise self._decisions.refuse(Refusal.EMPTY_FACTOR, message)
        a = to_bfloat16(self._tensors[name_a], name_a, self._decisions)
        b = to_bfloat16(self._tensors[name_b], name_b, self._decisions)
        return a, b

    def alpha(self, module: _Module, configured: float | None) -> float | None:
        """kohya's alpha tensor, which must agree with the config if both are there."""
        name = module.names.get("alpha")
        if name is None:
            return configured
        tensor = self._tensors[name]
        if tensor.numel() != 1 or tensor.dtype not in _DTYPES:
            message = f"`{name}` must be one float; given: {tuple(tensor.shape)} {tensor.dtype}"
            raise self._decisions.refuse(Refusal.SHAPE, message)
        alpha = float(tensor.float().item())
        if configured is not None and configured != alpha:
            message = f"`{name}` is {alpha}, the config says {configured}; hint: remove one"
            raise self._decisions.refuse(Refusal.AMBIGUOUS_SCALE, message)
        return alpha

    def linear(self, module: _Module) -> LoraEntry:
        """The entry of a linear module, a router or an embedding."""
        a, b = self.factors(module)
        if a.dim() > 2 and b.dim() > 2:
            message = f"`{module.path}` has factors of {tuple(a.shape)} and {tuple(b.shape)}"
            raise self._decisions.refuse(Refusal.CONV, message)
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            message = (
                f"A must be [rank, in] and B [out, rank]; `{module.path}` has {tuple(a.shape)} "
                f"and {tuple(b.shape)}"
            )
            raise self._decisions.refuse(Refusal.SHAPE, message)
        self.check_included(module.path)
        rank, configured = self._config.scale_rule.of([self.pattern_name(module.path)])
        self.check_rank(module.path, int(a.shape[0]), rank)
        alpha = self.alpha(module, configured)
        kind: Kind = "router" if module.path.rpartition(".")[2] in _ROUTER_LEAVES else "linear"
        kind = "embedding" if "embedding_a" in module.names else kind
        scale = self._config.scale_rule.scale(alpha, int(a.shape[0]))
        return LoraEntry(module.path, kind, a, b, scale, module.tensors, module.is_flat)

    def pattern_name(self, path: str) -> str:
        """What PEFT matches patterns with: the parameter's name where a parameter is targeted."""
        return f"{path}.weight" if self.is_target_parameter(f"{path}.weight") else path

    def is_target_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names a parameter."""
        return any(end in self._target_parameters for end in ends(name, "."))

    def check_included(self, path: str) -> None:
        """Refuse tensors of a module that the config leaves out."""
        reason = self._config.excludes(path)
        if reason:
            message = f"`{path}` has tensors, but `{reason}` leaves it out"
            raise self._decisions.refuse(Refusal.EXCLUDED_TENSOR, message)

    def check_rank(self, path: str, rank: int, configured: int | None) -> None:
        """Refuse a rank that is not the config's."""
        if configured is not None and rank != configured:
            message = f"`{path}` has rank {rank}, the config says {configured}: no scale is right"
            raise self._decisions.refuse(Refusal.RANK_MISMATCH, message)

    def expert(
        self, module: _Module, experts: str, projection: Projection | None, index: int | None
    ) -> ExpertEntry:
        """The entry of expert factors, still in the file's layout."""
        a, b = self.factors(module)
        form: Form = "single" if index is not None else "folded"
        if a.dim() == 3 and b.dim() == 3 and form == "folded" and module.depth == 0:
            form = "stacked"
        elif a.dim() != 2 or b.dim() != 2:
            message = f"`{module.path}` has factors of {tuple(a.shape)} and {tuple(b.shape)}"
            raise self._decisions.refuse(Refusal.SHAPE, message)
        if form == "folded":
            projection = projection or self.folded_projection(module)
        matched = [module.path]
        if form == "folded":
            parts = [projection] if projection else ["gate_up", "down"]
            matched = [f"{experts}.{part}_proj" for part in parts]
        rank, alpha = self._config.scale_rule.of(matched)
        if form == "single":
            self.check_included(module.path)
            self.check_rank(module.path, int(a.shape[0]), rank)
            rank = int(a.shape[0])
        if rank is None:
            message = (
                f"the rank of `{module.path}` is not in its shape; hint: add adapter_config.json"
            )
            raise self._decisions.refuse(Refusal.MISSING_FILE, message)
        scale = self._config.scale_rule.scale(self.alpha(module, alpha), rank)
        return ExpertEntry(
            module.path, experts, form, projection, index, a, b, rank, scale, module.tensors
        )

    def folded_projection(self, module: _Module) -> Projection | None:
        """Which parameter PEFT's nesting, or else target_parameters, says; None if neither does."""
        depths = self._depths[module.path]
        if depths == {0, 1}:
            # PEFT wraps in the order of registration: gate_up_proj is inside.
            return "gate_up" if module.depth == 1 else "down"
        if depths != {0}:
            message = f"`{module.path}` adapts parameters other than gate_up_proj and down_proj"
            raise self._decisions.refuse(Refusal.EXPERT_LAYOUT, message)
        named: list[Projection] = [
            part
            for part in ("gate_up", "down")
            if self.is_target_parameter(f"{module.path}.{part}_proj")
        ]
        return named[0] if len(named) == 1 else None


def build_entries(
    names: Iterable[TensorName],
    tensors: Mapping[str, Tensor],
    config: PeftConfig,
    decisions: Decisions,
) -> tuple[list[LoraEntry], list[ExpertEntry]]:
    """Pair the factors of a file, check them, round them to bfloat16 and give them their scale.

    Args:
        names: the names of the file, taken apart.
        tensors: the tensors by name, as stored.
        config: what the config says about the maths.
        decisions: takes the notes, and carries the adapter's name for messages.

    Returns:
        The entries of linear modules, routers and embeddings; and those of experts.

    Raises:
        AdapterFormatError: if a factor is missing, malformed, or contradicts the config.
    """
    modules = _gather(names, decisions)
    if not modules:
        message = "the file holds no lora_A and lora_B"
        raise decisions.refuse(Refusal.EMPTY_ADAPTER, message)
    builder = _Builder(tensors, config, modules, decisions)
    entries: list[LoraEntry] = []
    experts: list[ExpertEntry] = []
    for module in modules:
        place = None if module.is_flat else _expert_of(module.path)
        if place is None:
            if module.depth:
                message = f"{listed(module.names.values())}: only expert parameters are nested"
                raise decisions.refuse(Refusal.UNKNOWN_TENSOR, message)
            entries.append(builder.linear(module))
        else:
            experts.append(builder.expert(module, *place))
    return entries, experts
