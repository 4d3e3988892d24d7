"""Launching a Triton kernel with little work on the host.

Triton looks at every argument of every call again to find the compiled kernel, which costs more
than these kernels run. Here the compiled kernel is kept under what it was compiled for, and
started directly. Nothing is compiled that Triton would not have compiled for the same call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["launch"]

_INT32_MAX = 2**31 - 1
_kept: dict[tuple[Any, ...], Any] = {}
_unspecialized: dict[Any, frozenset[int]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    operands: tuple[Any, ...],
    constants: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """Start a kernel on the current device and stream.

    Args:
        kernel: the decorated function.
        grid: programs along up to three axes.
        operands: its run-time arguments in order: tensors, integers, tuples of them, or None.
        constants: its compile-time arguments, in order, after the operands.
        **options: `num_warps`, `num_stages` and other options of the compiler.

    Source: the started kernel handle of Triton's tutorials.
    """
    free = _unspecialized.get(kernel)
    if free is None:
        names = getattr(kernel, "do_not_specialize", None) or ()
        free = frozenset(i for i, name in enumerate(kernel.arg_names) if name in names)
        _unspecialized[kernel] = free
    kinds = [_kind(value, i in free) for i, value in enumerate(operands)]
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = (kernel, device, constants, *kinds, *options.values())
    compiled = _kept.get(key)
    if compiled is None:
        compiled = kernel[grid](*operands, *constants, **options)
        if compiled is not None:  # the interpreter compiles nothing
            _kept[key] = compiled
    else:
        compiled[(*grid, 1, 1)[:3]](*operands, *constants)


def _kind(value: Any, is_free: bool) -> Any:
    """What Triton compiles for: a tensor's dtype and alignment, whether a size is 1 or a multiple of 16."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() & 15 == 0
    if isinstance(value, int):
        if is_free:
            return value > _INT32_MAX
        return value > _INT32_MAX, value == 1, value & 15 == 0
    if isinstance(value, tuple):
        return tuple([_kind(item, is_free) for item in value])
    return None
