"""Writes an adapter as PEFT does today: a config and one safetensors file.

The folder appears whole or not at all, and only after it was read back and found equal.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lorafold.adapter import (
    Adapter,
    ExpertLora,
    ExpertShape,
    ExpertWeights,
    LoraWeights,
    TargetShape,
)
from lorafold.errors import LoraError
from lorafold.peft import load_adapter
from lorafold.peft.layouts import fold
from lorafold.peft.scale import round_scale

__all__ = ["alpha_of", "write_peft"]

_PREFIX = "base_model.model."
# The first PEFT that wrote expert factors as they are written here: it decides where shapes do not.
_EXPERTS_VERSION = "0.19.1"

Weights = LoraWeights | ExpertWeights


def alpha_of(weights: Weights, *, use_rslora: bool = False) -> float:
    """The alpha that gives exactly this scale at this rank: a whole number where one does.

    Args:
        weights: of one target.
        use_rslora: whether alpha is divided by sqrt(rank) instead of rank.

    Example:
        >>> a, b = torch.ones(3, 8, dtype=torch.bfloat16), torch.ones(8, 3, dtype=torch.bfloat16)
        >>> alpha_of(LoraWeights(a, b, scale=round_scale(4 / 3)))
        4
    """
    divisor = math.sqrt(weights.rank) if use_rslora else weights.rank
    # Divided by the rank, a float64 gives the scale back: it holds 24 bits times a rank.
    exact = weights.scale * divisor
    whole = round(exact)
    return whole if round_scale(whole / divisor) == weights.scale else exact


def write_peft(
    adapter: Adapter,
    folder: Path,
    shapes: Mapping[str, TargetShape | ExpertShape],
    *,
    parameters: Collection[str] = (),
) -> None:
    """Write an adapter; its experts as PEFT 0.19.1 and later store them.

    There gate and up of an expert share one A, whose rank is the sum of theirs where they came
    apart, and B is block-diagonal: the same delta, rounded elsewhere.

    Args:
        adapter: what to write; its factors are bfloat16 and stay so.
        folder: where; it must not exist, or be empty, and is not the current one.
        shapes: the shapes of its targets.
        parameters: targets that PEFT takes for parameters instead of layers, as it does routers.

    Raises:
        LoraError: if the folder is in use or cannot be written, or what was written does not read
            back as the same adapter.
    """
    try:
        whole = folder.resolve()
        if whole == Path.cwd():
            raise LoraError(f"`{folder}` is the current folder; hint: name a new folder")
        if whole.exists() and (not whole.is_dir() or any(whole.iterdir())):
            raise LoraError(f"`{folder}` exists and is not empty; hint: name a new folder")
        whole.parent.mkdir(parents=True, exist_ok=True)
        # On the same file system, so that moving is one step.
        with TemporaryDirectory(dir=whole.parent, prefix=f".{whole.name}.") as place:
            partial = Path(place) / whole.name
            partial.mkdir()
            _write(adapter, partial, shapes, parameters)
            _check_equal(adapter, partial, shapes)
            partial.replace(whole)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise LoraError(f"`{folder}` cannot be written: {error}") from error


def _parts(module: str, lora: ExpertLora) -> Iterator[tuple[str, str, ExpertWeights]]:
    """(parameter, module in the file, factors) of what is adapted in one experts module."""
    inner = f"{module}.base_layer" if lora.down is not None else module
    if lora.gate_up is not None:
        yield f"{module}.gate_up_proj", inner, lora.gate_up
    if lora.down is not None:
        yield f"{module}.down_proj", module, lora.down


def _write(
    adapter: Adapter,
    folder: Path,
    shapes: Mapping[str, TargetShape | ExpertShape],
    parameters: Collection[str],
) -> None:
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    settings: dict[str, Weights] = {}
    for target, weights in adapter.weights.items():
        shape = shapes[target]
        is_embedding = isinstance(shape, TargetShape) and shape.is_embedding
        for letter, factor in (("A", weights.a), ("B", weights.b)):
            leaf = f"lora_embedding_{letter}" if is_embedding else f"lora_{letter}.weight"
            tensors[f"{_PREFIX}{target}.{leaf}"] = factor
        if target in parameters:
            settings[f"{target}.weight"] = weights
        else:
            settings[target] = weights
            modules.append(target)
    for target, lora in adapter.experts.items():
        for parameter, module, part in _parts(target, lora):
            a, b = fold(part.a, part.b)
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = a
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = b
            settings[parameter] = part
    # Factors may share memory, which a file of tensors does not allow.
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(copies, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = _config(adapter, settings, modules)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")


def _config(
    adapter: Adapter, all_weights: Mapping[str, Weights], modules: list[str]
) -> dict[str, Any]:
    """The most common rank and alpha, and patterns for the targets that have others.

    Args:
        adapter: says what it was trained on.
        all_weights: per module or parameter, its factors.
        modules: those that are modules.
    """
    # rsLoRA only where it is what was meant: whole alphas with it, and none without.
    use_rslora = any(not isinstance(alpha_of(w), int) for w in all_weights.values()) and all(
        isinstance(alpha_of(w, use_rslora=True), int) for w in all_weights.values()
    )
    settings = {
        path: (w.rank, alpha_of(w, use_rslora=use_rslora)) for path, w in all_weights.items()
    }
    (rank, alpha), _ = Counter(settings.values()).most_common(1)[0]
    parameters = sorted(settings.keys() - set(modules))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_model,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "rank_pattern": {path: r for path, (r, _) in settings.items() if r != rank},
        "alpha_pattern": {path: a for path, (_, a) in settings.items() if a != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": use_rslora,
    } | ({"target_parameters": parameters, "peft_version": _EXPERTS_VERSION} if parameters else {})


def _check_equal(
    adapter: Adapter, folder: Path, shapes: Mapping[str, TargetShape | ExpertShape]
) -> None:
    """Read the folder back: the same targets, factors and scales, in every bit."""
    own = {path: shapes[path] for path in (*adapter.weights, *adapter.experts)}
    found = load_adapter(folder, own, name=adapter.name, allow_inert=True)
    written, read = _factors(adapter), _factors(found)
    differing = [
        path for path in written | read if not _are_equal(written.get(path), read.get(path))
    ]
    if differing:
        message = f"`{differing[0]}` does not read back as it was written to `{folder}`"
        raise LoraError(message)


def _factors(adapter: Adapter) -> dict[str, Weights]:
    """Per module or parameter, its factors."""
    parts = [part for path, lora in adapter.experts.items() for part in _parts(path, lora)]
    return {**adapter.weights, **{parameter: weights for parameter, _, weights in parts}}


def _are_equal(one: Weights | None, other: Weights | None) -> bool:
    if one is None or other is None or one.scale != other.scale:
        return False
    pairs = ((one.a, other.a), (one.b, other.b))
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs)
