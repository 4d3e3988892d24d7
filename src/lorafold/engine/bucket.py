"""Decode steps in a fixed shape: a token of each sequence, padded with rows that nobody wants.

All that the device is told about a step stands in buffers at fixed addresses, so a CUDA graph that
was captured with them can run the next step too. Padding rows are base, and read and write spare
places of the KV cache only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lorafold.engine.attention import PackedAttention
from lorafold.engine.step import Piece, Spans, Step, on_host
from lorafold.layers.routing import Rows
from lorafold.ops import Plan, make_plan
from lorafold.runtime import MultiLora

__all__ = ["Bucket", "bucket_sizes"]


def bucket_sizes(largest: int) -> list[int]:
    """Numbers of rows for which there are buckets, ascending; the last one is `largest`.

    Up to 8 they double; then a quarter of a step's rows are padding at most.

    Example:
        >>> bucket_sizes(44), bucket_sizes(100)[-4:]
        ([1, 2, 4, 8, 16, 24, 32, 40, 44], [64, 80, 96, 100])
    """
    sizes = [1]
    while sizes[-1] < largest:
        last = sizes[-1]
        quarter = 1 << max(0, last.bit_length() - 3)
        sizes.append(min(largest, last + (last if last < 8 else max(8, quarter))))
    return sizes


class Bucket:
    """The buffers of decode steps of up to `size` sequences, and the forward that reads them.

    Args:
        lora: the model.
        attention: of packed forwards; its cache has `size` spare places.
        size: rows of the forward.

    Example: `lorafold.engine.graphs` uses it.
    """

    def __init__(self, lora: MultiLora, attention: PackedAttention, size: int) -> None:
        self.size = size
        self._lora = lora
        self._attention = attention
        self._device = lora.pool.device
        spare = attention.cache.spare
        self._spares = [Piece((0,), 0, spare(at), -1, wants_logits=False) for at in range(size)]
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            # Token ids, positions, places; then what `_narrow` holds in 32 bits: slots, uses and
            # starts of the keys.
            self._inputs = torch.zeros(6 * size + 1, dtype=torch.int64, device=self._device)
            self._narrow = torch.zeros(3 * size + 1, dtype=torch.int32, device=self._device)
            slots, used = self._narrow[:size], self._narrow[size : 2 * size]
            rows = torch.arange(size + 1, dtype=torch.int32, device=self._device)
            self._rows = Rows(slots, Plan.empty(size, lora.pool.max_loras, self._device))
            self._spans = Spans(rows, self._narrow[2 * size :], used, max_rows=1)

    def fill(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Write a step into the buffers, with one copy to the device and without waiting for it.

        Args:
            pieces: at most `size`, of one token each, with ascending stretches.

        Returns:
            The pieces, and those of the padding rows.
        """
        padded = [*pieces, *self._spares[len(pieces) :]]
        last = padded[-1].stretch
        values = [
            *(piece.tokens[0] for piece in padded),
            *(piece.start for piece in padded),
            *(piece.stretch.start + piece.start for piece in padded),
            *(piece.slot for piece in padded),
            *(piece.end for piece in padded),
            *(piece.stretch.start for piece in padded),
            last.start + last.length,
        ]
        self._inputs.copy_(on_host(values, torch.int64, self._device), non_blocking=True)
        return padded

    def run(self, padded: Sequence[Piece], *, with_adapters: bool) -> Tensor:
        """The forward of what stands in the buffers; logits [size, vocab_size].

        Args:
            padded: what `fill` returned; empty where only the device is to know, as when a graph is
                captured.
            with_adapters: False runs every row as base.

        Raises:
            ModelError: if `padded` is empty and the model's attention cannot do without.
        """
        self._narrow.copy_(self._inputs[3 * self.size :])
        ids, positions, places = self._inputs[: 3 * self.size].view(3, 1, self.size)
        step = Step(places[0], padded, self._spans)
        with self._attention.stepping(step), self._routed(with_adapters):
            model: Any = self._lora.model
            logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits[0]

    def _routed(self, with_adapters: bool) -> AbstractContextManager[None]:
        if not with_adapters:
            return nullcontext()
        make_plan(self._rows.seq_slot, self._rows.plan.num_keys, plan=self._rows.plan)
        return self._lora.packed_rows(self._rows, range(self.size))
