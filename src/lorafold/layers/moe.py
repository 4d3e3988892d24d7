"""Find the routed experts and the routers of a model, and put routed ones in their places.

As for linear layers (`attach`), nothing is taken on trust: the model is run on a few tokens, and an
experts module qualifies if that forward called it once and `run_experts` gives what it gave. So
experts that are quantised, passed by by a kernel, or built in a way that is not followed, are
refused instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lorafold.adapter import ExpertShape, TargetShape
from lorafold.errors import ModelError
from lorafold.layers.experts import ExpertPlans, RoutedExperts, run_experts
from lorafold.layers.probe import PROBE_TOKENS, run_probe
from lorafold.layers.router import RoutedRouter, WeightProduct
from lorafold.layers.routing import Routing
from lorafold.pool import Pool

__all__ = ["MoeTargets", "find_moe", "wrap_moe"]

_FLAGS = ("is_transposed", "is_concatenated", "has_bias", "has_gate")
# Relative, between two orders of the same bf16 sums; what differs otherwise is > 1.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class MoeTargets:
    """What adapters may change in the mixtures of experts of a model.

    Args:
        experts: per experts module, its shape.
        routers: per router, its shape.

    Example:
        >>> MoeTargets().experts
        {}
    """

    experts: Mapping[str, ExpertShape] = field(default_factory=dict)
    routers: Mapping[str, TargetShape] = field(default_factory=dict)


@dataclass(frozen=True)
class _Call:
    """One call of a module: copies of what it was given, and what it gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


def find_moe(model: nn.Module, device: torch.device, *, with_experts: bool = True) -> MoeTargets:
    """The experts modules and the routers of a model. Runs it once and changes nothing.

    A router that does not multiply just once by its weight, one row per token, is left out; one
    that is a linear layer is for `find_targets`.

    Args:
        model: a causal language model of transformers, in bfloat16.
        device: where the other targets are.
        with_experts: False looks for routers only.

    Raises:
        ModelError: if there are no experts, or some cannot be targets.

    Example:
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> config = Qwen3MoeConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     moe_intermediate_size=8,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     num_key_value_heads=1,
        ...     head_dim=8,
        ...     num_experts=4,
        ...     num_experts_per_tok=2,
        ... )
        >>> found = find_moe(Qwen3MoeForCausalLM(config).bfloat16(), torch.device("cpu"))
        >>> list(found.experts), list(found.routers)
        (['model.layers.0.mlp.experts'], ['model.layers.0.mlp.gate'])
    """
    experts: dict[str, Any] = {path: m for path, m in model.named_modules() if _is_experts(m)}
    if not experts:
        raise ModelError(
            f"{type(model).__name__} has no routed experts; hint: leave out max_expert_rank; are "
            "the adapters of another model?"
        )
    routers = _routers(model, experts)
    calls = _probe(model, {**experts, **routers})
    unfit = {
        path: why
        for path, module in experts.items()
        if with_experts and (why := _why_unfit(module, calls[path], device))
    }
    if unfit:
        listed = "".join(f"\n  `{path}`: {why}" for path, why in list(unfit.items())[:8])
        raise ModelError(
            f"the experts of {len(unfit)} layers cannot be targets, the first of them:{listed}"
        )
    return MoeTargets(
        {path: _expert_shape(m) for path, m in experts.items()} if with_experts else {},
        {
            path: TargetShape(*reversed(module.weight.shape))
            for path, module in routers.items()
            if _can_be_routed(module, calls[path], device)
        },
    )


def wrap_moe(model: nn.Module, targets: MoeTargets, pool: Pool, routing: Routing) -> None:
    """Put a routed module in the place of each of the targets, which `find_moe` returned.

    `unwrap_targets` undoes it.

    Args:
        model: the model that they are in; changed in place.
        targets: what to wrap.
        pool: has routes for all of it.
        routing: shared by the whole model.

    Example:
        >>> pool = Pool({"lm_head": TargetShape(8, 8)}, max_loras=1, max_rank=1)
        >>> model = nn.Sequential(nn.Linear(8, 8))
        >>> wrap_moe(model, MoeTargets(), pool, Routing(pool.device, 1))  # nothing to wrap
        >>> model
        Sequential(
          (0): Linear(in_features=8, out_features=8, bias=True)
        )
    """
    plans = ExpertPlans()
    for path in targets.routers:
        router = RoutedRouter(model.get_submodule(path), pool.route(path), routing, name=path)
        model.set_submodule(path, router)
    for path in targets.experts:
        assert pool.experts is not None
        routes = pool.experts.routes(path)
        experts = RoutedExperts(model.get_submodule(path), routes, routing, plans, name=path)
        model.set_submodule(path, experts)


def _is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of all experts of a layer, in whatever form."""
    down = getattr(module, "down_proj", None)
    stacked = isinstance(down, Tensor) and down.dim() >= 3
    return stacked or type(module).__name__.endswith("Experts")


def _routers(model: nn.Module, experts: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside the experts and has a weight of their number of rows."""
    return {
        f"{block}.{name}" if block else name: child
        for block, module in ((path.rpartition(".")[0], m) for path, m in experts.items())
        for name, child in model.get_submodule(block).named_children()
        if _is_router(child, getattr(module, "num_experts", 0))
    }


def _is_router(module: nn.Module, num_experts: int) -> bool:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return False
    return weight.shape[0] == num_experts and not hasattr(module, "in_features")


def _probe(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, list[_Call]]:
    calls: dict[str, list[_Call]] = {path: [] for path in modules}
    with ExitStack() as stack:
        for path, module in modules.items():

            def hook(
                module: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                out: Any,
                seen: list[_Call] = calls[path],
            ) -> None:
                copies = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
                seen.append(_Call(copies, kwargs, out))

            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        run_probe(model)
    return calls


def _expert_shape(module: Any) -> ExpertShape:
    num_experts, *features = module.down_proj.shape
    inner, hidden = features if module.is_transposed else reversed(features)
    return ExpertShape(
        num_experts,
        hidden,
        inner,
        transposed=module.is_transposed,
        interleaved=not module.is_concatenated,
    )


def _why_unfit(module: Any, calls: Sequence[_Call], device: torch.device) -> str | None:
    """Why an experts module that was called so cannot be a target, or None if it can."""
    if not all(isinstance(getattr(module, flag, None), bool) for flag in _FLAGS):
        return f"{type(module).__name__} does not say how it stores its weights; is it quantised?"
    if not module.has_gate:
        return f"{type(module).__name__} has no gate"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over several devices"
    if len(calls) != 1:
        return f"one forward calls it {len(calls)} times; a kernel may replace the block around it"
    (call,) = calls
    if call.kwargs or len(call.args) != 3:
        return "it takes something else than hidden states, experts and weights"
    hidden, index, _ = call.args
    if hidden.dim() != 2 or hidden.shape[0] != PROBE_TOKENS or index.dim() != 2:
        return f"it takes {tuple(hidden.shape)} where {PROBE_TOKENS} tokens are"
    weights = (module.gate_up_proj, module.down_proj)
    dtypes = {hidden.dtype, *(weight.dtype for weight in weights)}
    if dtypes != {torch.bfloat16}:
        return f"its inputs and weights are {', '.join(map(str, dtypes))}, not bfloat16"
    if {hidden.device, *(weight.device for weight in weights)} != {device}:
        return f"it is not on {device}, where the other targets are"
    return _why_other(module, call)


def _why_other(module: Any, call: _Call) -> str | None:
    """Why `run_experts` does not compute what a module computed, or None if it does."""
    try:
        with torch.no_grad():
            ours = run_experts(module, *call.args)
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"{type(module).__name__} is built in a way that is not followed: {error}"
    if ours.shape != call.out.shape or ours.dtype != call.out.dtype:
        return f"it gives {tuple(call.out.shape)} {call.out.dtype}"
    apart = float((ours.double() - call.out.double()).norm())
    if not apart <= _TOLERANCE * float(call.out.double().norm()):
        return (
            f"{type(module).__name__} computes something else than gate and up, activation, down: "
            f"the results differ by {apart:.3g}"
        )
    return None


def _can_be_routed(module: Any, calls: Sequence[_Call], device: torch.device) -> bool:
    """Whether a router that was called so multiplies just once by its weight, one row per token."""
    if len(calls) != 1:
        return False
    (call,) = calls
    products: list[tuple[Tensor, Tensor]] = []

    def see(x: Tensor, product: Tensor) -> Tensor:
        products.append((x, product))
        return product

    with torch.no_grad(), WeightProduct(module.weight, see):
        module(*call.args, **call.kwargs)
    if len(products) != 1:
        return False
    ((x, logits),) = products
    num_experts, k_in = module.weight.shape
    return (
        x.shape[-1] == k_in
        and x.numel() == PROBE_TOKENS * k_in
        and logits.numel() == PROBE_TOKENS * num_experts
        and logits.dtype in (torch.bfloat16, torch.float32)
        and logits.device == device
        # What is not exact in bfloat16 would be rounded for the delta only.
        and torch.equal(x.bfloat16().to(x.dtype), x)
    )
