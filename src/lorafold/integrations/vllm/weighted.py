"""Folding a delta that was computed apart from its output.

The operators fold into bfloat16 with one scale per adapter. Two places in vLLM need more: the down
projection of experts, where every row has a routing weight, and layers whose output is float32.
There the scaled delta is first computed into zeros, as bf16(scale * delta), and then added here:

    out[i] <- round( f32(out[i]) + f32(weights[i] * f32(delta[i])) )    product and sum each rounded

Rows without an adapter are not touched. A row's bits depend on that row alone.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["fold_delta"]


def fold_delta(
    out: Tensor, delta: Tensor, weights: Tensor | None, keys: Tensor, a_table: Tensor
) -> None:
    """Add weighted deltas to the rows that have an adapter, *in place*; operands as checked.

    Args:
        out: [n, n_out] bfloat16 or float32; rows may be any distance apart.
        delta: [n, n_out] bfloat16, contiguous.
        weights: [n] float32, or None for 1.
        keys: [n] int32, negative where there is no adapter.
        a_table: [num_keys] int64, 0 where a key is not adapted.

    Example:
        >>> import torch
        >>> out = torch.ones(2, 4)
        >>> delta = torch.ones(2, 4, dtype=torch.bfloat16)
        >>> keys = torch.tensor([0, -1], dtype=torch.int32)
        >>> fold_delta(out, delta, torch.tensor([0.5, 0.5]), keys, torch.tensor([64]))
        >>> out[:, 0].tolist()
        [1.5, 1.0]
    """
    if out.is_cuda:
        from lorafold.integrations.vllm.weighted_triton import fold_delta_triton

        fold_delta_triton(out, delta, weights, keys, a_table)
        return
    adapted = (keys >= 0) & (a_table[keys.clamp(min=0).long()] != 0)
    rows = adapted.nonzero().squeeze(1)
    scaled = delta[rows].float()
    if weights is not None:
        scaled = weights[rows].unsqueeze(1) * scaled
    out[rows] = (out[rows].float() + scaled).to(out.dtype)
