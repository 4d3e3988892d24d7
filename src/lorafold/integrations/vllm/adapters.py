"""Adapters inside vLLM: their scales kept in float32, their tensors checked, their slots filled in.

vLLM multiplies the scale into B in bfloat16, leaves out tensors that find no layer, and copies a
tensor that is too small into the corner of its slot. Here the scale is set aside before that, and
an adapter of which anything would be left out or half copied is refused when it is loaded.

Needs no vLLM: `manager`, `model` and `layer` are vLLM's LoRAModelManager, LoRAModel and layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lorafold.integrations.vllm.moe import ExpertTarget
from lorafold.integrations.vllm.shapes import Factors, expected_experts, expected_factors
from lorafold.refusal import Refusal, listed, refuse

__all__ = ["check_adapter", "clear_slot", "fill_slot", "set_scales_aside"]


@dataclass(frozen=True)
class _Scales:
    """Scales by module name, which vLLM's resolution of names can look into."""

    loras: Mapping[str, float]

    def check_lora_name(self, name: str) -> bool:
        return name in self.loras

    def get_lora(self, name: str) -> float | None:
        return self.loras.get(name)


def set_scales_aside(model: Any) -> None:
    """Keep the scales of a model's tensors under `model.lorafold_scales`; vLLM then sees 1.

    Example:
        >>> from types import SimpleNamespace
        >>> model = SimpleNamespace(loras={"mlp.up_proj": SimpleNamespace(scaling=1.5)})
        >>> set_scales_aside(model)
        >>> model.lorafold_scales, model.loras["mlp.up_proj"].scaling
        ({'mlp.up_proj': 1.5}, 1)
    """
    model.lorafold_scales = {name: float(lora.scaling) for name, lora in model.loras.items()}
    for lora in model.loras.values():
        lora.scaling = 1


def check_adapter(manager: Any, model: Any, adapter: str) -> None:
    """Whether every tensor of an adapter finds its layer, and fills its place there.

    Args:
        manager: whose layers they go to.
        model: the adapter as read, before its tensors are packed.
        adapter: its name, for messages.

    Raises:
        AdapterFormatError: if a factor lacks its partner, or there are tensors that are not LoRA.
        AdapterMismatchError: if a tensor finds no layer, or has another shape than the layer.
    """
    if model.modules_to_save:
        message = f"only LoRA factors are supported; given: {listed(model.modules_to_save)}"
        raise refuse(Refusal.MODULES_TO_SAVE, message, adapter=adapter)
    if not model.loras:
        raise refuse(Refusal.EMPTY_ADAPTER, "no tensor is a LoRA factor", adapter=adapter)
    halves = [n for n, lora in model.loras.items() if lora.lora_a is None or lora.lora_b is None]
    if halves:
        message = f"lora_A or lora_B is missing of {listed(halves)}"
        raise refuse(Refusal.UNPAIRED_TENSOR, message, adapter=adapter)
    found: set[int] = set()
    for name, factors in expected_factors(manager, model).items():
        lora = manager._get_lora_layer_weights(model, name)
        if lora is not None:
            found.add(id(lora))
            _check_factors(name, lora, factors, manager.lora_config.max_lora_rank, adapter)
    _check_experts(manager, model, adapter)
    elsewhere = tuple(_on_other_ranks(manager))
    _check_copies(manager, model, adapter, elsewhere)
    stray = [
        name
        for name, lora in model.loras.items()
        if id(lora) not in found and not f"{name}.".startswith(elsewhere)
    ]
    if stray:
        message = (
            f"no layer of the model takes the tensors of {listed(stray)}; hint: were they trained "
            "on another model class, or does --lora-target-modules leave them out?"
        )
        raise refuse(Refusal.UNMATCHED_PATH, message, adapter=adapter)


def clear_slot(manager: Any, slot: int) -> None:
    """Say in all tables that a slot has no adapter."""
    for layer in manager.modules.values():
        target = layer.punica_wrapper
        for tables in (target.w13, target.w2) if _has_experts(target) else (target.tables,):
            tables.clear(slot)


def fill_slot(manager: Any, model: Any, slot: int) -> None:
    """Write an adapter's ranks and scales into the tables of its slot; vLLM has copied A and B."""
    for name, layer in manager.modules.items():
        lora = manager._get_lora_layer_weights(model, name)
        if not lora:
            continue
        if _has_experts(layer.punica_wrapper):
            _fill_experts(manager, model, name, layer, lora, slot)
        else:
            _fill_dense(manager, model, name, layer, lora, slot)
    for punica in {id(p): p for p in manager.punica_wrapper_mapping.values()}.values():
        punica.refresh()


def _fill_dense(manager: Any, model: Any, name: str, layer: Any, lora: Any, slot: int) -> None:
    tables = layer.punica_wrapper.tables
    names = manager.packed_modules.get(name, [name])
    num_slices = len(tables.n_outs)
    if isinstance(lora.lora_a, Tensor):  # one A for all slices
        parts = [(0, lora.lora_a)] * num_slices
    elif len(lora.lora_a) == num_slices:
        parts = list(enumerate(lora.lora_a))
    else:  # one A for a group of slices
        wide, _ = layer.expand_packed_lora(lora.lora_a, lora.lora_b)
        parts = [(next(i for i, a in enumerate(lora.lora_a) if a is part), part) for part in wide]
    for slice_id, (part, a) in enumerate(parts):
        if a is not None:
            tables.place(slot, slice_id, a.shape[0], _scale(manager, model, names[part]))


def _fill_experts(manager: Any, model: Any, name: str, layer: Any, lora: Any, slot: int) -> None:
    """lora_a is [gate_up, down] of fused experts, else [gate, down, up]: [E, rank, k_in] each."""
    target = layer.punica_wrapper
    if f"{name}.base_layer" in _scales_of(model) or len(lora.lora_a) == 2:
        names = [f"{name}.base_layer", name, f"{name}.base_layer"]
    else:
        names = manager._restrict_to_local_experts(name, manager.packed_modules[name])
    per_expert = 2 if manager._is_non_gated_moe else 3
    for j, a in enumerate(lora.lora_a):
        if j == 2 and len(target.w13.n_outs) == 1:
            continue  # without a gate, vLLM repeats the first
        own = names[j::per_expert] or names[:1]
        scales = [_scale(manager, model, part) for part in own]
        tables, slice_id = (target.w2, 0) if j == 1 else (target.w13, j // 2)
        wanted = scales if len(scales) == tables.num_experts > 1 else scales[0]
        tables.place(slot, slice_id, a.shape[1], wanted)


def _scales_of(model: Any) -> Mapping[str, float]:
    return getattr(model, "lorafold_scales", {})


def _scale(manager: Any, model: Any, name: str) -> float:
    """The scale of a module; 1 for the zeros that vLLM warms up with, which come from no file."""
    scale = manager._get_lora_layer_weights(_Scales(_scales_of(model)), name)
    return 1.0 if scale is None else float(scale)


def _has_experts(target: Any) -> bool:
    return isinstance(target, ExpertTarget)


def _check_factors(name: str, lora: Any, factors: Factors, max_rank: int, adapter: str) -> None:
    """Whether one module's factors fill their place."""
    rank = lora.rank
    if rank > max_rank:
        message = f"`{name}` has rank {rank}; max_lora_rank is {max_rank}"
        raise refuse(Refusal.RANK_ABOVE_MAX, message, adapter=adapter)
    for letter, given, wanted in (
        ("A", tuple(lora.lora_a.shape), factors.a_shapes(rank)),
        ("B", tuple(lora.lora_b.shape), factors.b_shapes(rank)),
    ):
        if not any(_same(given, shape) for shape in wanted):
            message = (
                f"`{name}.lora_{letter}` is {list(given)}; at the config's rank {rank} the layer "
                f"takes {_shown(wanted[0])}"
            )
            raise refuse(Refusal.SHAPE_MISMATCH, message, adapter=adapter)


def _check_experts(manager: Any, model: Any, adapter: str) -> None:
    """Whether all experts of a layer are adapted, in all projections, or none: vLLM needs that."""
    for name, layer in manager.modules.items():
        if not _has_experts(layer.punica_wrapper):
            continue
        parts = list(expected_experts(manager, model, name, layer))
        own = [part for part, _ in parts]
        if len(own) > 2:
            own = manager._restrict_to_local_experts(name, own)
        absent = [part for part in own if manager._get_lora_layer_weights(model, part) is None]
        if absent and len(absent) < len(own):
            message = f"vLLM takes all experts of a layer or none; missing: {listed(absent)}"
            raise refuse(Refusal.INCOMPLETE_EXPERTS, message, adapter=adapter)


def _check_copies(manager: Any, model: Any, adapter: str, elsewhere: tuple[str, ...]) -> None:
    """Whether the vocabulary matrices that PEFT puts beside their factors are those of the base."""
    changed = []
    for name, copied in model.__dict__.pop("lorafold_copies", {}).items():
        if f"{name}.".startswith(elsewhere):
            continue
        layer: Any = dict(manager.model.named_modules()).get(name)
        layer = getattr(layer, "base_layer", layer)
        own, place = getattr(layer, "weight", None), getattr(layer, "shard_indices", None)
        if own is None or place is None or own.shape[1:] != copied.shape[1:]:
            changed.append(name)
            continue
        first, end = place.org_vocab_start_index, place.org_vocab_end_index
        part = copied[first:end].to(own.dtype)
        fits = copied.shape[0] == layer.org_vocab_size
        if not fits or not part.equal(own[: end - first].to(part.device)):
            changed.append(name)
    if changed:
        message = (
            f"vLLM would leave out new weights of the base's {listed(changed)}; hint: merge them "
            "into the base model"
        )
        raise refuse(Refusal.BASE_WEIGHTS, message, adapter=adapter)


def _same(given: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(given) == len(wanted) and all(
        w in (None, g) for g, w in zip(given, wanted, strict=True)
    )


def _shown(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"


def _on_other_ranks(manager: Any) -> Iterator[str]:
    """Prefixes of layers that pipeline parallelism has put on other ranks."""
    for name, module in manager.model.named_modules():
        if type(module).__name__ == "PPMissingLayer":
            yield f"{name}."
