"""Which factors the layers of a vLLM model take, by the names in adapters, before sharding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Factors", "expected_experts", "expected_factors"]

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Factors:
    """The sizes of one module's A and B over all ranks of tensor parallelism.

    Args:
        k_in: input features.
        n_out: output features; None where the layer splits what it is given.
        num_experts: experts whose factors lie in one tensor.
        is_stacked: whether the experts are a leading dimension, which may be 1 for all of them;
            otherwise they are part of the rank.

    Example:
        >>> Factors(32, 16).a_shapes(8), Factors(32, 16).b_shapes(8)
        ([(8, 32)], [(16, 8)])
    """

    k_in: int
    n_out: int | None
    num_experts: int = 1
    is_stacked: bool = False

    def a_shapes(self, rank: int) -> list[Shape]:
        """The shapes that A may have."""
        if self.is_stacked:
            return [(experts, rank, self.k_in) for experts in (self.num_experts, 1)]
        return [(rank * self.num_experts, self.k_in)]

    def b_shapes(self, rank: int) -> list[Shape]:
        """The shapes that B may have."""
        if self.is_stacked:
            return [(experts, self.n_out, rank) for experts in (self.num_experts, 1)]
        return [(self.n_out, rank * self.num_experts)]


def expected_factors(manager: Any, model: Any) -> dict[str, Factors]:
    """The factors that a manager's layers take from an adapter, by module name."""
    expected: dict[str, Factors] = {}
    for name, layer in manager.modules.items():
        if hasattr(layer, "w13_lora_a_stacked"):
            expected.update(expected_experts(manager, model, name, layer))
        else:
            expected.update(_dense(manager, name, layer))
    return expected


def _dense(manager: Any, name: str, layer: Any) -> Iterator[tuple[str, Factors]]:
    a, b = layer.lora_a_stacked, layer.lora_b_stacked
    if isinstance(a, Tensor):  # [slots, vocabulary, rank], or the head's [slots, 1, rank, hidden]
        yield name, Factors(int(a.shape[1 if a.dim() == 3 else 3]), int(b.shape[2]))
        return
    k_in, outs = layer.base_layer.input_size, _outputs(layer.base_layer)
    parts = manager.packed_modules.get(name)
    if parts is None:
        yield name, Factors(k_in, sum(outs))
    else:
        split = outs if len(outs) == len(parts) else [None] * len(parts)
        yield from ((part, Factors(k_in, n_out)) for part, n_out in zip(parts, split, strict=True))


def _outputs(linear: Any) -> list[int]:
    """Output features per slice over all ranks."""
    if hasattr(linear, "total_num_kv_heads"):
        value_size = getattr(linear, "v_head_size", linear.head_size)
        query = linear.total_num_heads * linear.head_size
        return [
            query,
            linear.total_num_kv_heads * linear.head_size,
            linear.total_num_kv_heads * value_size,
        ]
    return list(getattr(linear, "output_sizes", None) or [linear.output_size])


def expected_experts(
    manager: Any, model: Any, name: str, layer: Any
) -> Iterator[tuple[str, Factors]]:
    """The factors that one layer of experts takes, by module name."""
    config = layer.moe_config
    hidden = getattr(config, "hidden_dim_unpadded", None) or config.hidden_dim
    local = getattr(config, "intermediate_size_per_partition_unpadded", None)
    inner = (local or config.intermediate_size_per_partition) * layer.tp_size
    num_experts = layer.global_num_experts
    is_fused = manager._is_3d_moe_model or (
        manager._enable_mixed_moe_lora_format and model.is_3d_lora_weight
    )
    if is_fused:
        yield f"{name}.base_layer", Factors(hidden, 2 * inner, num_experts)
        yield name, Factors(inner, hidden, num_experts)
        return
    parts = manager.packed_modules[name]
    if manager._enable_moe_shared_loras:
        per_expert, stacked = 3, num_experts
    else:
        per_expert, stacked = (2 if manager._is_non_gated_moe else 3), 0
    for i, part in enumerate(parts):
        k_in, n_out = (inner, hidden) if i % per_expert == 1 else (hidden, inner)
        yield part, Factors(k_in, n_out, max(1, stacked), is_stacked=stacked > 0)
