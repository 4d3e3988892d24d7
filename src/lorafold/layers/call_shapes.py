"""The shapes of the operator calls that a model's routed layers make."""

from __future__ import annotations

from typing import Any

from torch import nn

from lorafold.layers.experts import RoutedExperts
from lorafold.layers.linear import RoutedLinear
from lorafold.layers.router import RoutedRouter
from lorafold.ops.ahead import CallShape
from lorafold.route import Tables

__all__ = ["call_shapes"]


def call_shapes(model: nn.Module) -> set[CallShape]:
    """What `lorafold.ops.warm_up` wants to know of a model: one shape for equal layers.

    Args:
        model: a model that `attach` has changed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lorafold.runtime import attach
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=24,
        ...     num_hidden_layers=2,
        ...     num_attention_heads=2,
        ... )
        >>> lora = attach(LlamaForCausalLM(config).bfloat16(), max_loras=3, max_rank=4)
        >>> sorted((shape.k_in, shape.n_outs) for shape in call_shapes(lora.model))
        [(16, (16,)), (16, (16, 16, 16)), (16, (24, 24)), (24, (16,))]
    """
    found = set()
    for module in model.modules():
        if isinstance(module, RoutedLinear):
            layers = module.shared.layers if module.shared else (module,)
            found.add(_shape([layer.route for layer in layers]))
        elif isinstance(module, RoutedRouter):
            found.add(_shape([module.route]))
        elif isinstance(module, RoutedExperts):
            routes, top_k = module.routes, _top_k(model)
            for route, has_source in ((routes.gate, True), (routes.up, True), (routes.down, False)):
                found.add(_shape([route], rows_per_token=top_k, has_source=has_source))
    return found


def _shape(routes: list[Any], **more: Any) -> CallShape:
    first: Tables = routes[0]
    n_outs = tuple(route.n_out for route in routes)
    return CallShape(first.k_in, n_outs, first.max_rank, first.a_table.shape[0], **more)


def _top_k(model: Any) -> int:
    """Experts that a token chooses."""
    config: Any = model.config.get_text_config()
    return int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "moe_top_k", 8))
