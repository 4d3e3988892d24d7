"""Find the linear layers of a model that can be targets, and swap them for routed ones and back.

What can be a target is not guessed from classes: the model is run on a few tokens, and a layer
qualifies if a forward calls it once, with one row per token, also when decoding with a filled KV
cache. So a layer whose weight is read around its `forward`, that sees a selection of the rows, or
that is applied to the whole cache at every step, is never wrapped by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lorafold.errors import ModelError
from lorafold.layers.linear import RoutedLinear, SharedInput
from lorafold.layers.routing import Routing
from lorafold.layers.stand_in import StandIn
from lorafold.route import LoraRoute

__all__ = [
    "PROBE_TOKENS",
    "TargetLayer",
    "find_targets",
    "run_probe",
    "unwrap_targets",
    "wrap_targets",
]

PROBE_TOKENS = 6  # a layer of gathered rows sees another number
_NUM_SEQUENCES = 2


@dataclass(frozen=True)
class TargetLayer:
    """A linear layer that an adapter may change.

    Args:
        module: the layer.
        in_features: width of its input.
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


def find_targets(
    model: nn.Module, targets: Sequence[str] | str | None = None
) -> dict[str, TargetLayer]:
    """The layers to wrap, by path. Runs the model on a few tokens and changes nothing.

    Args:
        model: a causal language model of transformers, in bfloat16, on one device.
        targets: None or "all-linear" for every layer that can be a target except the output head;
            a list of words, each a path or its end (`q_proj`); or one regular expression that
            matches whole paths. These are PEFT's rules.

    Returns:
        path -> layer, in the model's order.

    Raises:
        ModelError: if the model cannot be attached to, a word names no linear layer, a named layer
            cannot be a target, or there is none.

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
    linears = {path: m for path, m in model.named_modules() if _features(m)}
    calls = _probe(model, linears)
    unfit = {path: why for path, m in linears.items() if (why := _why_unfit(m, calls[path]))}
    head = _output_head(model)
    unfit |= _probe_decoding(model, {p: m for p, m in linears.items() if m is not head}, unfit)
    if targets is None or targets == "all-linear":
        chosen = [path for path, m in linears.items() if path not in unfit and m is not head]
        refused = [] if chosen else list(unfit)
    else:
        chosen = _named(model, linears, targets)
        refused = [path for path in chosen if path in unfit]
    if refused:
        listed = "".join(f"\n  `{path}`: {unfit[path]}" for path in refused[:8])
        raise ModelError(f"{len(refused)} layers cannot be targets, the first of them:{listed}")
    if not chosen:
        raise ModelError(f"{type(model).__name__} has no linear layer that could be a target")

    found = {}
    for path in chosen:
        module, ((x, _),) = linears[path], calls[path]
        k_in, n_out = _features(module) or (0, 0)
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
    """Put a `RoutedLinear` in the place of each of `layers`, which `find_targets` returned.

    Layers of one parent that were given the same tensor share their operator calls.

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
        if isinstance(module, (RoutedLinear, StandIn)):
            _replace(model, path, module.base)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a linear layer; None for other modules.

    All linear layers, quantised ones too, say `in_features`; GPT-2's `Conv1D`, a linear layer
    with its weight transposed, says `nx`.
    """
    for names in (("in_features", "out_features"), ("nx", "nf")):
        k_in, n_out = (getattr(module, name, None) for name in names)
        if isinstance(k_in, int) and isinstance(n_out, int):
            return k_in, n_out
    return None


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
        if isinstance(module, RoutedLinear):
            raise ModelError(f"the model is attached to already (`{path}`); call `detach` first")
        if hasattr(module, "base_layer"):
            raise ModelError(
                f"the model carries PEFT layers (`{path}`); give the plain model, for instance "
                "`peft_model.unload()`"
            )


def _named(
    model: nn.Module, linears: Mapping[str, nn.Module], targets: Sequence[str] | str
) -> list[str]:
    """The paths of `linears` that the words, or the regular expression, name."""
    endings = ", ".join(sorted({path.rpartition(".")[2] for path in linears}))
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ModelError(f"{targets!r} is no regular expression: {error}") from error
        chosen = [path for path in linears if pattern.fullmatch(path)]
        if not chosen:
            raise ModelError(
                f"the regular expression {targets!r} matches no whole path of a linear layer; "
                f"plain words go in a list; linear layers here end in: {endings}"
            )
        return chosen

    def names(word: str, path: str) -> bool:
        return path == word or path.endswith(f".{word}")

    for word in targets:
        if any(names(word, path) for path in linears):
            continue
        others = {type(m).__name__ for path, m in model.named_modules() if names(word, path)}
        what = f"not linear but {' or '.join(sorted(others))}" if others else "not in the model"
        raise ModelError(f"target `{word}` is {what}; linear layers here end in: {endings}")
    return [path for path in linears if any(names(word, path) for word in targets)]


def _probe(model: nn.Module, linears: Mapping[str, nn.Module]) -> dict[str, list[tuple[Any, Any]]]:
    """Run the model on a few tokens; what each call of a linear layer was given, and gave."""
    calls: dict[str, list[tuple[Any, Any]]] = {path: [] for path in linears}

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
            calls[path].append((args[0] if len(args) == 1 and not kwargs else None, out))

        return hook

    with ExitStack() as stack:
        for path, module in linears.items():
            stack.callback(module.register_forward_hook(watch(path), with_kwargs=True).remove)
        run_probe(model)
    return calls


def _probe_decoding(
    model: nn.Module, linears: Mapping[str, nn.Module], unfit: Mapping[str, str]
) -> dict[str, str]:
    """Generate two tokens; why layers that see other rows than the tokens cannot be targets."""
    reasons: dict[str, str] = {}
    num_rows = 0

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_rows
        ids = kwargs.get("input_ids", args[0] if args else None)
        num_rows = ids.numel() if isinstance(ids, Tensor) else 0

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            if num_rows and args[0].numel() != num_rows * args[0].shape[-1]:
                reasons[path] = (
                    f"decoding applies it to {args[0].numel() // args[0].shape[-1]} rows where "
                    f"{num_rows} tokens are"
                )

        return hook

    if not callable(getattr(model, "generate", None)):
        return reasons
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(count, with_kwargs=True).remove)
        for path, module in linears.items():
            if path not in unfit:
                stack.callback(module.register_forward_hook(watch(path)).remove)
        run_probe(model, decode=True)
    return reasons


def run_probe(model: nn.Module, *, decode: bool = False) -> None:
    """Run the model on `PROBE_TOKENS` tokens, for hooks to see; it leaves no trace.

    Args:
        model: a causal language model of transformers.
        decode: generate two tokens after them.

    Raises:
        ModelError: if that is not possible.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if embedding is None:
        raise ModelError(f"{type(model).__name__} is not a causal language model of transformers")
    weight = embedding.weight
    # Tokens differ, so that not all of them take the same way through a mixture of experts.
    ids = torch.arange(PROBE_TOKENS, device=weight.device) % weight.shape[0]
    ids = ids.view(_NUM_SEQUENCES, -1)
    gpus = [weight.device] if weight.device.type == "cuda" else []
    # A model in training mode draws its dropout; the caller's random numbers stay as they were.
    with torch.no_grad(), torch.random.fork_rng(gpus):
        try:
            if decode:
                model.generate(  # type: ignore[operator]
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=2,
                    max_new_tokens=2,
                    pad_token_id=0,
                )
            else:
                model(input_ids=ids, attention_mask=torch.ones_like(ids))
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot run on plain tokens, which attaching needs: {error}"
            ) from error


def _why_unfit(module: nn.Module, calls: Sequence[tuple[Any, Any]]) -> str | None:
    """Why a layer that was called so cannot be a target, or None if it can."""
    if len(calls) != 1:
        return f"one forward calls it {len(calls)} times"
    num_rows = PROBE_TOKENS
    dtypes = []
    for tensor, width in zip(calls[0], _features(module) or (), strict=True):
        if not isinstance(tensor, Tensor):
            return f"it takes or gives something else than one tensor: {type(tensor).__name__}"
        if tensor.shape[-1] != width or tensor.numel() != num_rows * width:
            return f"it takes or gives {tuple(tensor.shape)} where {num_rows} tokens are"
        dtypes.append(tensor.dtype)
    if set(dtypes) != {torch.bfloat16}:
        return (
            f"it maps {' to '.join(map(str, dtypes))}, and only bfloat16 is supported; "
            "hint: load the model with `dtype=torch.bfloat16`, or `model.to(torch.bfloat16)`"
        )
    return None
