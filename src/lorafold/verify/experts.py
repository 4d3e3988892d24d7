"""Checks of the expert operators: each way to the same row gives the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from lorafold import ops
from lorafold.verify.apply import device_tensor, fold_rows, pair
from lorafold.verify.case import Case
from lorafold.verify.check import Sides

__all__ = ["gathered_is_dense", "grouped_is_gathered", "windows"]


def _route(case: Case, device: torch.device) -> ops.MoeExpertRoute:
    """The adapters of an expert case as tables over (slot, expert)."""
    num_slots, num_experts, max_rank = case["a"].shape[:3]
    pairs = {}
    for slot in range(num_slots):
        for expert in range(num_experts):
            a, b = case["a"][slot, expert], case["b"][slot, expert]
            scale, rank = case["scales"][slot], case["ranks"][slot]
            adapter = pair(a, b, scale, rank, device, max_rank)
            if adapter is not None:
                pairs[slot, expert] = adapter
    return ops.MoeExpertRoute.from_pairs(pairs, max_loras=num_slots, num_experts=num_experts)


def _by_row(case: Case, x_gather: int) -> tuple[Tensor, Tensor]:
    """x and outputs of the (token, choice) rows: x per token where x_gather is 1."""
    x = case["x"][:, 0] if x_gather else case["x"].flatten(0, 1)
    return x.contiguous(), case["out"].flatten(0, 1)


def _gathered(case: Case, device: torch.device, x_gather: int) -> Tensor:
    """[rows * choices, cols] by `moe_lora_gather_bgmv`."""
    x, out = (device_tensor(t, device) for t in _by_row(case, x_gather))
    ops.moe_lora_gather_bgmv(
        _route(case, device),
        x,
        out,
        case["chosen"].flatten().to(device),
        case["slots"].to(device),
        top_k=case["chosen"].shape[1],
        x_gather=x_gather,
        numerics=case.numerics,
    )
    return out.cpu()


def _grouped(case: Case, device: torch.device, x_gather: int, cap: int | None = None) -> Tensor:
    """[rows * choices, cols] by `moe_lora_grouped_down`, in windows of at most `cap` rows."""
    chosen = case["chosen"].flatten()
    by_expert = chosen.argsort(stable=True)
    tokens = (by_expert // case["chosen"].shape[1]).int()
    counts = torch.bincount(chosen, minlength=case["a"].shape[1])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    x, out = _by_row(case, x_gather)
    x = device_tensor(x if x_gather else x[by_expert], device)
    sorted_out = device_tensor(out[by_expert], device)
    tables, total = _route(case, device), len(chosen)
    offsets, tokens, slots = (t.to(device) for t in (offsets, tokens, case["slots"]))
    for start, end in ops.grouped_down_windows(total, cap or total):
        ops.moe_lora_grouped_down(
            tables, x, sorted_out, offsets, tokens, slots,
            row_offset=start, row_end=end, x_gather=x_gather, numerics=case.numerics,
        )  # fmt: skip
    restored = torch.empty_like(out)
    restored[by_expert] = sorted_out.cpu()
    return restored


def windows(case: Case, device: torch.device) -> Sides:
    """Expert-sorted rows in windows of several sizes, and in one."""
    caps = (1, 7, 64)
    computed = [_grouped(case, device, way, cap) for way in (0, 1) for cap in caps]
    expected = [_grouped(case, device, way) for way in (0, 1) for _ in caps]
    return torch.stack(computed), torch.stack(expected)


def grouped_is_gathered(case: Case, device: torch.device) -> Sides:
    """Expert-sorted rows, and the same rows in their own order."""
    computed = [_grouped(case, device, way) for way in (0, 1)]
    return torch.stack(computed), torch.stack([_gathered(case, device, way) for way in (0, 1)])


def gathered_is_dense(case: Case, device: torch.device) -> Sides:
    """Rows routed by (slot, expert), and by a dense slot per pair of them."""
    num_experts = case["a"].shape[1]
    chosen = case["chosen"]
    slots = case["slots"][:, None].expand(chosen.shape)
    adapted = (slots >= 0) & (chosen < num_experts)
    keys = torch.where(adapted, slots * num_experts + chosen, -1).flatten().int()
    per_key = {name: case[name].repeat_interleave(num_experts) for name in ("scales", "ranks")}
    factors = {name: case[name].flatten(0, 1).contiguous() for name in ("a", "b")}
    expected = []
    for way in (0, 1):
        x, out = _by_row(case, way)
        x = x.repeat_interleave(chosen.shape[1], 0) if way else x
        operands = {"x": x, "out": out, "slots": keys, **factors, **per_key}
        expected.append(fold_rows(Case(operands, case.axes, case.numerics), device))
    return torch.stack([_gathered(case, device, way) for way in (0, 1)]), torch.stack(expected)
