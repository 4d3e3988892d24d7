"""Which way a model's requests are batched, and how much memory that takes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from lorafold.device import free_bytes
from lorafold.engine.answering import Answering
from lorafold.engine.packed import PackedBatches, most_step_tokens, why_not_packed
from lorafold.engine.static import StaticBatches
from lorafold.errors import ModelError
from lorafold.layers.call_shapes import call_shapes
from lorafold.ops.ahead import warm_up
from lorafold.runtime import MultiLora

__all__ = ["Batches", "Batching", "build_batches", "longest"]

Batching = Literal["auto", "packed", "static"]
"""How requests are batched: "packed" continuously, "static" one batch after the other."""

_CACHE_SHARE = 0.4  # of the free memory: the rest is for activations, and for others


class Batches(Protocol):
    """A way to batch. All of it is called in the engine's thread."""

    @property
    def max_length(self) -> int:
        """Tokens of the longest request that can ever run."""

    @property
    def is_continuous(self) -> bool:
        """Whether requests come and go between calls of `advance`."""

    def session(self) -> AbstractContextManager[None]:
        """A `with` block in which `advance` may be called."""

    def reserve(self, answering: Answering) -> bool:
        """Find room for a request, or return False."""

    def release(self, answering: Answering) -> None:
        """Give the room of a request back."""

    def advance(self, running: Iterable[Answering]) -> None:
        """Bring the running requests on by one step, or to their ends."""

    def timed(self) -> tuple[int, float]:
        """How many forwards have been done since the last call, and their seconds."""


def longest(lora: MultiLora) -> int:
    """Tokens of the longest sequence that the model was made for."""
    model: Any = lora.model
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 2048)


def build_batches(
    lora: MultiLora,
    batching: Batching,
    *,
    max_running: int,
    max_length: int,
    cache_tokens: int | None,
    chunk: int,
    graphs: bool,
) -> Batches:
    """The best way to batch the requests of a model, whose kernels are compiled here.

    Args:
        lora: the model.
        batching: "auto" packs where the model allows it.
        max_running: requests of a batch.
        max_length: tokens of the longest request.
        cache_tokens: places in the KV cache; None for as many as may be needed or fit.
        chunk: tokens of a prompt that are read at once; a static batch has `max_running` chunks of
            prompts at most, or one longer prompt.
        graphs: on CUDA, run packed decode steps as graphs.

    Raises:
        ModelError: if "packed" was asked for and the model does not allow it.
        BackendError: if the KV cache is too small for a request, or too large for the device.
    """
    shapes, device = call_shapes(lora.model), lora.pool.device
    step_tokens = most_step_tokens(max_running, chunk)

    def static() -> StaticBatches:
        most_tokens = max(step_tokens, max_running * chunk)
        warm_up(shapes, most_tokens, device=device)
        return StaticBatches(lora, max_length=max_length, max_tokens=most_tokens)

    if batching == "static":
        return static()
    warm_up(shapes, step_tokens, device=device)
    use_flash = True
    reason = why_not_packed(lora)
    if reason is not None and device.type == "cuda":
        use_flash, reason = False, why_not_packed(lora, use_flash=False)
    if reason is not None:
        if batching == "packed":
            raise ModelError(f"requests cannot be packed: {reason}; hint: set batching to static")
        return static()
    num_tokens = cache_tokens or _fitting_tokens(lora, max_running * (max_length + 16))
    return PackedBatches(
        lora,
        num_tokens=num_tokens,
        max_running=max_running,
        chunk=chunk,
        use_flash=use_flash,
        graphs=graphs,
    )


def _fitting_tokens(lora: MultiLora, wanted: int) -> int:
    """Places for tokens in the KV cache: what is wanted, or what a share of the memory holds."""
    model: Any = lora.model
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_token = 2 * 2 * config.num_hidden_layers * heads * head_dim
    free = free_bytes(lora.pool.device)
    return wanted if free is None else min(wanted, int(free * _CACHE_SHARE) // bytes_per_token)
