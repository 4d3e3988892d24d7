"""Launching a Triton kernel with little work on the host.

Triton looks at every argument of every call again to find the compiled kernel, which takes longer
than these kernels run. Here the started handle is kept under what the caller says it was compiled
for. Nothing is compiled that Triton would not have compiled for the same call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["is_aligned", "launch"]

_started: dict[tuple[Any, ...], Any] = {}


def is_aligned(t: Tensor) -> bool:
    """Whether a tensor starts at a multiple of 16 bytes, which Triton compiles for."""
    return t.data_ptr() & 15 == 0


def launch(
    kernel: Any,
    compiled_for: tuple[Any, ...],
    grid: tuple[int, int, int],
    operands: tuple[Any, ...],
    constants: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """Start a kernel on the current device and stream.

    Args:
        kernel: the decorated function.
        compiled_for: what decides the machine code beside the constants and options: the sizes that
            are specialised, alignments, dtypes that vary, which operands are None.
        grid: programs along the three axes.
        operands: its run-time arguments in order: tensors, integers, tuples of them, or None.
        constants: its compile-time arguments, in order, after the operands.
        **options: `num_warps`, `num_stages` and other options of the compiler.

    Source: the started kernel handle of Triton's tutorials.
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else -1
    key = (kernel, device, compiled_for, constants, *options.values())
    handle = _started.get(key)
    if handle is None:
        handle = kernel[grid](*operands, *constants, **options)
        if handle is not None:  # the interpreter compiles nothing
            _started[key] = handle
    else:
        handle[grid](*operands, *constants)
