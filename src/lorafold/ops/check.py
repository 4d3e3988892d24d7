"""What an operator checks before it touches anything: dtypes, devices, shapes, strides, overlap."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.ops.scratch import scratch_bytes
from lorafold.route import LoraRoute, Tables

__all__ = ["check_contents", "check_keys", "check_operands", "check_routes", "check_scratch"]

_BF16_BYTES = 2


def check_routes(routes: Sequence[LoraRoute], outs: Sequence[Tensor]) -> None:
    """Routes of one call share x, so they must agree in all but n_out; one output each."""
    if not routes or len(routes) != len(outs):
        raise RouteError(
            f"one base_out per route is needed; given: {len(routes)} routes, {len(outs)} outputs"
        )
    first = routes[0]
    for route in routes[1:]:
        same = (route.k_in, route.max_rank, route.max_loras, route.device)
        if same != (first.k_in, first.max_rank, first.max_loras, first.device):
            raise RouteError(
                "routes of one call must share k_in, max_rank, max_loras and device; given: "
                f"{(first.k_in, first.max_rank, first.max_loras, first.device)} and {same}"
            )


def check_operands(
    routes: Sequence[Tables], x: Tensor, outs: Sequence[Tensor], num_rows: int, x_rows: int
) -> None:
    """x [x_rows, k_in] and each output [num_rows, n_out]: bf16, columns together, rows apart.

    Raises:
        RouteError: naming the tensor, what was given and what is allowed.
    """
    _check_matrix("x", x, x_rows, routes[0].k_in, routes[0].device)
    for route, out in zip(routes, outs, strict=True):
        _check_matrix("base_out", out, num_rows, route.n_out, route.device)
        if num_rows > 1 and out.stride(0) < route.n_out:
            raise RouteError(
                "rows of base_out must not overlap: its row stride must be at least n_out "
                f"({route.n_out}); given: {out.stride(0)}"
            )
        if out.requires_grad and torch.is_grad_enabled():
            raise RouteError(
                "base_out is changed in place and has no gradient; "
                "hint: call under torch.inference_mode() or torch.no_grad()"
            )


def check_contents(x: Tensor, outs: Sequence[Tensor], keys: Tensor | None, num_keys: int) -> None:
    """What only a real call can see: memory that overlaps, and, on the CPU, keys beyond the table.

    Raises:
        RouteError: saying what overlaps, or which key is too large.
    """
    x_extent, extents = _extent(x), [_extent(out) for out in outs]
    for i, out in enumerate(outs):
        if _overlap(x, x_extent, out, extents[i]):
            raise RouteError("x and base_out overlap in memory; hint: pass a copy of x")
        for j in range(i):
            if _overlap(out, extents[i], outs[j], extents[j]):
                raise RouteError("two base_out of one call overlap in memory")
    if keys is not None and keys.device.type == "cpu" and keys.numel():
        highest = int(keys.max())
        if highest >= num_keys:
            raise RouteError(
                f"slots must be below {num_keys}, or negative for no adapter; given: {highest}"
            )


def check_keys(name: str, keys: Tensor, length: int, device: torch.device) -> None:
    """A contiguous int32 vector of `length` entries on `device`.

    Raises:
        RouteError: naming the vector, what was given and what is allowed.
    """
    if keys.dtype != torch.int32 or keys.dim() != 1 or not keys.is_contiguous():
        raise RouteError(
            f"`{name}` must be a contiguous int32 vector; given: {tuple(keys.shape)} {keys.dtype}"
        )
    if keys.shape[0] != length:
        raise RouteError(f"`{name}` must have {length} entries; given: {keys.shape[0]}")
    if keys.device != device:
        raise RouteError(f"`{name}` must be on {device}; given: {keys.device}")


def check_scratch(scratch: Tensor | None, route: Tables, num_routes: int, num_rows: int) -> None:
    """Whether the caller's scratch, if any, is large enough for a call.

    Raises:
        RouteError: saying how many bytes are needed.
    """
    if scratch is None:
        return
    needed = scratch_bytes(num_rows, num_routes, route.k_in, route.max_rank)
    fits = scratch.dtype == torch.uint8 and scratch.dim() == 1 and scratch.is_contiguous()
    if not fits or scratch.device != route.device or scratch.shape[0] < needed:
        raise RouteError(
            f"scratch must be a contiguous uint8 vector of at least {needed} bytes on "
            f"{route.device}; given: {list(scratch.shape)} {scratch.dtype} on {scratch.device}"
        )
    if scratch.storage_offset() % 16:
        raise RouteError(
            "scratch must start at a multiple of 16 bytes; given: a view that starts at byte "
            f"{scratch.storage_offset()}"
        )


def _check_matrix(name: str, t: Tensor, rows: int, columns: int, device: torch.device) -> None:
    is_matrix = t.dtype == torch.bfloat16 and t.device == device and t.shape == (rows, columns)
    if is_matrix and (columns == 1 or t.stride(1) == 1):
        return
    if t.dtype != torch.bfloat16:
        raise RouteError(f"`{name}` must be bfloat16; given: {t.dtype}")
    if t.device != device:
        raise RouteError(f"`{name}` must be on {device}, where the route is; given: {t.device}")
    if not is_matrix:
        raise RouteError(f"`{name}` must be [{rows}, {columns}]; given: {list(t.shape)}")
    raise RouteError(
        f"`{name}` must have its columns next to each other (inner stride 1); "
        f"given: strides {tuple(t.stride())}"
    )


def _overlap(a: Tensor, a_extent: tuple[int, int], b: Tensor, b_extent: tuple[int, int]) -> bool:
    """Whether two [rows, columns] views share an element; exact where their row strides agree."""
    if a_extent[1] <= b_extent[0] or b_extent[1] <= a_extent[0] or 0 in a.shape or 0 in b.shape:
        return False
    stride = a.stride(0) * _BF16_BYTES
    if a.stride(0) != b.stride(0) or a.shape[0] == 1 or b.shape[0] == 1 or not stride:
        return True
    apart = (b_extent[0] - a_extent[0]) % stride
    return apart < a.shape[1] * _BF16_BYTES or apart + b.shape[1] * _BF16_BYTES > stride


def _extent(t: Tensor) -> tuple[int, int]:
    """First and one past the last address of a [rows, columns] view."""
    begin = t.data_ptr()
    num_rows, num_columns = t.shape
    return begin, begin + ((num_rows - 1) * t.stride(0) + num_columns) * _BF16_BYTES
