"""The one operator behind all named ones: rows find a key, the key finds A, B and the scale.

`torch.ops.lorafold.routed_delta` is registered with torch.library, so that torch.compile sees one
opaque operator that changes its outputs in place. CPU tensors are computed by the reference, CUDA
tensors by the Triton kernels; the bits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lorafold.numerics import Numerics, resolve
from lorafold.ops.check import check_contents
from lorafold.ops.plan import make_plan
from lorafold.ops.routed_cpu import routed_cpu

__all__ = ["is_traced", "routed_delta"]

_SCHEMA = (
    "routed_delta(Tensor x, Tensor(a!)[] outs, Tensor? keys, Tensor[] a_tables, "
    "Tensor[] b_tables, Tensor[] scale_tables, Tensor[] rank_tables, int max_rank, str numerics, "
    "Tensor? source, int top_k, Tensor? tile_key, Tensor? tile_rows, Tensor? scratch) -> ()"
)


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What needs Triton, which not every machine has."""
    from lorafold.ops.compiled import on_device
    from lorafold.ops.launch import routed_triton

    return on_device, routed_triton


def _routed_cuda(
    x: Tensor,
    outs: Sequence[Tensor],
    keys: Tensor | None,
    a_tables: Sequence[Tensor],
    b_tables: Sequence[Tensor],
    scale_tables: Sequence[Tensor],
    rank_tables: Sequence[Tensor],
    max_rank: int,
    numerics: str,
    source: Tensor | None,
    top_k: int,
    tile_key: Tensor | None,
    tile_rows: Tensor | None,
    scratch: Tensor | None,
) -> None:
    check_contents(x, outs, keys, a_tables[0].shape[0])
    if not outs[0].shape[0]:
        return
    if keys is not None and tile_key is None:
        plan = make_plan(keys, a_tables[0].shape[0])
        tile_key, tile_rows = plan.tile_key, plan.tile_rows
    tables = tuple(a_tables), tuple(b_tables), tuple(scale_tables), tuple(rank_tables)
    on_device, routed_triton = _kernels()
    with on_device(x.device):
        routed_triton(
            x, tuple(outs), tables, max_rank, resolve(numerics, x.device), source, top_k,
            tile_key, tile_rows, scratch,
        )  # fmt: skip


_num_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_LIBRARY = torch.library.Library("lorafold", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]
_LIBRARY.impl("routed_delta", routed_cpu, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("routed_delta", _routed_cuda, "CUDA")  # type: ignore[no-untyped-call]


def _routed_fake(*args: object) -> None:
    """What tracing sees: the outputs change, nothing is returned."""


torch.library.register_fake("lorafold::routed_delta", _routed_fake, lib=_LIBRARY)


def routed_delta(
    x: Tensor,
    outs: Sequence[Tensor],
    keys: Tensor | None,
    tables: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    max_rank: int,
    numerics: Numerics,
    source: Tensor | None = None,
    top_k: int = 1,
    tile_key: Tensor | None = None,
    tile_rows: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Fold every row's delta into `outs` in place; operands are taken as checked.

    Row i of each output uses key `keys[i]` (0 for all rows where `keys` is None), and as input row
    `source[i]`, or i // top_k. `tables` holds (A addresses, B addresses, scales, ranks) per output.
    """
    a_tables, b_tables, scale_tables, rank_tables = zip(*tables, strict=True)
    run: Callable[..., Any] = torch.ops.lorafold.routed_delta
    if not is_traced(x):  # the dispatcher costs as much as all other host work
        run = _routed_cuda if x.is_cuda else routed_cpu
    run(
        x, outs, keys, a_tables, b_tables, scale_tables, rank_tables, max_rank, numerics,
        source, top_k, tile_key, tile_rows, scratch,
    )  # fmt: skip


def is_traced(x: Tensor) -> bool:
    """Whether somebody wants to see the operator: a compiler, a mode, a tensor subclass."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    return _num_modes is None or _num_modes() > 0
