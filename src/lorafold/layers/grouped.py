"""The base's matrix products on rows that are sorted by expert.

A row goes to an expert together with the rows of other tokens, whose experts depend on their
adapters. So that these never enter a row's bits, the number of an expert's rows must not choose how
its product is summed. On CUDA that is so for `grouped_mm`, whose tiles are chosen by sizes that the
host knows (all rows, all experts). On the CPU, and where a device has no `grouped_mm`, a matrix
product chooses by its number of rows (one row is summed in another order than two), so there the
rows go through products of one shape, a few rows each, padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["ExpertRows", "grouped_linear", "sort_by_expert"]

_TILE_ROWS = 8
_ALIGN_BYTES = 16


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The (token, choice) rows of one layer, sorted by expert; made without asking the device.

    Args:
        order: [num_rows] int64: sorted row i is row order[i] of the unsorted ones, of which row r
            belongs to token r // top_k.
        tokens: [num_rows] int32, the token of each sorted row.
        experts: [num_rows], the expert of each sorted row.
        offsets: [num_experts + 1] int32: expert e has the sorted rows offsets[e] .. offsets[e + 1].

    Example:
        >>> sort_by_expert(torch.tensor([[1], [0]]), num_experts=2).order.tolist()
        [1, 0]
    """

    order: Tensor
    tokens: Tensor
    experts: Tensor
    offsets: Tensor


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> ExpertRows:
    """Sort the rows of a layer by expert, those of one expert by token.

    Args:
        top_k_index: [num_tokens, top_k], the experts of each token.
        num_experts: experts of the layer.

    Example:
        >>> rows = sort_by_expert(torch.tensor([[2, 0], [0, 1]]), num_experts=3)
        >>> rows.experts.tolist(), rows.tokens.tolist(), rows.offsets.tolist()
        ([0, 0, 1, 2], [0, 1, 1, 0], [0, 2, 3, 4])
    """
    experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    ids = torch.arange(num_experts + 1, dtype=experts.dtype, device=experts.device)
    offsets = torch.searchsorted(experts, ids, out_int32=True)
    return ExpertRows(order, (order // top_k_index.shape[1]).int(), experts, offsets)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: ExpertRows, *, transposed: bool
) -> Tensor:
    """Every row through the linear layer of its expert: y[i] = x[i] W_e^T + bias_e.

    Args:
        x: [num_rows, in], sorted by expert.
        weight: [num_experts, out, in]; [num_experts, in, out] if transposed.
        bias: [num_experts, out], or None.
        rows: which rows each expert has.
        transposed: how the weight is stored.

    Returns:
        [num_rows, out]. A row's bits depend on its x, its expert and the number of rows in all, and
        on the CPU not even on that, as long as a matrix product gives equal rows equal bits.

    Example:
        >>> rows = sort_by_expert(torch.tensor([[1], [0]]), num_experts=2)
        >>> weight = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> grouped_linear(torch.ones(2, 2), weight, None, rows, transposed=False).tolist()
        [[3.0], [7.0]]
    """
    by_input = weight if transposed else weight.transpose(1, 2)
    product = _grouped_mm if _has_grouped_mm(x, weight) else _tiled_mm
    out = product(x, by_input, rows.offsets)
    return out if bias is None else out.add_(bias[rows.experts])


def _has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether the device multiplies groups of rows in one launch, and these operands fit."""
    if not x.is_cuda or weight.dtype != torch.bfloat16:
        return False
    aligned = all(n * weight.element_size() % _ALIGN_BYTES == 0 for n in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    # torch 2.9 has it under its first name only.
    multiply = getattr(F, "grouped_mm", None) or torch._grouped_mm
    out: Tensor = multiply(x, weight, offs=offsets[1:])
    return out


def _tiled_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Products of `_TILE_ROWS` rows each, from one buffer: all have one shape and one address."""
    out = x.new_empty(x.shape[0], weight.shape[2])
    tile = x.new_zeros(_TILE_ROWS, x.shape[1])
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        for start in range(begin, end, _TILE_ROWS):
            num_rows = min(_TILE_ROWS, end - start)
            tile[:num_rows] = x[start : start + num_rows]
            tile[num_rows:] = 0
            out[start : start + num_rows] = torch.mm(tile, weight[expert])[:num_rows]
    return out
