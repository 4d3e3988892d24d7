"""SGLang 0.5.23's dense LoRA back ends `triton` and `csgmv`, site by site.

As in the engine: A [slots, slices * rank, k_in] and B [slots, sum of n_out, rank] of a site in one
tensor each, the scale in the kernel, the metadata that the back ends make once per batch (outside
the timed part), and the kernels that each site uses: one expand for a single slice, `gate_up` for
two equal ones, `qkv` for others. Every row is taken as a request of its own that decodes one token,
which is what rows dealt over adapters are; `triton` then sorts rows by adapter, as `csgmv` always
does. The chunks of `csgmv` are 16 rows, the server's default; `csgmv-128` is its option
--max-lora-chunk-size 128 with the engine's rule for smaller batches. Tuned tiles come from the
files that it ships, where they fit; its opt-in split of K (rank 32 only) is off.
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.fetch import FETCHED
from benchmarks.peers.imports import import_files, stand_in
from benchmarks.peers.operands import Operands, PeerCalls
from benchmarks.peers.record_types import parsed_models, plain_structs

__all__ = ["csgmv_calls", "kernels", "packed", "triton_calls"]

_DENSE = "sglang.kernels.ops.lora.dense"
_COMMON = "sglang.kernels.ops.lora.common"


@cache
def kernels() -> SimpleNamespace:
    """The imported modules, by the last part of their names."""
    names = (
        f"{_DENSE}.sgemm_lora_a",
        f"{_DENSE}.sgemm_lora_b",
        f"{_DENSE}.qkv_lora_b",
        f"{_DENSE}.gate_up_lora_b",
        f"{_DENSE}.chunked_sgmv_shrink",
        f"{_DENSE}.chunked_sgmv_expand",
        f"{_COMMON}.routing",
        f"{_COMMON}.lora_b",
        "sglang.srt.lora.utils",
        "sglang.srt.lora.workspace",
        "sglang.srt.lora.dense.plan",
        "sglang.srt.lora.dense.runner",
    )
    shadows = (plain_structs(), parsed_models())
    modules = import_files(FETCHED / "sglang", names, _stand_ins(), shadows)
    return SimpleNamespace(**{m.__name__.rpartition(".")[2]: m for m in modules})


def packed(operands: Operands) -> tuple[Tensor, Tensor]:
    """A and B of all slices in one stack each."""
    return torch.cat(operands.a, dim=1), torch.cat(operands.b, dim=1)


def triton_calls(operands: Operands) -> PeerCalls:
    """The site's calls through the back end `triton`."""
    code = kernels()
    batch = _sorted_by_adapter(code, operands)
    offsets = _offsets(operands)
    a, b = packed(operands)
    return [
        partial(
            _triton, code, x, operands.window(a, i), operands.window(b, i), out, batch,
            operands.n_outs, offsets,
        )
        for i, (x, out) in enumerate(zip(operands.xs, operands.outs, strict=True))
    ]  # fmt: skip


def csgmv_calls(operands: Operands, *, max_chunk: int) -> PeerCalls:
    """The site's calls through the back end `csgmv`."""
    code = kernels()
    batch = _chunked(code, operands, max_chunk)
    offsets = _offsets(operands)
    a, b = packed(operands)
    return [
        partial(
            _csgmv, code, x, operands.window(a, i), operands.window(b, i), out, batch,
            max(operands.n_outs), offsets, offsets.cpu(),
        )
        for i, (x, out) in enumerate(zip(operands.xs, operands.outs, strict=True))
    ]  # fmt: skip


def _triton(
    code: SimpleNamespace,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    batch: Any,
    n_outs: tuple[int, ...],
    offsets: Tensor,
) -> None:
    slices = len(n_outs)
    xa = code.sgemm_lora_a.sgemm_lora_a_fwd(x, a, batch, stack_num=slices)
    if slices == 1:
        code.sgemm_lora_b.sgemm_lora_b_fwd(xa, b, batch, out)
    elif n_outs == (n_outs[0],) * 2:
        code.gate_up_lora_b.gate_up_lora_b_fwd(xa, b, batch, n_outs[0], out)
    else:
        code.qkv_lora_b.qkv_lora_b_fwd(xa, b, batch, offsets, max(n_outs), out, n_slices=slices)


def _csgmv(
    code: SimpleNamespace,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    batch: Any,
    widest: int,
    offsets: Tensor,
    offsets_cpu: Tensor,
) -> None:
    xa = code.chunked_sgmv_shrink.chunked_sgmv_lora_shrink_forward(
        x, a, batch, num_slices=len(offsets_cpu) - 1
    )
    code.chunked_sgmv_expand.chunked_sgmv_lora_expand_forward(
        xa, b, batch, offsets, widest, out, slice_offsets_cpu=offsets_cpu
    )


def _offsets(operands: Operands) -> Tensor:
    ends = torch.tensor((0, *operands.n_outs)).cumsum(0)
    return ends.int().to(operands.slots.device)


def _sorted_by_adapter(code: SimpleNamespace, operands: Operands) -> Any:
    """Of `triton` for decoding rows: one segment per slot over rows sorted by slot."""
    slots, num_slots = operands.slots, operands.num_adapters
    lengths = slots.bincount(minlength=num_slots).int()
    return code.utils.LoRABatchInfo(
        use_cuda_graph=True,
        bs=num_slots,
        num_segments=num_slots,
        seg_indptr=_starts(lengths),
        weight_indices=torch.arange(num_slots, dtype=torch.int32, device=slots.device),
        max_len=operands.num_rows,
        seg_lens=lengths,
        permutation=slots.argsort(stable=True).int(),
        **_adapters(operands),
    )


def _chunked(code: SimpleNamespace, operands: Operands, max_chunk: int) -> Any:
    """Of `csgmv`: rows sorted by slot and cut into chunks of one slot."""
    rows = operands.num_rows
    by_rows = 128 if rows >= 256 else 32 if rows >= 64 else 16
    chunk = min(max_chunk, by_rows)
    slots = operands.slots
    counts = slots.bincount(minlength=operands.num_adapters).tolist()
    segments = [
        (slot, min(chunk, count - start))
        for slot, count in enumerate(counts)
        for start in range(0, count, chunk)
    ]
    of_slots, lengths = torch.tensor(segments, dtype=torch.int32, device=slots.device).T
    return code.utils.LoRABatchInfo(
        use_cuda_graph=False,
        bs=rows,
        num_segments=len(segments),
        seg_indptr=_starts(lengths),
        weight_indices=of_slots.contiguous(),
        max_len=chunk,
        seg_lens=None,
        permutation=slots.argsort(stable=True).int(),
        **_adapters(operands),
    )


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _adapters(operands: Operands) -> dict[str, Tensor]:
    ids = torch.arange(operands.num_adapters, device=operands.slots.device)
    return {
        "lora_ranks": torch.full_like(ids, operands.rank, dtype=torch.int32),
        "scalings": torch.full_like(ids, operands.scale, dtype=torch.float32),
    }


def _stand_ins() -> list[ModuleType]:
    def switch(value: Any) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: value)

    def keep_cache_of_triton(_: Any) -> Any:
        """The engine's own cache of launches is keyed too coarsely for many shapes in a process."""
        return lambda kernel: kernel

    def device_code(*_: Any, **__: Any) -> None:
        raise NotImplementedError("needs the engine's compiled extension")

    return [
        stand_in(
            "sglang.srt.environ",
            envs=SimpleNamespace(
                SGLANG_ENABLE_DETERMINISTIC_INFERENCE=switch(False),
                SGLANG_ENABLE_LORA_CSGMV_SPLIT_K=switch(False),
                SGLANG_LORA_DENSE_CONFIG_DIR=switch(None),
            ),
        ),
        stand_in(
            "sglang.srt.utils",
            cached_triton_kernel=keep_cache_of_triton,
            get_device_name=torch.cuda.get_device_name if torch.cuda.is_available() else _no_name,
            __path__=[],
        ),
        stand_in("sglang.srt.utils.hf_transformers_utils", AutoConfig=object),
        stand_in("sglang.srt.model_executor.forward_batch_info", ForwardBatch=object),
        stand_in("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: False),
        stand_in("sglang.kernels.ops.lora.moe.virtual_experts", _align_block_size_jit=device_code),
    ]


def _no_name() -> str:
    return "cpu"
