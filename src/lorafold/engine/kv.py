"""The KV cache of the packed batches: one stretch of tokens per request, for its whole life.

A request gets room for its prompt and its longest answer before it starts, so it never has to stop
for want of memory. Its keys and values are one view without gaps, and nothing is shared between
requests: what was computed under one adapter cannot reach another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KvCache", "Stretch"]

_GRAIN = 16  # tokens: stretches begin and end at multiples, so that every view is aligned alike


@dataclass(frozen=True)
class Stretch:
    """The places of one request in the cache.

    Args:
        start: the first.
        length: how many.

    Example:
        >>> Stretch(start=16, length=32).length
        32
    """

    start: int
    length: int


class KvCache:
    """Keys and values of every layer, and who has which part. Not thread-safe.

    Memory for a layer is taken when it first writes: only then its heads are known.

    Args:
        num_tokens: places for tokens; rounded down to a multiple of 16.
        device: where the model is.
        num_spare: places behind them, which no request ever gets.

    Attributes:
        num_tokens: places that requests can have.
        num_places: all of them, the spare ones included.

    Example:
        >>> cache = KvCache(64, torch.device("cpu"))
        >>> first, second = cache.reserve(20), cache.reserve(20)
        >>> first, second, cache.reserve(1)
        (Stretch(start=0, length=32), Stretch(start=32, length=32), None)
        >>> cache.release(first)
        >>> cache.reserve(16)
        Stretch(start=0, length=16)
    """

    def __init__(self, num_tokens: int, device: torch.device, *, num_spare: int = 0) -> None:
        self.num_tokens = num_tokens // _GRAIN * _GRAIN
        self.num_places = self.num_tokens + num_spare
        self._device = device
        self._free = [Stretch(0, self.num_tokens)] if self.num_tokens else []
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_free(self) -> int:
        """Places that nobody has."""
        return sum(stretch.length for stretch in self._free)

    def reserve(self, num_tokens: int) -> Stretch | None:
        """Room for this many tokens in one piece, or None."""
        length = -(-num_tokens // _GRAIN) * _GRAIN
        for at, free in enumerate(self._free):
            if free.length >= length:
                rest = Stretch(free.start + length, free.length - length)
                self._free[at : at + 1] = [rest] if rest.length else []
                return Stretch(free.start, length)
        return None

    def release(self, stretch: Stretch) -> None:
        """Give back what `reserve` returned."""
        merged: list[Stretch] = []
        for each in sorted([*self._free, stretch], key=lambda s: s.start):
            if merged and merged[-1].start + merged[-1].length == each.start:
                before = merged.pop()
                merged.append(Stretch(before.start, before.length + each.length))
            else:
                merged.append(each)
        self._free = merged

    def spare(self, at: int) -> Stretch:
        """Spare place number `at`, for a row that is computed and not wanted."""
        return Stretch(self.num_tokens + at, 1)

    def write(self, layer: int, index: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, *in place*, and return those of all places.

        Args:
            layer: index of the attention layer.
            index: [num_rows] int64, the places.
            key: [num_rows, num_heads, head_dim].
            value: likewise, with a head_dim of its own.

        Returns:
            Keys and values [num_places, num_heads, head_dim].
        """
        if layer not in self._layers:
            # Tensors made in inference mode could not be written outside it. Zeros, as a kernel may
            # multiply what it then masks.
            with torch.inference_mode(False):
                self._layers[layer] = (self._zeros(key), self._zeros(value))
        keys, values = self._layers[layer]
        keys.index_copy_(0, index, key)
        values.index_copy_(0, index, value)
        return keys, values

    def _zeros(self, like: Tensor) -> Tensor:
        shape = (self.num_places, *like.shape[1:])
        return torch.zeros(shape, dtype=like.dtype, device=self._device)
