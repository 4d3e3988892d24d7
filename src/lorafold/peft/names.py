"""The grammar of tensor names: what part a tensor plays, and of which module.

    [_orig_mod.] base_model.model. <module path> . {lora_A|lora_B} [.<adapter>] [.weight]
                                                 . {lora_embedding_A|lora_embedding_B} [.<adapter>]
                                                 . {lora_down|lora_up}.weight | .alpha
                                                 . [base_layer.] weight

Prefixes of wrappers, and the name of the adapter, are taken off here. Everything that is not part
of plain LoRA has its refusal here too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lorafold.peft.config import VOCABULARY_LEAVES
from lorafold.refusal import Decisions, Refusal, listed

__all__ = ["Role", "TensorName", "read_name", "read_names"]

Role = Literal["a", "b", "embedding_a", "embedding_b", "alpha", "copy", "dropped"]
"""What a tensor is: a factor, kohya's alpha, a copy of the base, or needed in training only."""

_MAX_LENGTH = 256
_CONVOLUTION = re.compile(r"conv([123]d)?\d*(_.*)?")
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_FACTORS: dict[str, Role] = {
    "lora_A": "a",
    "lora_B": "b",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
    "lora_down": "a",
    "lora_up": "b",
}
# Used while training, inert at inference.
_TRAINING_ONLY = frozenset({"lora_velora_embed", "lora_monteclora_sampler"})
# A segment that decides, wherever it stands.
_REFUSED_SEGMENTS = {
    "lora_magnitude_vector": Refusal.DORA,
    "dora_scale": Refusal.DORA,
    "token_adapter": Refusal.TRAINABLE_TOKENS,
    "trainable_tokens_delta": Refusal.TRAINABLE_TOKENS,
    "lora_diag": Refusal.BASE_CHANGING_INIT,
    "lora_mid": Refusal.CONV,
    "modules_to_save": Refusal.MODULES_TO_SAVE,
    "original_module": Refusal.MODULES_TO_SAVE,
    "lora_E": Refusal.NOT_LORA,
    "ranknum": Refusal.NOT_LORA,
    "lora_a": Refusal.FOREIGN_FORMAT,  # MLX, llama.cpp
    "lora_b": Refusal.FOREIGN_FORMAT,
    "lora": Refusal.FOREIGN_FORMAT,  # diffusers
    "linear_in": Refusal.FOREIGN_FORMAT,  # Megatron
    "linear_out": Refusal.FOREIGN_FORMAT,
}
_OTHER_METHODS = ("hada_", "lokr_", "ia3_", "vera_", "oft_")


@dataclass(frozen=True)
class TensorName:
    """One tensor name, taken apart.

    Args:
        raw: the name in the file.
        path: the module, without the prefixes of wrappers.
        role: what the tensor is.
        adapter: the name of the adapter inside the name, "" if there is none.
        depth: how many `base_layer` segments end the path: PEFT's nesting of expert parameters.
        is_flat: the path has underscores for dots (kohya).

    Example:
        >>> name = read_name("base_model.model.lm_head.lora_A.default.weight")
        >>> name.path, name.role, name.adapter
        ('lm_head', 'a', 'default')
    """

    raw: str
    path: str
    role: Role
    adapter: str = ""
    depth: int = 0
    is_flat: bool = False


def _module_path(segments: list[str]) -> str:
    """The path without what wrappers put in front."""
    rest = list(segments)
    while rest and rest[0] in ("module", "base_model"):
        rest = rest[2:] if rest[:2] == ["base_model", "model"] else rest[1:]
    return ".".join(rest)


def read_name(raw: str) -> TensorName | Refusal:
    """Take a tensor name apart; or say why the tensor is refused.

    Example:
        >>> read_name("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector").value
        'dora'
    """
    segments = [segment for segment in raw.split(".") if segment not in _WRAPPERS]
    if len(raw) > _MAX_LENGTH or not raw.isprintable() or not all(segments):
        return Refusal.UNKNOWN_TENSOR
    for segment in segments:
        if segment in _REFUSED_SEGMENTS:
            return _REFUSED_SEGMENTS[segment]
        if segment in _TRAINING_ONLY:
            return TensorName(raw, _module_path(segments), "dropped")
        if segment.startswith(_OTHER_METHODS):
            return Refusal.NOT_LORA
    at = next((i for i, segment in enumerate(segments) if segment in _FACTORS), None)
    if at is not None:
        return _read_factor(raw, segments[:at], segments[at], segments[at + 1 :])
    return _read_other(raw, segments)


def _read_factor(
    raw: str, before: list[str], marker: str, after: list[str]
) -> TensorName | Refusal:
    if after and after[-1] == "bias":
        return Refusal.LORA_BIAS
    if after and after[-1] == "weight":
        after = after[:-1]
    if len(after) > 1:
        return Refusal.UNKNOWN_TENSOR
    depth = 0
    while before and before[-1] == "base_layer":
        before, depth = before[:-1], depth + 1
    path = _module_path(before)
    is_nested = depth > 0 and not path.endswith("experts")
    if not path or is_nested or "base_layer" in before:
        return Refusal.UNKNOWN_TENSOR
    if _CONVOLUTION.fullmatch(before[-1]):
        return Refusal.CONV
    is_flat = marker in ("lora_down", "lora_up") and len(before) == 1
    return TensorName(raw, path, _FACTORS[marker], "".join(after), depth, is_flat)


def _read_other(raw: str, segments: list[str]) -> TensorName | Refusal:
    leaf, before = segments[-1], segments[:-1]
    if any(segment.startswith("lora_") for segment in segments[1:]):
        return Refusal.UNKNOWN_TENSOR
    if leaf == "alpha" and before:
        return TensorName(raw, _module_path(before), "alpha", is_flat=len(before) == 1)
    if leaf == "bias":
        return Refusal.BIAS
    if leaf != "weight" or not before:
        return Refusal.UNKNOWN_TENSOR
    is_base = before[-1] == "base_layer"
    path = _module_path(before[:-1] if is_base else before)
    if path.rpartition(".")[2] in VOCABULARY_LEAVES:
        return TensorName(raw, path, "copy")
    if "linear_qkv" in segments or "blk" in segments:
        return Refusal.FOREIGN_FORMAT
    return Refusal.BASE_WEIGHTS if is_base else Refusal.MODULES_TO_SAVE


_WAYS_OUT = {
    Refusal.FOREIGN_FORMAT: "MLX: transpose, and rename to lora_A and lora_B; llama.cpp: use the "
    "adapter that was converted; Megatron, diffusers: use their export to PEFT",
    Refusal.BASE_WEIGHTS: "the base is shared by all adapters and is never overwritten",
    Refusal.MODULES_TO_SAVE: "train without modules_to_save, or merge the adapter into the base",
    Refusal.UNKNOWN_TENSOR: "every tensor of the file must be understood",
}


def read_names(names: Iterable[str], decisions: Decisions) -> list[TensorName]:
    """Take all tensor names of a file apart, or refuse the file with the list of the guilty ones.

    Raises:
        AdapterFormatError: if a tensor is refused, if the file holds several adapters, or if it
            mixes kohya's names with others.

    Example:
        >>> names = ["m.lora_A.weight", "m.lora_B.weight"]
        >>> [name.role for name in read_names(names, Decisions("sql"))]
        ['a', 'b']
    """
    parsed: list[TensorName] = []
    refused: dict[Refusal, list[str]] = {}
    for raw in sorted(names):
        name = read_name(raw)
        if isinstance(name, TensorName):
            parsed.append(name)
        else:
            refused.setdefault(name, []).append(raw)
    # Enum order, but what is merely unknown comes last: the other reasons say more.
    for refusal in sorted(Refusal, key=lambda refusal: refusal is Refusal.UNKNOWN_TENSOR):
        if refusal in refused:
            way_out = _WAYS_OUT.get(refusal, refusal.meaning)
            message = f"{len(refused[refusal])} tensors: {listed(refused[refusal])}; {way_out}"
            raise decisions.refuse(refusal, message)
    adapters = {name.adapter for name in parsed} - {""}
    if len(adapters) > 1:
        message = f"the file holds the adapters {listed(adapters)}; hint: save one per file"
        raise decisions.refuse(Refusal.SEVERAL_ADAPTERS, message)
    if len({name.is_flat for name in parsed if name.role in ("a", "b")}) > 1:
        message = "the file mixes kohya's flattened names with dotted ones"
        raise decisions.refuse(Refusal.FOREIGN_FORMAT, message)
    return parsed
