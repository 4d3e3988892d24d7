"""adapter_config.json, checked field by field for what it means at inference.

Every field of the file is known and harmless, or known and understood, or the adapter is refused: a
flag of a newer PEFT could change the maths. Which modules are adapted is not read here: the tensors
say so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lorafold.peft.header import read_json
from lorafold.peft.paths import ends
from lorafold.peft.scale import ScaleRule
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["VOCABULARY_LEAVES", "PeftConfig", "read_config"]

VOCABULARY_LEAVES = frozenset({"embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in"})
"""Last segments of the modules that hold one row per token."""

_IGNORED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying",
        "eva_config", "fan_in_fan_out", "inference_mode", "loftq_config", "lora_dropout",
        "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
        "runtime_config",
    }
)  # fmt: skip

_READ = frozenset(
    {
        "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_B_layout", "lora_alpha", "modules_to_save",
        "monteclora_config", "peft_type", "r", "rank_pattern", "target_modules",
        "target_parameters", "task_type", "use_qalora", "use_rslora", "velora_config",
    }
)  # fmt: skip

# Refused whenever the value is truthy.
_REFUSED = {
    "use_dora": (Refusal.DORA, "DoRA"),
    "lora_bias": (Refusal.LORA_BIAS, "a bias on B"),
    "trainable_token_indices": (Refusal.TRAINABLE_TOKENS, "replaced embedding rows"),
    "kasa_config": (Refusal.BASE_CHANGING_INIT, "KaSA, which truncates the base weights"),
    "alora_invocation_tokens": (Refusal.ALORA, "activation from an invocation sequence onwards"),
    "arrow_config": (Refusal.ARROW, "routing among other adapters"),
    "use_bdlora": (Refusal.BDLORA, "block-diagonal factors"),
    "layer_replication": (Refusal.LAYER_REPLICATION, "a base with repeated layers"),
    "megatron_config": (Refusal.MEGATRON, "parallel layers of Megatron"),
}

_MERGEABLE = frozenset({Refusal.DORA, Refusal.LORA_BIAS, Refusal.TRAINABLE_TOKENS})
_PLAIN_INITS = frozenset({"gaussian", "orthogonal", "eva", "mica"})
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "kasa")


@dataclass(frozen=True)
class PeftConfig:
    """What a config says about the maths.

    Args:
        scale_rule: rank, alpha and scale per module.
        target_modules: the list of names, empty for a regular expression or none.
        target_parameters: names of parameters, for experts and routers.
        excluded: names of modules that must have no tensors.
        layers: indices of the only layers that may have tensors; None allows all.
        layer_names: the names of the lists that `layers` counts, empty for the first number.
        saved_vocabulary: vocabulary modules that the file copies.
        is_qalora: A may be narrower than the target.
        lora_b_layout: Unsloth's word for the column order of expert factors, "" if absent.
        is_unsloth: the config carries Unsloth's mark.
        base_model: what the adapter was trained on.
        peft_version: (major, minor, patch), None where the file does not say.
    """

    scale_rule: ScaleRule
    target_modules: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    layer_names: tuple[str, ...] = ()
    saved_vocabulary: tuple[str, ...] = ()
    is_qalora: bool = False
    lora_b_layout: str = ""
    is_unsloth: bool = False
    base_model: str | None = None
    peft_version: tuple[int, ...] | None = None

    def excludes(self, path: str) -> str:
        """Why the config leaves a module out, "" if it does not."""
        if any(end in self.excluded for end in ends(path, ".")):
            return "exclude_modules"
        if self.layers is not None and self._layer(path) not in self.layers:
            return "layers_to_transform"
        return ""

    def _layer(self, path: str) -> int | None:
        segments = path.split(".")
        for before, segment in itertools.pairwise(segments):
            if segment.isdecimal() and (not self.layer_names or before in self.layer_names):
                return int(segment)
        return None


@dataclass
class _Reader:
    """The parsed JSON, with typed access that refuses what has the wrong type."""

    fields: Mapping[str, Any]
    decisions: Decisions
    found: dict[str, Any] = field(default_factory=dict)

    def bad(self, name: str, expected: str) -> Exception:
        given = repr(self.fields.get(name))[:100]
        message = f"`{name}` in adapter_config.json must be {expected}; given: {given}"
        return self.decisions.refuse(Refusal.BAD_CONFIG, message)

    def flag(self, name: str) -> bool:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return bool(value)

    def names(self, name: str) -> tuple[str, ...]:
        """A list of words, or one word."""
        value = self.fields.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise self.bad(name, "a list of names")
        return tuple(values)

    def number(self, name: str, value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or abs(value) > 1e30 or not math.isfinite(value):
            raise self.bad(name, "a finite number")
        return float(value)

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= 1 << 20:
            raise self.bad(name, "a whole number of at least 1")
        return value

    def pattern(self, name: str) -> dict[str, Any]:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.bad(name, "a map from pattern to number")
        return value or {}


def read_config(text: bytes, decisions: Decisions) -> PeftConfig:
    """Check a config and take from it what inference needs.

    Args:
        text: the content of adapter_config.json.
        decisions: takes the notes; decides what `strict=False` lets pass.

    Raises:
        AdapterFormatError: if it is not valid, or asks for what is not supported.

    Example:
        >>> text = b'{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}'
        >>> config = read_config(text, Decisions("sql"))
        >>> config.scale_rule.of(["model.layers.0.self_attn.q_proj"]), config.target_modules
        ((8, 16.0), ('q_proj',))
    """
    try:
        fields = read_json(text)
    except ValueError as error:
        message = f"adapter_config.json is no JSON: {error}"
        raise decisions.refuse(Refusal.BAD_CONFIG, message) from None
    if not isinstance(fields, dict):
        message = f"adapter_config.json must be an object; given: {type(fields).__name__}"
        raise decisions.refuse(Refusal.BAD_CONFIG, message)
    if "lora_parameters" in fields:
        message = "the config is MLX's; hint: convert with mlx_lm.fuse, or rename and transpose"
        raise decisions.refuse(Refusal.FOREIGN_FORMAT, message)
    reader = _Reader(fields, decisions)
    _check_method(reader)
    _check_unsupported(reader)
    _check_init(reader)
    _check_unknown(reader)
    return _build(reader)


def _check_method(reader: _Reader) -> None:
    method, task = reader.fields.get("peft_type"), reader.fields.get("task_type")
    if not isinstance(method, str) or method.upper() != "LORA":
        message = f"peft_type must be LORA; given: {method!r}"
        raise reader.decisions.refuse(Refusal.NOT_LORA, message)
    if task not in (None, "CAUSAL_LM"):
        message = f"task_type must be CAUSAL_LM or null; given: {task!r}"
        raise reader.decisions.refuse(Refusal.TASK_TYPE, message)


def _check_unsupported(reader: _Reader) -> None:
    for name, (refusal, what) in _REFUSED.items():
        if reader.fields.get(name):
            way_out = "; hint: merge the adapter into the base" if refusal in _MERGEABLE else ""
            message = f"`{name}` asks for {what}, which is not supported{way_out}"
            raise reader.decisions.refuse(refusal, message)
    bias = reader.fields.get("bias")
    if bias not in (None, "none"):
        message = f"bias must be none; given: {bias!r}; hint: it replaces biases of the base"
        raise reader.decisions.refuse(Refusal.BIAS, message)
    others = [
        name
        for name in reader.names("modules_to_save")
        if name.rpartition(".")[2] not in VOCABULARY_LEAVES
    ]
    if others:
        message = f"modules_to_save replaces {listed(others)}; allowed: copies of the vocabulary"
        raise reader.decisions.refuse(Refusal.MODULES_TO_SAVE, message)


def _check_init(reader: _Reader) -> None:
    init = reader.fields.get("init_lora_weights")
    if init is None or isinstance(init, bool):
        return
    if isinstance(init, str) and init in _PLAIN_INITS:
        return
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        message = (
            f"init_lora_weights {init!r} changed the base weights; hint: save the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
        raise reader.decisions.refuse(Refusal.BASE_CHANGING_INIT, message)
    message = f"init_lora_weights {init!r} is not known; allowed: true, {sorted(_PLAIN_INITS)}"
    raise reader.decisions.refuse(Refusal.UNKNOWN_INIT, message)


def _check_unknown(reader: _Reader) -> None:
    known = _IGNORED | _READ | _REFUSED.keys()
    unknown = [name for name, value in reader.fields.items() if value and name not in known]
    if unknown:
        message = f"adapter_config.json sets fields that are not known: {listed(unknown)}"
        reader.decisions.tolerate(Refusal.UNKNOWN_FIELD, message)


def _version(text: object) -> tuple[int, ...] | None:
    if not isinstance(text, str):
        return None
    parts = text.split("+")[0].split(".")[:3]
    numbers = ["".join(c for c in part if c.isdecimal())[:6] for part in parts]
    return tuple(int(number) for number in numbers if number) or None


def _layers(reader: _Reader) -> frozenset[int] | None:
    value = reader.fields.get("layers_to_transform")
    indices = [value] if type(value) is int else value or []
    if not isinstance(indices, list) or not all(type(i) is int and i >= 0 for i in indices):
        raise reader.bad("layers_to_transform", "a list of layer indices")
    return frozenset(indices) or None


def _build(reader: _Reader) -> PeftConfig:
    fields = reader.fields
    rule = ScaleRule(
        rank=reader.rank("r", fields.get("r")),
        alpha=reader.number("lora_alpha", fields.get("lora_alpha")),
        use_rslora=reader.flag("use_rslora"),
        rank_pattern={
            key: reader.rank("rank_pattern", value)
            for key, value in reader.pattern("rank_pattern").items()
        },
        alpha_pattern={
            key: reader.number("alpha_pattern", value)
            for key, value in reader.pattern("alpha_pattern").items()
        },
        decisions=reader.decisions,
    )
    targets, excluded = fields.get("target_modules"), fields.get("exclude_modules")
    if isinstance(excluded, str) and excluded:
        reader.decisions.note("exclude_modules is a regular expression and was not evaluated")
    mapping = fields.get("auto_mapping")
    base_model = fields.get("base_model_name_or_path")
    return PeftConfig(
        scale_rule=rule,
        # A single word is a regular expression here: the tensors say what it matched.
        target_modules=() if isinstance(targets, str) else reader.names("target_modules"),
        target_parameters=reader.names("target_parameters"),
        excluded=frozenset(() if isinstance(excluded, str) else reader.names("exclude_modules")),
        layers=_layers(reader),
        layer_names=reader.names("layers_pattern"),
        saved_vocabulary=reader.names("modules_to_save"),
        is_qalora=reader.flag("use_qalora"),
        lora_b_layout=str(fields.get("lora_B_layout") or ""),
        is_unsloth=isinstance(mapping, dict) and bool(mapping.get("unsloth_fixed")),
        base_model=base_model if isinstance(base_model, str) else None,
        peft_version=_version(fields.get("peft_version")),
    )
