"""vLLM 0.33.0's Triton kernels for dense LoRA: lora_shrink and lora_expand over packed slices.

What is as in the engine: A [slots, 1, rank, k_in] and B [slots, 1, n_out, rank] of a slice in one
tensor each, the scale multiplied into B in bf16 when an adapter is loaded, the metadata of
`LoRAKernelMeta` with one id more than there are slots, a fresh fp32 buffer per call that the shrink
clears first, and the configuration that its own look-up gives: no tuned files (it ships none for
LoRA), one stream, hence no programmatic dependent launch. `invariant` is what VLLM_BATCH_INVARIANT
changes: a fixed split of K, partial sums stored and added in order by a third kernel.

What is prepared outside the timed part: the metadata, which the engine makes once per batch, and
its tables of weight addresses, which it makes once at start.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.peers.fetch import FETCHED
from benchmarks.peers.imports import import_files, stand_in
from benchmarks.peers.operands import Operands, PeerCalls

__all__ = ["Kernels", "add_lora", "kernels", "metadata_of", "scaled", "site_calls"]

_OPS = "vllm.lora.ops.triton_ops"


class Kernels(SimpleNamespace):
    """The imported modules of one mode: shrink, expand, experts, metadata, tables."""

    shrink: Any
    expand: Any
    experts: Any
    metadata: Any
    tables: Any

    def forget_addresses(self) -> None:
        """Drop the cached tables of weight addresses: freed memory is used again."""
        self.tables._LORA_A_PTR_DICT.clear()
        self.tables._LORA_B_PTR_DICT.clear()
        self.experts._LORA_PTR_DICT.clear()


@cache
def kernels(invariant: bool) -> Kernels:
    """vLLM's modules, imported once per mode, because they read the flag at import."""
    shrink, expand, experts, metadata, tables = import_files(
        FETCHED / "vllm",
        (
            f"{_OPS}.lora_shrink_op",
            f"{_OPS}.lora_expand_op",
            f"{_OPS}.fused_moe_lora_op",
            f"{_OPS}.lora_kernel_metadata",
            f"{_OPS}.utils",
        ),
        _stand_ins(invariant),
    )
    return Kernels(shrink=shrink, expand=expand, experts=experts, metadata=metadata, tables=tables)


def site_calls(operands: Operands, *, invariant: bool) -> PeerCalls:
    """The site's calls: for each repetition a shrink of all slices and an expand of all slices."""
    code = kernels(invariant)
    code.forget_addresses()
    metadata = metadata_of(code, operands.slots, operands.num_adapters)
    b = tuple(scaled(stacked, operands.scale) for stacked in operands.b)
    calls: PeerCalls = []
    for i, (x, out) in enumerate(zip(operands.xs, operands.outs, strict=True)):
        a_slots = tuple(operands.window(stacked, i).unsqueeze(1) for stacked in operands.a)
        b_slots = tuple(operands.window(stacked, i).unsqueeze(1) for stacked in b)
        calls.append(partial(add_lora, code, x, out, a_slots, b_slots, metadata))
    return calls


def metadata_of(code: Kernels, slots: Tensor, num_adapters: int) -> tuple[Tensor, ...]:
    """What the engine computes once per batch from the rows' slots."""
    meta = code.metadata.LoRAKernelMeta.make(num_adapters, slots.shape[0], slots.device)
    meta.prepare_tensors(slots)
    return tuple(meta.meta_args(slots.shape[0], False))


def scaled(b: Tensor, scale: float) -> Tensor:
    """B with the scale multiplied in, in bf16, as when the engine loads an adapter."""
    return b * scale


def add_lora(
    code: Kernels,
    x: Tensor,
    out: Tensor,
    a_slots: tuple[Tensor, ...],
    b_slots: tuple[Tensor, ...],
    metadata: tuple[Tensor, ...],
) -> None:
    """What the engine runs for one layer: a shrink and an expand of all its slices.

    Args:
        code: of one mode.
        x: [rows, k_in].
        out: [rows, sum of n_out], changed in place.
        a_slots: per slice [slots, 1, rank, k_in].
        b_slots: per slice [slots, 1, n_out, rank], times the scale.
        metadata: `metadata_of` the rows.
    """
    rank = a_slots[0].shape[2]
    buffer = torch.empty((len(a_slots), len(x), rank), dtype=torch.float32, device=x.device)
    code.shrink.lora_shrink(x, a_slots, buffer, *metadata, 1.0)
    code.expand.lora_expand(buffer, b_slots, out, *metadata, offset_start=0, add_inputs=True)


class _Platform:
    """What the kernels' launchers ask about the device; without one, no feature of any."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    is_cuda_alike = is_cuda

    def is_xpu(self) -> bool:
        return False

    def has_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and _capability() >= capability

    def is_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and _capability() == capability

    def num_compute_units(self, index: int | None) -> int:
        if not self.is_cuda():
            return 132
        return torch.cuda.get_device_properties(index or 0).multi_processor_count


def _capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _stand_ins(invariant: bool) -> list[ModuleType]:
    logger = logging.getLogger("benchmarks.peers.vllm")
    once = SimpleNamespace(warning_once=logger.debug, info_once=logger.debug)

    def to_device(data: list[int], device: Any = None, dtype: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype).to(device)

    def shared_memory(index: int | None = 0) -> int:
        properties = torch.cuda.get_device_properties(index or 0)
        return int(properties.shared_memory_per_block_optin)

    def collective(*_: Any) -> Tensor:
        raise NotImplementedError("only single-device paths are measured")

    def leave_unregistered(**_: Any) -> None:
        """The files then fall back to the plain functions."""

    return [
        stand_in(
            "vllm.envs",
            VLLM_BATCH_INVARIANT=invariant,
            VLLM_LORA_DISABLE_PDL=False,
            VLLM_LORA_ENABLE_DUAL_STREAM=False,
            VLLM_TUNED_CONFIG_FOLDER=None,
        ),
        stand_in("vllm.logger", init_logger=lambda _: once),
        stand_in("vllm.platforms", current_platform=_Platform()),
        stand_in(
            "vllm.distributed",
            tensor_model_parallel_all_gather=collective,
            tensor_model_parallel_all_reduce=collective,
        ),
        stand_in("vllm.triton_utils", tl=tl, triton=triton, __path__=[]),
        stand_in("vllm.triton_utils.allocation", set_triton_allocator=collective),
        stand_in("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2),
        stand_in("vllm.utils.mem_utils", get_max_shared_memory_bytes=shared_memory),
        stand_in(
            "vllm.utils.torch_utils",
            async_tensor_h2d=to_device,
            direct_register_custom_op=leave_unregistered,
        ),
    ]
