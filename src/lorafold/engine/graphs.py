"""Decode steps as CUDA graphs: launched in one go, where the host would launch kernel by kernel.

A graph is captured per size of a step (`bucket_sizes`), and another one for base rows alone, which
launches nothing for adapters. Slots, tables and the KV cache keep their addresses, so graphs stay
valid whatever is loaded, and whoever comes and goes.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lorafold.engine.attention import PackedAttention
from lorafold.engine.bucket import Bucket, bucket_sizes
from lorafold.engine.clock import ForwardClock
from lorafold.engine.step import Piece
from lorafold.runtime import MultiLora

__all__ = ["DecodeGraphs"]

_log = logging.getLogger(__name__)


class DecodeGraphs:
    """Steps in which every sequence feeds one token. Until `capture`, they are launched as usual.

    Args:
        lora: the model.
        attention: of packed forwards; its cache has `largest` spare places.
        largest: sequences of a step, at most.

    Attributes:
        clock: of the forwards.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from lorafold.engine.kv import KvCache
        >>> from lorafold.runtime import attach
        >>> config = LlamaConfig(
        ...     vocab_size=8,
        ...     hidden_size=16,
        ...     intermediate_size=16,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=2,
        ... )
        >>> lora = attach(LlamaForCausalLM(config).bfloat16())
        >>> cache = KvCache(64, torch.device("cpu"), num_spare=4)
        >>> attention = PackedAttention(lora.model, cache)
        >>> graphs = DecodeGraphs(lora, attention, largest=4)
        >>> pieces = [Piece([at], 0, cache.reserve(8), -1, wants_logits=True) for at in range(3)]
        >>> with lora.turn(), attention.installed():
        ...     graphs(pieces).shape
        torch.Size([3, 8])
    """

    def __init__(self, lora: MultiLora, attention: PackedAttention, largest: int) -> None:
        self._sizes = bucket_sizes(largest)
        self._buckets = [Bucket(lora, attention, size) for size in self._sizes]
        self._device = lora.pool.device
        self.clock = ForwardClock(self._device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._logits: Tensor | None = None

    def takes(self, pieces: Sequence[Piece]) -> bool:
        """Whether these pieces make up such a step."""
        return 0 < len(pieces) <= self._sizes[-1] and all(
            len(piece.tokens) == 1 and piece.wants_logits for piece in pieces
        )

    def __call__(self, pieces: Sequence[Piece]) -> Tensor:
        """The logits [number of pieces, vocab_size]; the next call may overwrite them.

        Args:
            pieces: with ascending stretches.
        """
        bucket = self._buckets[bisect_left(self._sizes, len(pieces))]
        padded = bucket.fill(pieces)
        with_adapters = any(piece.slot >= 0 for piece in pieces)
        graph = self._graphs.get((bucket.size, with_adapters))
        self.clock.begin()
        if graph is None:
            logits = bucket.run(padded, with_adapters=with_adapters)
        else:
            assert self._logits is not None
            graph.replay()
            logits = self._logits
        self.clock.end()
        return logits[: len(pieces)]

    def capture(self) -> None:
        """Capture all graphs, so that no step has to wait for one later.

        Raises:
            ModelError: if the model's attention needs to know the lengths on the host.
            RuntimeError: whatever else in the model cannot be captured, or finds no memory.
        """
        start = time.perf_counter()
        pool: Any = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._device):
            # The largest first: the others then find room in its memory.
            for bucket in reversed(self._buckets):
                for with_adapters in (True, False):
                    graph = self._captured(bucket, with_adapters, pool)
                    self._graphs[bucket.size, with_adapters] = graph
        seconds = time.perf_counter() - start
        _log.info("captured %d CUDA graphs in %.1f s", len(self._graphs), seconds)

    def _captured(self, bucket: Bucket, with_adapters: bool, pool: Any) -> torch.cuda.CUDAGraph:
        bucket.fill([])
        # What is compiled or allocated at first use must be there before the capture.
        logits = bucket.run((), with_adapters=with_adapters)
        if self._logits is None:
            # One for all graphs: they run one after the other.
            self._logits = torch.empty_like(logits)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails would leave its own stream as the current one. Other threads may go
        # on with what a capture forbids.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            self._logits[: bucket.size].copy_(bucket.run((), with_adapters=with_adapters))
        return graph
