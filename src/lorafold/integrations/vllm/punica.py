"""What vLLM calls for LoRA, in tensors: once per step for the rows, once per layer for the deltas.

`Punica` holds the rows of the step and is shared by all layers of a model; `Target` is one layer's
view of it, with the layer's own tables. Method names, argument orders and layouts are vLLM's.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lorafold.errors import BackendError, RouteError
from lorafold.integrations.vllm.moe import ExpertTarget
from lorafold.integrations.vllm.rows import StepRows
from lorafold.integrations.vllm.tables import SlotTables
from lorafold.integrations.vllm.target import Target
from lorafold.numerics import resolve

__all__ = ["Punica"]


class Punica:
    """The rows of the step, for all layers of one model.

    Args:
        max_num_batched_tokens: the most token rows of a step.
        max_batches: the most sequences of a step.
        device: where the model is.
        lora_config: vLLM's; `max_loras`, `fully_sharded_loras` are read.

    Raises:
        BackendError: if lorafold cannot serve on this device or with these settings.

    Example:
        >>> config = SimpleNamespace(max_loras=2, fully_sharded_loras=False)
        >>> punica = Punica(8, 4, "cpu", lora_config=config)
        >>> mapping = SimpleNamespace(index_mapping=(7, 0, 0), prompt_mapping=(7, 0))
        >>> punica.update_metadata(mapping, [None, 7], 3, vocab_size=100)
        >>> punica.tokens.slots.tolist(), punica.samples.num_rows
        ([1, -1, -1, -1, -1, -1, -1, -1], 2)
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        *,
        lora_config: Any,
        **kwargs: Any,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda") or torch.version.hip is not None:
            raise BackendError(f"the plugin runs on CUDA devices and CPUs; given: {self.device}")
        if lora_config.fully_sharded_loras:
            raise BackendError(
                "fully sharded adapters are not supported: their xa would be a sum across GPUs; "
                "hint: leave fully_sharded_loras off, or set LORAFOLD_VLLM=0"
            )
        self.numerics = resolve(None, self.device)
        max_loras = lora_config.max_loras
        self.tokens = StepRows(max_num_batched_tokens, max_loras, self.device)
        # With speculative decoding a sequence is sampled at several rows.
        most_samples = max(max_num_batched_tokens, max_batches)
        self.samples = StepRows(most_samples, max_loras, self.device)
        self.embedding_indices = torch.zeros_like(self.tokens.slots, dtype=torch.int64)
        # Expert parallelism exchanges the slots of tokens; no other field is read.
        self.token_mapping_meta = SimpleNamespace(
            token_lora_mapping=self.tokens.slots, no_lora_flag_cpu=~self.tokens.any_adapter
        )

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: Sequence[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Take the rows of the next step.

        Args:
            mapping: `index_mapping` and `prompt_mapping`: an adapter id per token row and per
                sampled row, 0 for base.
            lora_index_to_id: the adapter id in each slot.
            max_loras: not used.
            vocab_size: rows of a slot of the embedding's A.
            **kwargs: not used.

        Raises:
            RouteError: if an adapter id is in no slot, or there are too many rows.
        """
        slot_of = {id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None}
        tokens = _slots(mapping.index_mapping, slot_of)
        samples = _slots(mapping.prompt_mapping, slot_of)
        had_adapter = bool(self.tokens.any_adapter.item())
        self.tokens.update(tokens)
        self.samples.update(samples)
        has_adapter = bool(self.tokens.any_adapter.item())
        self.token_mapping_meta.no_lora_flag_cpu.fill_(not has_adapter)
        if has_adapter or had_adapter:
            torch.mul(self.tokens.slots.clamp(min=0), vocab_size, out=self.embedding_indices)

    def refresh(self) -> None:
        """To be called after adapters have been written to slots or tables."""
        self.tokens.refresh()
        self.samples.refresh()

    def target(self, layer: Any) -> Target | ExpertTarget:
        """One layer's view, by the stacked tensors that vLLM has made for it.

        Raises:
            BackendError: if it is a classification head.
            RouteError: if the tensors are not bfloat16, or lie where kernels cannot read them.
        """
        if hasattr(layer, "full_weight_stacked"):
            raise BackendError(
                "adapters with a classification head of their own are not supported; "
                "hint: set LORAFOLD_VLLM=0"
            )
        if hasattr(layer, "w13_lora_a_stacked"):
            return ExpertTarget(self, layer)
        a, b = layer.lora_a_stacked, layer.lora_b_stacked
        if isinstance(a, Tensor) and a.dim() == 3:  # an embedding: x is a row of A already
            max_loras, _, max_rank = a.shape
            unit = torch.eye(max_rank, dtype=a.dtype, device=a.device)
            return Target(self, SlotTables([unit.expand(max_loras, 1, -1, -1)], [b]))
        return Target(self, SlotTables(*((t,) if isinstance(t, Tensor) else t for t in (a, b))))


def _slots(ids: Sequence[int], slot_of: dict[int, int]) -> Tensor:
    """[n] int32 slots of adapter ids, -1 for base."""
    if not ids:
        return torch.empty(0, dtype=torch.int32)
    # Much faster than a loop, whatever kind of integer the ids are.
    rows = torch.frombuffer(array.array("q", ids), dtype=torch.int64)
    distinct, place = torch.unique(rows, return_inverse=True)
    named = distinct.tolist()
    unknown = [id_ for id_ in named if id_ > 0 and id_ not in slot_of]
    if unknown:
        raise RouteError(f"every adapter of a step must be in a slot; in none: ids {unknown}")
    slots = [slot_of[id_] if id_ > 0 else -1 for id_ in named]
    return torch.tensor(slots, dtype=torch.int32)[place]
