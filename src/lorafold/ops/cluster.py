"""The cluster kernel of `cuda/`: compiled with NVRTC, kept on disk, launched through the driver.

One launch does what shrink and expand do in two. It needs `cuda.bindings`, which comes with
PyTorch's wheels for CUDA 13, and a device of compute capability 9.0; elsewhere, and where it cannot
be compiled, there is no such launch, and calls take the Triton kernels. Nothing of `cuda.bindings`
is imported before a call wants it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from lorafold.errors import BackendError
from lorafold.ops.cluster_choice import Shape
from lorafold.ops.compiled import Bound, addresses, on_device

__all__ = [
    "ClusterLaunch",
    "cluster_launch",
    "compile_ahead",
    "compile_cubin",
    "has_clusters",
]

_log = logging.getLogger(__name__)

_ARCH = "sm_90a"


@functools.cache
def has_clusters(device: torch.device) -> bool:
    """Whether the kernel may be tried on this device."""
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0) and _has_bindings()


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.nvrtc") is not None
    except (ImportError, ValueError):  # there is no `cuda`, or another one
        return False


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call of the driver or of NVRTC returns beside its status.

    Raises:
        BackendError: if the status is not success.
    """
    status, *values = result
    if int(status) != 0:
        raise BackendError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else values


@functools.cache
def _sources() -> tuple[bytes, dict[bytes, bytes]]:
    """The kernel, and its headers by name."""
    folder = files("lorafold").joinpath("ops/cuda")
    headers = {
        each.name.encode(): each.read_bytes()
        for each in sorted(folder.iterdir(), key=lambda each: each.name)
        if each.name.endswith(".cuh")
    }
    return folder.joinpath("cluster.cu").read_bytes(), headers


def compile_cubin(shape: Shape) -> bytes:
    """The machine code, from disk if these sources were compiled with these options before.

    Raises:
        BackendError: if NVRTC refuses.
    """
    from cuda.bindings import nvrtc

    options = [f"-arch={_ARCH}", "-std=c++17", "--fmad=false"]
    options += [f"-D{name}={value}" for name, value in shape.defines.items()]
    version = _checked(nvrtc.nvrtcVersion())
    digest = hashlib.sha256(repr((_sources(), options, version)).encode()).hexdigest()
    folder = _cache_folder()
    kept = folder and folder / f"{digest}.cubin"
    if kept and kept.exists():
        return kept.read_bytes()
    cubin = _nvrtc([option.encode() for option in options])
    if kept:
        _keep(cubin, kept)
    return cubin


def _cache_folder() -> Path | None:
    """A folder of this user's that nobody else may write to, as code is loaded from it; None where
    there is no such place.
    """
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "lorafold" / "cubins"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except (OSError, RuntimeError):  # not writable, or nobody's home
        return None
    is_own = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return folder if is_own else None


def _keep(cubin: bytes, kept: Path) -> None:
    """Write a file whole or not at all; a full disk is no reason to fail."""
    try:
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(kept)
    except OSError as error:
        _log.info("%s was not kept: %s", kept, error)


def _nvrtc(options: list[bytes]) -> bytes:
    from cuda.bindings import nvrtc

    source, headers = _sources()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            source, b"cluster.cu", len(headers), list(headers.values()), list(headers)
        )
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        if int(status) != 0:
            raise BackendError(f"NVRTC: {status!r}: {log.decode(errors='replace').strip()}")
        cubin: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin


_failures: list[str] = []


def _tell(failure: str) -> None:
    """Log that the kernel is missing, once in a process."""
    if not _failures:
        _log.warning("calls take the Triton kernels, as the cluster kernel failed: %s", failure)
    _failures.append(failure)


def _enter_context(device: torch.device) -> None:
    """Make the device's primary context, which is PyTorch's, current in a thread that has none."""
    from cuda.bindings import driver

    if int(_checked(driver.cuCtxGetCurrent())) == 0:
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuDevicePrimaryCtxRetain(device.index))))


def _load(shape: Shape, device: torch.device) -> Any:
    """The kernel on this device.

    Raises:
        BackendError: if it cannot be compiled or loaded.
    """
    from cuda.bindings import driver

    cubin = compile_cubin(shape)
    buffer = ctypes.create_string_buffer(cubin, len(cubin))
    with on_device(device):
        _enter_context(device)
        module = _checked(driver.cuModuleLoadData(ctypes.addressof(buffer)))
        function = _checked(driver.cuModuleGetFunction(module, b"lora_cluster"))
        kinds = driver.CUfunction_attribute
        wanted = {kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: shape.shared_bytes}
        if shape.choice.cluster > 8:
            wanted[kinds.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for kind, value in wanted.items():
            _checked(driver.cuFuncSetAttribute(function, kind, value))
        if not _checked(driver.cuOccupancyMaxActiveClusters(function, _config(shape, 1))):
            raise BackendError(f"the device has no room for a cluster of {shape.choice.cluster}")
    return function


@functools.cache
def _function(shape: Shape, device: torch.device) -> Any:
    """The loaded kernel, None where that failed."""
    try:
        return _load(shape, device)
    except Exception as error:  # whatever a library that is not required finds
        _tell(f"{type(error).__name__}: {error}")
        return None


def compile_ahead(shapes: Iterable[Shape]) -> None:
    """Compile kernels side by side, onto the disk; what fails is told when a call wants it."""

    def attempt(shape: Shape) -> None:
        try:
            compile_cubin(shape)
        except Exception as error:
            _log.info("not compiled ahead: %s", error)

    with ThreadPoolExecutor(os.cpu_count()) as threads:  # NVRTC compiles outside of Python's lock
        list(threads.map(attempt, set(shapes)))


class _Slice(ctypes.Structure):
    """`Slice` of `cuda/shape.cuh`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "scale", "rank", "out")),
        ("stride", ctypes.c_int64),
    ]


@functools.cache
def _params(slices: int) -> Any:
    """`Params` of `cuda/shape.cuh`."""
    pointers = "x", "tile_key", "tile_rows", "source"
    fields: list[Any] = [(name, ctypes.c_void_p) for name in pointers]
    fields += [(name, ctypes.c_int64) for name in ("x_stride", "top_k")]
    fields.append(("slice", _Slice * slices))
    return type("Params", (ctypes.Structure,), {"_fields_": fields})


def _config(shape: Shape, num_tiles: int) -> Any:
    """Grid, cluster, shared memory, and leave to start before the kernel before is complete."""
    from cuda.bindings import driver

    c, ids = shape.choice, driver.CUlaunchAttributeID
    cluster, serial = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = c.cluster
    cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1
    serial.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    serial.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = num_tiles * c.cluster, c.groups, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = c.warpgroups * 128, 1, 1
    config.sharedMemBytes = shape.shared_bytes
    config.attrs = [cluster, serial]
    config.numAttrs = 2
    return config


class ClusterLaunch:
    """The kernel with all of its arguments but the tensors, on one device; called as `Launch`.

    Its tensors are x, outs, the tables of A, B, scales and ranks, the plan's two, and source or
    None. Threads may share it.
    """

    def __init__(
        self,
        shape: Shape,
        function: Any,
        num_tiles: int,
        top_k: int,
        x_stride: int,
        out_strides: tuple[int, ...],
        device: torch.device,
    ) -> None:
        from cuda.bindings import driver

        self.shape = shape
        self._function, self._device, self._driver = function, device, driver
        self._config = _config(shape, num_tiles)
        self._params = _params(len(shape.n_outs))()
        self._params.x_stride, self._params.top_k = x_stride, top_k
        for each, stride in zip(self._params.slice, out_strides, strict=True):
            each.stride = stride
        # What the driver reads: one pointer, to all parameters; it copies them at the launch.
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._lock = threading.Lock()

    def __call__(self, *tensors: Any) -> None:
        """Start the kernel on the device's current stream; tensors, and tuples of them."""
        self._start(addresses(tensors))

    def compile(self, *tensors: Any) -> None:
        """Nothing is left to compile."""

    def bound(self, device: int) -> Bound | None:
        """The kernel, to be called with addresses; None on another device."""
        return self._start if device == self._device.index else None

    def _start(self, operands: Sequence[Any]) -> None:
        x, outs, a_tables, b_tables, scales, ranks, tile_key, tile_rows, source = operands
        params, config, driver = self._params, self._config, self._driver
        with self._lock:  # the driver is called outside of Python's lock
            params.x, params.source = x, source
            params.tile_key, params.tile_rows = tile_key, tile_rows
            tables = zip(params.slice, outs, a_tables, b_tables, scales, ranks, strict=True)
            for each, *values in tables:
                each.out, each.a, each.b, each.scale, each.rank = values
            stream = torch._C._cuda_getCurrentRawStream(self._device.index)
            config.hStream = driver.CUstream(stream)
            pointers = ctypes.addressof(self._pointers)
            (status,) = driver.cuLaunchKernelEx(config, self._function, pointers, 0)
            if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread's first use of CUDA
                _enter_context(self._device)
                (status,) = driver.cuLaunchKernelEx(config, self._function, pointers, 0)
        _checked((status, None))


def cluster_launch(
    shape: Shape,
    num_tiles: int,
    top_k: int,
    x_stride: int,
    out_strides: tuple[int, ...],
    device: torch.device,
) -> ClusterLaunch | None:
    """The launch for these sizes, None where there is no such kernel on this device. x and all
    outputs must start at multiples of 16 bytes.

    Args:
        shape: what the kernel is compiled for.
        num_tiles: of the plan.
        top_k: rows that share a row of x, one after the other, where there is no source.
        x_stride: elements between rows of x.
        out_strides: likewise, per output.
        device: where the call will be.
    """
    if not shape.fits or any(stride % 8 for stride in (x_stride, *out_strides)):
        return None
    if not has_clusters(device):
        return None
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    function = _function(shape, device)
    if function is None:
        return None
    return ClusterLaunch(shape, function, num_tiles, top_k, x_stride, out_strides, device)
