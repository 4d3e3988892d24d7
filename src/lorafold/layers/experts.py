"""Routed experts whose rows name their adapters.

`RoutedExperts` takes the place of an experts module of transformers and computes what that does:
every (token, choice) row through gate and up of its expert, the activation, down, the routing
weights, and a sum over the choices in a fixed order. The deltas of gate and up come in before the
activation, those of down before the routing weights.

What is guaranteed:
- the delta of a row has the contract's bits, whatever else is in the batch;
- the base's part of a row does not depend on the adapters of the batch, though these decide where
  the other rows go (`grouped`); on the CPU it does not depend on the batch at all;
- a row without an adapter has the bits that it has when no row has one.

What is not: the sums of `run_experts` are not those of the model's own implementation, unless that
is "grouped_mm" on CUDA. On CUDA the base's products may sum in another order for another number of
rows in all, as those of every layer of the model.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lorafold.errors import RouteError
from lorafold.expert_pool import ExpertRoutes
from lorafold.layers.grouped import ExpertRows, grouped_linear, sort_by_expert
from lorafold.layers.routing import Routing, Rows
from lorafold.layers.stand_in import StandIn
from lorafold.ops import MoeExpertRoute, Plan, moe_lora_grouped_down, plan_grouped

__all__ = ["Deltas", "ExpertPlans", "RoutedExperts", "run_experts"]


class Deltas(Protocol):
    """What is added to the products of expert-sorted rows.

    Example:
        >>> class Nothing:
        ...     def to_gate_up(self, gate_up: Tensor, rows: ExpertRows) -> Tensor:
        ...         return gate_up
        ...
        ...     def to_down(self, inner: Tensor, out: Tensor, rows: ExpertRows) -> None:
        ...         pass
        >>> nothing: Deltas = Nothing()
    """

    def to_gate_up(self, gate_up: Tensor, rows: ExpertRows) -> Tensor:
        """gate_up [num_rows, 2 * inner], in the order of the base's outputs, with the deltas."""

    def to_down(self, inner: Tensor, out: Tensor, rows: ExpertRows) -> None:
        """Fold the deltas of inner [num_rows, inner] into out [num_rows, hidden], *in place*."""


def run_experts(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    deltas: Deltas | None = None,
) -> Tensor:
    """What an experts module of transformers computes.

    Args:
        module: a module whose class has transformers' `use_experts_implementation`, so that it says
            `is_transposed`, `has_bias` and how it gates.
        hidden_states: [num_tokens, hidden].
        top_k_index: [num_tokens, top_k], the experts of each token.
        top_k_weights: [num_tokens, top_k], their weights.
        deltas: added on the way; None for the base alone.

    Returns:
        [num_tokens, hidden], dtype of hidden_states.

    Example:
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> config = MixtralConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=8,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ...     num_key_value_heads=1,
        ...     num_local_experts=4,
        ... )
        >>> module = MixtralForCausalLM(config).bfloat16().model.layers[0].mlp.experts
        >>> x, index = torch.ones(3, 16).bfloat16(), torch.tensor([[0, 1], [1, 2], [0, 3]])
        >>> weights = torch.full((3, 2), 0.5)
        >>> ours, theirs = run_experts(module, x, index, weights), module(x, index, weights)
        >>> torch.allclose(ours, theirs, atol=1e-2)
        True
    """
    num_tokens, top_k = top_k_index.shape
    rows = sort_by_expert(top_k_index, module.num_experts)
    gate_up = _linear(module, "gate_up_proj", hidden_states[rows.tokens], rows)
    if deltas is not None:
        gate_up = deltas.to_gate_up(gate_up, rows)
    inner: Tensor = module._apply_gate(gate_up)
    out = _linear(module, "down_proj", inner, rows)
    if deltas is not None:
        deltas.to_down(inner, out, rows)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    out = out * top_k_weights.reshape(-1)[rows.order].unsqueeze(1)
    by_choice = torch.empty_like(out)
    by_choice[rows.order] = out
    return by_choice.view(num_tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)


def _linear(module: Any, name: str, x: Tensor, rows: ExpertRows) -> Tensor:
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return grouped_linear(x, getattr(module, name), bias, rows, transposed=module.is_transposed)


class RoutedExperts(StandIn):
    """The routed experts of a layer, plus the deltas of each token's adapter on the token's rows.

    It is for inference: deltas have no gradient.

    Args:
        base: the experts module; its weights are used, its own forward is not.
        routes: the tables over slots and experts of this layer.
        routing: the slots of the current forward's tokens, shared by the whole model.
        plans: shared by all experts of the model.
        name: the path in the model, for messages.

    Example:
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
        >>> from lorafold.runtime import attach
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
        >>> lora = attach(Qwen3MoeForCausalLM(config).bfloat16(), max_expert_rank=2)
        >>> type(lora.model.model.layers[0].mlp.experts).__name__
        'RoutedExperts'
    """

    def __init__(
        self,
        base: nn.Module,
        routes: ExpertRoutes,
        routing: Routing,
        plans: ExpertPlans,
        *,
        name: str = "",
    ) -> None:
        super().__init__(base)
        self.routes = routes
        self.routing = routing
        self.plans = plans
        self.name = name

    def run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `run_experts`.

        Raises:
            RouteError: if there is another number of tokens than the forward has.
        """
        rows, operands = self.routing.rows, (hidden_states, top_k_index, top_k_weights)
        if rows is None:
            return run_experts(self.base, *operands)
        num_tokens = rows.seq_slot.shape[0]
        if hidden_states.shape[0] != num_tokens:
            raise RouteError(
                f"`{self.name}` got {hidden_states.shape[0]} tokens, but this forward has "
                f"{num_tokens}; call the whole model, with one adapter per sequence"
            )
        return run_experts(self.base, *operands, _RoutedDeltas(self, hidden_states, rows))

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        down = self.routes.down
        return f"max_loras={down.max_loras}, max_rank={down.max_rank}"


class _RoutedDeltas:
    """The deltas of one call of `RoutedExperts`."""

    def __init__(self, layer: RoutedExperts, hidden_states: Tensor, rows: Rows) -> None:
        self.layer = layer
        self.hidden_states = hidden_states
        self.slots = rows
        self.plan: Plan | None = None

    def to_gate_up(self, gate_up: Tensor, rows: ExpertRows) -> Tensor:
        num_rows, width = gate_up.shape
        routes, inner = self.layer.routes, width // 2
        if self.layer.base.is_concatenated:
            self._fold(routes.gate, self.hidden_states, gate_up[:, :inner], rows, x_gather=1)
            self._fold(routes.up, self.hidden_states, gate_up[:, inner:], rows, x_gather=1)
            return gate_up
        # Gate, up, gate, up: operators fold into columns that stand together; a copy has the bits.
        halves = gate_up.view(num_rows, inner, 2).transpose(1, 2).contiguous()
        self._fold(routes.gate, self.hidden_states, halves[:, 0], rows, x_gather=1)
        self._fold(routes.up, self.hidden_states, halves[:, 1], rows, x_gather=1)
        return halves.transpose(1, 2).reshape(num_rows, width)

    def to_down(self, inner: Tensor, out: Tensor, rows: ExpertRows) -> None:
        self._fold(self.layer.routes.down, inner, out, rows, x_gather=0)

    def _fold(
        self, route: MoeExpertRoute, x: Tensor, out: Tensor, rows: ExpertRows, *, x_gather: int
    ) -> None:
        where = (rows.offsets, rows.tokens, self.slots.seq_slot)
        if self.plan is None:  # one for all three: their keys are the same
            buffers = self.layer.plans.buffers(self.slots, out.shape[0], route)
            num_tokens = self.hidden_states.shape[0]
            self.plan = plan_grouped(route, *where, num_tokens, plan=buffers)
        moe_lora_grouped_down(route, x, out, *where, x_gather=x_gather, plan=self.plan)


class ExpertPlans:
    """Buffers for the plans of expert rows, shared by all experts of a model.

    One layer after the other refills them. They keep their addresses from step to step while the
    shape stays, and for ever where a CUDA graph was captured with them.

    Example:
        >>> from lorafold.ops import LoraPair, make_plan
        >>> a, b = torch.ones(4, 8).bfloat16(), torch.ones(8, 4).bfloat16()
        >>> pairs = {(0, 1): LoraPair(a, b, 1.0)}
        >>> route = MoeExpertRoute.from_pairs(pairs, max_loras=1, num_experts=2)
        >>> seq_slot = torch.zeros(3, dtype=torch.int32)
        >>> rows, plans = Rows(seq_slot, make_plan(seq_slot, 1)), ExpertPlans()
        >>> plans.buffers(rows, 6, route) is plans.buffers(rows, 6, route)
        True
    """

    def __init__(self) -> None:
        self._rows: Rows | None = None
        self._plans: dict[tuple[int, int], Plan] = {}
        self._captured: list[Plan] = []

    def buffers(self, rows: Rows, num_rows: int, route: MoeExpertRoute) -> Plan:
        """A plan to refill for the num_rows (token, choice) rows of the forward of `rows`."""
        if self._rows is not rows:  # another shape, or another routing
            self._rows, self._plans = rows, {}
        sizes = (num_rows, route.num_keys)
        if sizes not in self._plans:
            # Tensors made in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self._plans[sizes] = Plan.empty(*sizes, route.device)
        plan = self._plans[sizes]
        if route.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._captured.append(plan)
        return plan
