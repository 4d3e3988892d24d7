"""Run a model on a few tokens, and see which of its layers can be targets.

What can be a target is not guessed from classes: a layer qualifies if a forward calls it once, with
one row per token, also when decoding with a filled KV cache. So a layer whose weight is read around
its `forward`, that sees a selection of the rows, or that is applied to the whole cache at every
step, is never wrapped by mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lorafold.errors import ModelError
from lorafold.layers.embedding import plain_lookup

__all__ = [
    "PROBE_TOKENS",
    "features",
    "is_embedding",
    "probe",
    "probe_decoding",
    "run_probe",
    "why_unfit",
]

PROBE_TOKENS = 6  # a layer of gathered rows sees another number
_NUM_SEQUENCES = 2


def features(module: nn.Module) -> tuple[int, int] | None:
    """Input and output features of a linear layer or an embedding; None for other modules.

    All linear layers, quantised ones too, say `in_features`; GPT-2's `Conv1D`, a linear layer
    with its weight transposed, says `nx`.

    Example:
        >>> features(nn.Linear(4, 2)), features(nn.Embedding(9, 4)), features(nn.ReLU())
        ((4, 2), (9, 4), None)
    """
    sizes = (("in_features", "out_features"), ("nx", "nf"), ("num_embeddings", "embedding_dim"))
    for names in sizes:
        k_in, n_out = (getattr(module, name, None) for name in names)
        if isinstance(k_in, int) and isinstance(n_out, int):
            return k_in, n_out
    return None


def is_embedding(module: nn.Module) -> bool:
    """Whether a layer looks tokens up instead of multiplying by its input.

    Example:
        >>> is_embedding(nn.Embedding(9, 4)), is_embedding(nn.Linear(4, 2))
        (True, False)
    """
    return isinstance(module, nn.Embedding)


def probe(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, list[tuple[Any, Any]]]:
    """Run the model on a few tokens; what each call of a layer was given, and gave.

    Args:
        model: a causal language model of transformers.
        layers: some of its modules, by path.

    Returns:
        Per path and call (input, output); None for an input that is not one positional argument.

    Raises:
        ModelError: if the model cannot run on plain tokens.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> model = LlamaForCausalLM(config)
        >>> [(x, y)] = probe(model, {"lm_head": model.lm_head})["lm_head"]
        >>> x.shape, y.shape
        (torch.Size([2, 3, 16]), torch.Size([2, 3, 8]))
    """
    calls: dict[str, list[tuple[Any, Any]]] = {path: [] for path in layers}

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Any, out: Any) -> None:
            calls[path].append((args[0] if len(args) == 1 and not kwargs else None, out))

        return hook

    with ExitStack() as stack:
        for path, module in layers.items():
            stack.callback(module.register_forward_hook(watch(path), with_kwargs=True).remove)
        run_probe(model)
    return calls


def probe_decoding(
    model: nn.Module, layers: Mapping[str, nn.Module], unfit: Mapping[str, str]
) -> dict[str, str]:
    """Generate two tokens; why layers that see other rows than the tokens cannot be targets.

    Args:
        model: a causal language model of transformers.
        layers: some of its modules, by path.
        unfit: those that need not be looked at.

    Returns:
        Per path the reason; nothing for a layer with one row per token.

    Raises:
        ModelError: if the model cannot generate.

    Example: `lorafold.layers.attach.find_targets` asks this of every layer.
    """
    reasons: dict[str, str] = {}
    num_rows = 0

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_rows
        ids = kwargs.get("input_ids", args[0] if args else None)
        num_rows = ids.numel() if isinstance(ids, Tensor) else 0

    def watch(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            width = 1 if is_embedding(module) else args[0].shape[-1]
            if num_rows and args[0].numel() != num_rows * width:
                reasons[path] = (
                    f"decoding applies it to {args[0].numel() // width} rows where "
                    f"{num_rows} tokens are"
                )

        return hook

    if not callable(getattr(model, "generate", None)):
        return reasons
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(count, with_kwargs=True).remove)
        for path, module in layers.items():
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


def why_unfit(module: nn.Module, calls: Sequence[tuple[Any, Any]]) -> str | None:
    """Why a layer that was called so cannot be a target, or None if it can.

    Args:
        module: a linear layer or an embedding.
        calls: what `probe` saw of it.

    Example:
        >>> why_unfit(nn.Linear(4, 2), [])
        'one forward calls it 0 times'
    """
    if len(calls) != 1:
        return f"one forward calls it {len(calls)} times"
    if is_embedding(module):
        return _why_no_lookup(module, *calls[0])
    num_rows = PROBE_TOKENS
    dtypes = []
    for tensor, width in zip(calls[0], features(module) or (), strict=True):
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


def _why_no_lookup(embedding: nn.Module, ids: Any, out: Any) -> str | None:
    """Why an embedding that was given `ids` and gave `out` cannot be a target."""
    if not isinstance(ids, Tensor) or ids.numel() != PROBE_TOKENS or ids.is_floating_point():
        shape = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        return f"it takes {shape} where {PROBE_TOKENS} tokens are"
    if not isinstance(out, Tensor) or out.dtype != torch.bfloat16:
        kind = out.dtype if isinstance(out, Tensor) else type(out).__name__
        return f"it gives {kind}, and only bfloat16 is supported"
    with torch.no_grad():
        if not torch.equal(plain_lookup(embedding, ids), out):
            return "it gives something else than the rows of its weight"
    return None
