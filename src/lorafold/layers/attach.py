"""Find the layers of a model that can be targets, and swap them for routed ones and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lorafold.adapter import TargetShape
from lorafold.errors import ModelError
from lorafold.layers.embedding import RoutedEmbedding
from lorafold.layers.linear import RoutedLinear, SharedInput
from lorafold.layers.probe import features, is_embedding, probe, probe_decoding, why_unfit
from lorafold.layers.routing import Routing
from lorafold.layers.stand_in import StandIn
from lorafold.route import LoraRoute

__all__ = ["TargetLayer", "find_targets", "unwrap_targets", "wrap_targets"]


@dataclass(frozen=True)
class TargetLayer:
    """A linear layer or an embedding that an adapter may change.

    Args:
        module: the layer.
        in_features: width of its input; the number of tokens of an embedding.
        out_features: width of its output.
        device: where its activations are.
        is_head: whether it is the output head (`lm_head`).
        input_id: equal for layers that were given one and the same tensor.

    Example:
        >>> layer = TargetLayer(nn.Linear(4, 2), 4, 2, torch.device("cpu"), False, input_id=0)
        >>> layer.is_head
        False
    """

    module: nn.Module
    in_features: int
    out_features: int
    device: torch.device
    is_head: bool
    input_id: int

    @property
    def shape(self) -> TargetShape:
        """What a pool and a loader need to know."""
        return TargetShape(self.in_features, self.out_features, is_embedding(self.module))


def find_targets(
    model: nn.Module, targets: Sequence[str] | str | None = None
) -> dict[str, TargetLayer]:
    """The layers to wrap, by path. Runs the model on a few tokens and changes nothing.

    Args:
        model: a causal language model of transformers, in bfloat16, on one device.
        targets: None or "all-linear" for every linear layer that can be a target except the output
            head; a list of words, each a path or its end (`q_proj`, `embed_tokens`), or
            "all-linear" for all of those; or one regular expression that matches whole paths.
            But for "all-linear" in a list these are PEFT's rules.

    Returns:
        path -> layer, in the model's order.

    Raises:
        ModelError: if the model cannot be attached to, a word names neither a linear layer nor an
            embedding, a named layer cannot be a target, or there is none.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> list(find_targets(LlamaForCausalLM(config).bfloat16(), ["q_proj", "down_proj"]))
        ['model.layers.0.self_attn.q_proj', 'model.layers.0.mlp.down_proj']
    """
    _check_attachable(model)
    layers = {path: m for path, m in model.named_modules() if features(m)}
    calls = probe(model, layers)
    unfit = {path: why for path, m in layers.items() if (why := why_unfit(m, calls[path]))}
    head = _output_head(model)
    unfit |= probe_decoding(model, {p: m for p, m in layers.items() if m is not head}, unfit)
    linears = {path: m for path, m in layers.items() if m is not head and not is_embedding(m)}
    default = [path for path in linears if path not in unfit]
    if targets is None or targets == "all-linear":
        chosen = default
        refused = [] if chosen else [path for path in linears if path in unfit]
    else:
        chosen = _named(model, layers, targets, default)
        refused = [path for path in chosen if path in unfit]
    if refused:
        listed = "".join(f"\n  `{path}`: {unfit[path]}" for path in refused[:8])
        raise ModelError(f"{len(refused)} layers cannot be targets, the first of them:{listed}")
    if not chosen:
        raise ModelError(f"{type(model).__name__} has no linear layer that could be a target")

    found = {}
    for path in chosen:
        module, ((x, _),) = layers[path], calls[path]
        k_in, n_out = features(module) or (0, 0)
        found[path] = TargetLayer(module, k_in, n_out, x.device, module is head, input_id=id(x))
    if len(devices := {str(layer.device) for layer in found.values()}) > 1:
        raise ModelError(f"all targets must be on one device; given: {', '.join(sorted(devices))}")
    return found


def wrap_targets(
    model: nn.Module,
    layers: Mapping[str, TargetLayer],
    route_of: Callable[[str], LoraRoute],
    routing: Routing,
) -> None:
    """Put a routed layer in the place of each of `layers`, which `find_targets` returned.

    Linear layers of one parent that were given the same tensor share their operator calls.

    Args:
        model: the model that the layers are in; changed in place.
        layers: path -> layer.
        route_of: the route of a path.
        routing: shared by all of them.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lorafold.route import LoraPair
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = LlamaForCausalLM(config).bfloat16()
        >>> a = torch.ones(1, 16, dtype=torch.bfloat16)
        >>> route = LoraRoute.from_pairs([LoraPair(a, a.T.contiguous(), 1.0)])
        >>> routing = Routing(torch.device("cpu"), max_loras=1)
        >>> wrap_targets(model, find_targets(model, ["q_proj"]), lambda path: route, routing)
        >>> type(model.model.layers[0].self_attn.q_proj).__name__
        'RoutedLinear'
        >>> unwrap_targets(model)
        >>> type(model.model.layers[0].self_attn.q_proj).__name__
        'Linear'
    """
    siblings: dict[tuple[str, int], list[RoutedLinear]] = {}
    for path, layer in layers.items():
        if is_embedding(layer.module):
            embedding = RoutedEmbedding(layer.module, route_of(path), routing, name=path)
            _replace(model, path, embedding)
            continue
        routed = RoutedLinear(
            layer.module, route_of(path), routing, name=path, is_head=layer.is_head
        )
        _replace(model, path, routed)
        siblings.setdefault((path.rpartition(".")[0], layer.input_id), []).append(routed)
    for group in siblings.values():
        if len(group) > 1:
            shared = SharedInput(group)
            for routed in group:
                routed.shared = shared


def unwrap_targets(model: nn.Module) -> None:
    """Put every wrapped module back in its place; the model is changed in place.

    Example: see `wrap_targets`.
    """
    for path, module in list(model.named_modules()):
        if isinstance(module, (RoutedLinear, RoutedEmbedding, StandIn)):
            _replace(model, path, module.base)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _output_head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def _check_attachable(model: nn.Module) -> None:
    """Refuse models whose layers are not, or may not stay, what they seem."""
    if hasattr(model, "_orig_mod"):
        raise ModelError("the model is compiled already; attach first, then compile")
    if getattr(model, "_use_kernels", False):
        raise ModelError(
            "the model uses hub kernels, which replace whole blocks and would pass by the targets; "
            "load it with `use_kernels=False`"
        )
    for path, module in model.named_modules():
        if isinstance(module, (RoutedLinear, RoutedEmbedding)):
            raise ModelError(f"the model is attached to already (`{path}`); call `detach` first")
        if hasattr(module, "base_layer"):
            raise ModelError(
                f"the model carries PEFT layers (`{path}`); give the plain model, for instance "
                "`peft_model.unload()`"
            )


def _named(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    targets: Sequence[str] | str,
    default: Sequence[str],
) -> list[str]:
    """The paths of `layers` that the words, or the regular expression, name."""
    endings = ", ".join(sorted({path.rpartition(".")[2] for path in layers}))
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ModelError(f"{targets!r} is no regular expression: {error}") from error
        chosen = [path for path in layers if pattern.fullmatch(path)]
        if not chosen:
            raise ModelError(
                f"the regular expression {targets!r} matches no whole path of a layer; "
                f"plain words go in a list; linear layers and embeddings here end in: {endings}"
            )
        return chosen

    def names(word: str, path: str) -> bool:
        return path == word or path.endswith(f".{word}")

    for word in targets:
        if word == "all-linear" or any(names(word, path) for path in layers):
            continue
        others = {type(m).__name__ for path, m in model.named_modules() if names(word, path)}
        what = f"not linear but {' or '.join(sorted(others))}" if others else "not in the model"
        raise ModelError(
            f"target `{word}` is {what}; linear layers and embeddings here end in: {endings}"
        )
    also = default if "all-linear" in targets else ()
    return [path for path in layers if path in also or any(names(word, path) for word in targets)]
