"""Makes Triton's interpreter right for bf16, so that tests run the very kernels and compare bits.

Out of the box (Triton 3.6 to 3.9) it truncates fp32 to bf16, breaks bf16 subnormals, computes bf16
arithmetic and `tl.dot` on the raw 16-bit integers, and rounds `tl.fma` twice. `install` replaces:

    fp32 -> bf16, bf16 -> fp32     to nearest even; exact; subnormals included
    tl.dot of bf16                 the contract's chain of tensor-core steps, on the accumulator
    tl.fma of fp32                 one rounding
    +, -, *, / and comparisons     of bf16: in fp32, then rounded; of fp32: without numpy's warnings
    tensors as range bounds        with every numpy
    gdc_wait, gdc_launch_dependents    do nothing

A call of a device function no longer patches the whole language anew, which saves much time.
Whatever else would be wrong for bf16 raises NotImplementedError instead, and so does `tl.sum` of
more than two fp32: numpy's order is no device's order, and two have only one.

Triton chooses the interpreter when a kernel is defined, so TRITON_INTERPRET=1 must be in the
environment before the first module with kernels is imported; tests/conftest.py sees to that, on
machines without a GPU only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lorafold.numerics import HOPPER, TensorCoreModel
from lorafold.ops.reference import mma_chain

_state: dict[str, TensorCoreModel] = {}

any_sum = False
"""Whether `tl.sum` takes any number of fp32, for kernels whose bits nobody promises."""


def install(model: TensorCoreModel = HOPPER) -> None:
    """Patch the interpreter, once; a further call only changes the tensor-core model of `tl.dot`.

    Raises:
        RuntimeError: if kernels are not interpreted in this process.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before the first kernel is defined")
    installed = bool(_state)
    _state["model"] = model
    if installed:
        return
    import triton.language as tl
    from triton.language.extra import cuda
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    interpreter._convert_float = _conversion(interpreter._convert_float, tl)
    builder.cast_impl = _cast(builder.cast_impl, tl)
    builder.binary_op = _binary(builder.binary_op, handle, tl)
    builder.create_dot = _dot(builder.create_dot, handle, tl)
    builder.create_fma = _fma(handle, tl)
    interpreter._patch_lang_tensor = _index(interpreter._patch_lang_tensor)
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang, tl, interpreter)
    reductions = interpreter.ReduceScanOpInterface
    reductions.check_tensor = _refuse_bf16(reductions.check_tensor, tl)
    interpreter.ReduceOps.sum = _sum_of_two(interpreter.ReduceOps.sum, tl)
    # As the tensor cores do; by default the interpreter takes any size.
    functions = interpreter.interpreter_builder.codegen_fns
    functions["min_dot_size"] = lambda a, b: (1, 1, 256 // a.scalar.primitive_bitwidth)
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, lambda _semantic=None: None)


def widen(patterns: np.ndarray) -> np.ndarray:
    """bf16 patterns (uint16) to fp32: exact."""
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 patterns (uint16), to nearest, ties to even; NaN as a GPU writes it."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """fp32 x * y + z with one rounding, for all inputs.

    The float64 sum is rounded to odd, which keeps the last bit as a witness of what was lost, so
    that the rounding to fp32 sees which side of a tie the exact value lies on.
    """
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * y.astype(np.float64)
        total = np.asarray(product + z)
        of_z = total - product
        lost = (product - (total - of_z)) + (z - of_z)
        inexact = np.isfinite(total) & (lost != 0)
        even = (total.view(np.int64) & 1) == 0
        neighbour = np.nextafter(total, np.copysign(np.inf, lost))
        return np.where(inexact & even, neighbour, total).astype(np.float32)


def _conversion(original: Callable[..., Any], tl: Any) -> Callable[..., Any]:
    from triton._C.libtriton import ir

    def convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if tl.bfloat16 not in (source, target):
            return original(values, source, target, rounding)
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen(values).view(np.uint32)
        if (source, target) == (tl.float32, tl.bfloat16) and rounding != ir.ROUNDING_MODE.RTZ:
            return narrow(values)
        raise NotImplementedError(f"interpreted conversion {source} -> {target}, {rounding}")

    return convert


def _cast(original: Callable[..., Any], tl: Any) -> Callable[..., Any]:
    def cast(self: Any, source: Any, target: Any) -> Any:
        types = {source.dtype.scalar, target.scalar}
        if tl.bfloat16 in types and types != {tl.bfloat16, tl.float32}:
            raise NotImplementedError(f"interpreted conversion {source.dtype} -> {target}")
        with np.errstate(all="ignore"):
            return original(self, source, target)

    return cast


def _binary(original: Callable[..., Any], handle: Any, tl: Any) -> Callable[..., Any]:
    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        with np.errstate(all="ignore"):
            if left.dtype.scalar != tl.bfloat16:
                return original(self, left, right, operation)
            result = operation(widen(left.data), widen(right.data))
        if result.dtype == bool:
            return handle(result, tl.int1)
        return handle(narrow(result), tl.bfloat16)

    return binary


def _dot(original: Callable[..., Any], handle: Any, tl: Any) -> Callable[..., Any]:
    def tensor(patterns: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(patterns).view(np.int16)).view(torch.bfloat16)

    def dot(self: Any, a: Any, b: Any, c: Any, *options: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return original(self, a, b, c, *options)
        if a.dtype.scalar != b.dtype.scalar or c.dtype.scalar != tl.float32:
            raise NotImplementedError(f"interpreted dot {a.dtype} x {b.dtype} -> {c.dtype}")
        x, w = tensor(a.data), tensor(np.swapaxes(b.data, -1, -2))
        start = torch.from_numpy(np.array(c.data))
        return handle(mma_chain(x, w, start, model=_state["model"]).numpy(), tl.float32)

    return dot


def _fma(handle: Any, tl: Any) -> Callable[..., Any]:
    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if {t.dtype.scalar for t in (x, y, z)} != {tl.float32}:
            raise NotImplementedError(f"interpreted fma of {x.dtype}, {y.dtype}, {z.dtype}")
        return handle(fused_multiply_add(x.data, y.data, z.data), tl.float32)

    return fma


def _index(original: Callable[..., Any]) -> Callable[..., Any]:
    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def _once_per_launch(original: Callable[..., Any], tl: Any, interpreter: Any) -> Callable[..., Any]:
    patched: set[str] = set()

    def patch(fn: Any) -> Any:
        modules = {m.__name__ for m in fn.__globals__.values() if m is tl or m is tl.core}
        if modules <= patched and patched:
            return interpreter._LangPatchScope()
        launch, scope = not patched, original(fn)
        patched.update(modules)
        if launch:
            restore = scope.restore

            def finish() -> None:
                patched.clear()
                restore()

            scope.restore = finish
        return scope

    return patch


def _refuse_bf16(original: Callable[..., Any], tl: Any) -> Callable[..., Any]:
    def check(self: Any, tensors: Any) -> None:
        if any(getattr(t, "dtype", None) == tl.bfloat16 for t in tensors):
            raise NotImplementedError("interpreted reduction or scan of bf16")
        original(self, tensors)

    return check


def _sum_of_two(original: Callable[..., Any], tl: Any) -> Callable[..., Any]:
    def total(self: Any, values: Any) -> Any:
        if values.dtype.scalar != tl.float32 or any_sum:
            return original(self, values)
        if values.shape[self.axis] != 2 or self.keep_dims:
            raise NotImplementedError(f"interpreted sum of fp32 {values.shape} over {self.axis}")
        with np.errstate(all="ignore"):
            halves = np.moveaxis(values.handle.data, self.axis, 0)
            return self.to_tensor(halves[0] + halves[1], values.dtype)  # numpy's sum loses -0

    return total
