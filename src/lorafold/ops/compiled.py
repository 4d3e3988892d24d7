"""Launching a Triton kernel with little work on the host.

Triton looks at every argument of every call again to find the compiled kernel, and asks the driver
what each pointer is; both take longer than these kernels run. A `Launch` holds what the sizes of a
call decide, keeps the started kernel, and hands it addresses as plain integers. Nothing is compiled
that Triton would not have compiled for the same call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from lorafold.ops.tiles import SHARED_MEMORY

__all__ = [
    "Bound",
    "Launch",
    "addresses",
    "has_pdl",
    "is_aligned",
    "is_watched",
    "on_device",
    "shared_memory_of",
]

Bound = Callable[[Sequence[Any]], None]

_NOTHING = nullcontext()

_started: dict[tuple[Any, ...], Any] = {}

# How a started kernel takes its arguments is Triton's own affair; this version was read.
_TAKES_ADDRESSES = triton.__version__.startswith("3.6.")


_OWN_SHARED_MEMORY = 4096
"""Bytes that a program takes beside its blocks, for exchanging results between warps."""


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether there is programmatic dependent launch: a kernel starts while the one before runs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes that the blocks of one program may take."""
    if device.type != "cuda":
        return SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)
    most = int(properties.shared_memory_per_block_optin)
    return min(SHARED_MEMORY, most - _OWN_SHARED_MEMORY)


def is_aligned(t: Tensor) -> bool:
    """Whether a tensor starts at a multiple of 16 bytes, which Triton compiles for."""
    return t.data_ptr() & 15 == 0


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A block in which this CUDA device is the current one: no work where it is so already."""
    if device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


class Launch:
    """A kernel with all of its arguments but the tensors.

    Args:
        kernel: the decorated function: tensors first, then sizes, then constants.
        compiled_for: what decides the machine code beside sizes, constants and options: alignments
            and dtypes of tensors that vary, which of them are None, the sizes that are specialised.
        grid: programs along the three axes.
        sizes: its run-time integers, in order, and tuples of them.
        constants: its compile-time arguments, in order.
        **options: `num_warps`, `num_stages` and other options of the compiler.

    Source: the started kernel handle of Triton's tutorials.
    """

    def __init__(
        self,
        kernel: Any,
        compiled_for: tuple[Any, ...],
        grid: tuple[int, int, int],
        sizes: tuple[Any, ...] = (),
        constants: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        self._kernel = kernel
        self._compiled_for = (kernel, compiled_for, constants, *options.values())
        self._grid = grid
        self._sizes = (*sizes, *constants)
        self._options = options
        self._own: dict[int, Any] = {}  # device -> started kernel
        self._bound: dict[int, Bound | None] = {}

    def __call__(self, *tensors: Any) -> None:
        """Start the kernel on the current device and stream.

        Args:
            *tensors: its tensors in order, tuples of them, or None.
        """
        # The interpreter has no device, and compiles nothing.
        has_device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device() if has_device else -1
        started = self._own.get(device)
        if started is None:
            self._start_first(device, tensors)
            return
        bound = None if is_watched() else self.bound(device)
        if bound is None:
            started[self._grid](*tensors, *self._sizes)
            return
        bound(addresses(tensors))

    def compile(self, *tensors: Any) -> None:
        """Compile the kernel for these tensors, and start nothing."""
        self._kernel.warmup(*tensors, *self._sizes, grid=self._grid, **self._options)

    def bound(self, device: int) -> Bound | None:
        """The started kernel, to be called with addresses: a tuple of integers, tuples of them, and
        None. None before the kernel was started on that device.
        """
        if device not in self._bound:
            started = self._own.get(device)
            if started is None:
                return None
            self._bound[device] = _bind(started, device, self._grid, self._sizes)
        return self._bound[device]

    def _start_first(self, device: int, tensors: tuple[Any, ...]) -> None:
        key = (device, self._compiled_for)
        started = _started.get(key)
        if started is None:
            started = self._kernel[self._grid](*tensors, *self._sizes, **self._options)
            if started is None:
                return
            _started[key] = started
        else:
            started[self._grid](*tensors, *self._sizes)
        self._own[device] = started


def is_watched() -> bool:
    """Whether a profiler wants to be told of launches, which only Triton's own way does."""
    if not _TAKES_ADDRESSES:
        return True
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def _bind(
    started: Any, device: int, grid: tuple[int, int, int], sizes: tuple[Any, ...]
) -> Bound | None:
    """What Triton's launcher does for a kernel that needs no memory of its own."""
    run = started.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, stream_of = run.launch, driver.active.get_current_stream
    function = started.function
    rest = (
        run.launch_cooperative_grid, run.launch_pdl, None, None, started.packed_metadata,
        None, None, None,
    )  # fmt: skip

    def bound(addresses: Sequence[Any]) -> None:
        launch(*grid, stream_of(device), function, *rest, *addresses, *sizes)

    return bound


def addresses(tensors: tuple[Any, ...]) -> list[Any]:
    """The tensors' addresses, in the same nesting; None stays None."""
    return [
        t.data_ptr()
        if isinstance(t, Tensor)
        else None
        if t is None
        else tuple([one.data_ptr() for one in t])
        for t in tensors
    ]
