"""The shapes of a model's targets, from its config alone: no weight is allocated or read."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.errors import BackendError, ModelError
from lorafold.layers.probe import features, is_embedding

__all__ = ["ModelShapes", "base_tensors", "read_shapes"]


_ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class ModelShapes:
    """What of a model can be a target.

    Args:
        name: the class of the model.
        linears: per path, the linear layers, the output head among them.
        embeddings: per path, the embedding of the input tokens.
        experts: per path, the modules of routed experts.
        routers: per path, the routers that are no linear layers.
        head: the path of the output head, "" where there is none.
        is_tied: whether the head's weight is the embedding's.
    """

    name: str
    linears: dict[str, TargetShape]
    embeddings: dict[str, TargetShape]
    experts: dict[str, ExpertShape]
    routers: dict[str, TargetShape]
    head: str
    is_tied: bool

    @property
    def targets(self) -> dict[str, TargetShape | ExpertShape]:
        """Everything that an adapter may be bound to."""
        return {**self.linears, **self.embeddings, **self.routers, **self.experts}

    def chosen(self, words: Sequence[str]) -> dict[str, TargetShape]:
        """The linear layers and embeddings that the words name, each a path or its end.

        "all-linear", or no word, names every linear layer but the output head.

        Raises:
            ModelError: if a word names neither a linear layer nor the embedding.
        """
        default = {path for path in self.linears if path != self.head}
        layers = {**self.linears, **self.embeddings}
        for word in words:
            if word != _ALL_LINEAR and not any(_names(word, path) for path in layers):
                endings = sorted({path.rpartition(".")[2] for path in layers})
                raise ModelError(
                    f"target `{word}` is no linear layer of {self.name} and not its embedding; "
                    f"they end in: {', '.join(endings)}"
                )
        also = default if not words or _ALL_LINEAR in words else ()
        return {
            path: shape
            for path, shape in layers.items()
            if path in also or any(_names(word, path) for word in words)
        }


def _names(word: str, path: str) -> bool:
    return path == word or path.endswith(f".{word}")


def read_shapes(model: str | Path) -> ModelShapes:
    """Build a causal language model without memory, and look at its layers.

    Args:
        model: a folder with `config.json`, or a name on the Hugging Face hub.

    Raises:
        BackendError: if transformers is not installed.
        ModelError: if there is no config of a causal language model.
    """
    if importlib.util.find_spec("transformers") is None:
        raise BackendError(
            "configs are read by transformers, which is not installed\n"
            "hint: pip install 'lorafold[transformers]'"
        )
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model)
        with torch.device("meta"):
            built: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (OSError, ValueError) as error:
        raise ModelError(f"no causal language model at {str(model)!r}: {error}") from error
    modules = dict(built.named_modules())
    head, embedding = built.get_output_embeddings(), built.get_input_embeddings()
    experts = {path: shape for path, m in modules.items() if (shape := _experts(m))}
    return ModelShapes(
        name=type(built).__name__,
        linears={path: linear for path, m in modules.items() if (linear := _linear(m))},
        embeddings={
            path: TargetShape(m.num_embeddings, m.embedding_dim, is_embedding=True)
            for path, m in modules.items()
            if m is embedding and isinstance(m, nn.Embedding)
        },
        experts=experts,
        routers=_routers(modules, experts),
        head=next((path for path, m in modules.items() if m is head), ""),
        is_tied=bool(config.get_text_config().tie_word_embeddings),
    )


def _linear(module: nn.Module) -> TargetShape | None:
    sizes = None if is_embedding(module) else features(module)
    return None if sizes is None else TargetShape(*sizes)


def _experts(module: nn.Module) -> ExpertShape | None:
    """Modules that hold all experts of a layer in two 3-D parameters."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter)):
        return None
    if gate_up.dim() != 3 or down.dim() != 3:
        return None
    transposed = bool(getattr(module, "is_transposed", False))
    inner, hidden = down.shape[1:] if transposed else (down.shape[2], down.shape[1])
    return ExpertShape(
        num_experts=int(down.shape[0]),
        hidden=int(hidden),
        inner=int(inner),
        transposed=transposed,
        interleaved=not getattr(module, "is_concatenated", True),
    )


def _routers(
    modules: Mapping[str, nn.Module], experts: Mapping[str, ExpertShape]
) -> dict[str, TargetShape]:
    """The modules beside the experts of a layer that have one row of weights per expert."""
    found: dict[str, TargetShape] = {}
    for path, shape in experts.items():
        block = path.rpartition(".")[0]
        for name, module in modules[block].named_children():
            weight = getattr(module, "weight", None)
            if _linear(module) is None and isinstance(weight, nn.Parameter) and weight.dim() == 2:
                n_out, k_in = weight.shape
                if n_out == shape.num_experts:
                    found[f"{block}.{name}"] = TargetShape(int(k_in), int(n_out))
    return found


def base_tensors(model: str | Path, shapes: ModelShapes) -> Callable[[str], Tensor | None]:
    """A function from a module's path to its weight in the model's safetensors files.

    An adapter's copy of the vocabulary is compared with it. The prefixes of the file are those of
    the model or lack its first segment. A tied head is in the file as the embedding only.

    Args:
        model: the folder of the model; elsewhere no weight is found.
        shapes: what `read_shapes` said of it.
    """
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []

    def read(path: str) -> Tensor | None:
        wanted = re.compile(rf"(.*\.)?{re.escape(path)}\.weight")
        found = (_tensor(file, wanted) for file in files)
        weight = next((tensor for tensor in found if tensor is not None), None)
        if weight is None and shapes.is_tied and path == shapes.head:
            return next((read(embedding) for embedding in shapes.embeddings), None)
        return weight

    return read


def _tensor(file: Path, wanted: re.Pattern[str]) -> Tensor | None:
    """The first tensor of a file whose name matches."""
    try:
        with safe_open(file, framework="pt") as tensors:
            name = next((name for name in tensors.keys() if wanted.fullmatch(name)), None)  # noqa: SIM118
            return None if name is None else tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"`{file}` cannot be read: {error}") from error
