"""Attention over a packed batch: each sequence with its own keys and values, and with no others.

transformers lets an attention function be named (`AttentionInterface`). Ours is named while packed
forwards run; it stores keys and values in the KV cache and then, sequence by sequence, calls the
function that the model would have used, with that sequence alone. So what a sequence attends to,
and the bits of the result, do not depend on its neighbours.

On CUDA one call of variable-length attention does the same for all sequences (`flash`), and keeps
that promise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lorafold.engine.flash import find_flash
from lorafold.engine.kv import KvCache
from lorafold.engine.step import Spans, Step
from lorafold.errors import ModelError, RouteError

__all__ = ["PackedAttention"]

_NAME = "lorafold_packed"


class PackedAttention:
    """The attention function of packed forwards, and the step that it works on.

    Args:
        model: a causal language model of transformers.
        cache: where keys and values go.
        use_flash: call PyTorch's variable-length attention where it can be used.

    Example: `lorafold.engine.packed` uses it.
    """

    def __init__(self, model: Any, cache: KvCache, *, use_flash: bool = True) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, _attend)
        self.cache = cache
        self._model = model
        self._usual = str(model.config._attn_implementation)
        is_cuda = model.device.type == "cuda"
        self._flash = find_flash(cache.num_places) if use_flash and is_cuda else None
        self._step: Step | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have the model call this attention, in this thread, inside the `with` block."""
        self._model.set_attn_implementation(_NAME)
        _thread.attention = self
        try:
            yield
        finally:
            _thread.attention = None
            self._model.set_attn_implementation(self._usual)

    @contextmanager
    def stepping(self, step: Step) -> Iterator[None]:
        """Work on this step inside the `with` block."""
        if self._flash is not None and step.spans is None:
            step.spans = Spans.of(step.pieces, step.index.device)
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        """Attention of all sequences of the step.

        Args:
            module: an attention layer of the model.
            query: [1, num_heads, num_rows, head_dim].
            key: [1, num_kv_heads, num_rows, head_dim], of the new tokens.
            value: likewise.
            **kwargs: what the model gives its attention function.

        Returns:
            [1, num_rows, num_heads, head_dim].

        Raises:
            RouteError: if no step is under way, or it has another number of rows.
            ModelError: if only the device knows the pieces, and that is not enough.
        """
        step = self._step
        if step is None or query.shape[2] != step.index.shape[0]:
            raise RouteError(f"no packed forward of {query.shape[2]} rows is under way")
        layer: Any = module.layer_idx
        keys, values = self.cache.write(
            layer, step.index, key[0].transpose(0, 1), value[0].transpose(0, 1)
        )
        window: int | None = kwargs.get("sliding_window")
        flash = self._flash
        if flash is not None and step.spans is not None and flash.fits(query, values, kwargs):
            rows, scale = query[0].transpose(0, 1), kwargs.get("scaling")
            return flash(rows, keys, values, step.spans, scale=scale, window=window).unsqueeze(0)
        if not step.pieces:
            raise ModelError(
                f"{type(module).__name__} cannot use variable-length attention, and each sequence "
                "by itself would need to know its length"
            )
        return self._one_by_one(module, query, keys, values, step, window, kwargs)

    def _one_by_one(
        self,
        module: nn.Module,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        step: Step,
        window: int | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Each sequence through the function that the model would have called."""
        function, row, outs = self._usual_function(module), 0, []
        for at, piece in enumerate(step.pieces):
            rows = slice(row, row := row + len(piece.tokens))
            first = 0
            if len(piece.tokens) == 1:
                # A single row sees all of its window: leave out the rest instead of masking it.
                mask, first = None, 0 if window is None else max(0, piece.end - window)
            else:
                mask = step.mask(at, window, query.dtype)
            places = slice(piece.stretch.start + first, piece.stretch.start + piece.end)
            own_keys, own_values = (t[places].transpose(0, 1).unsqueeze(0) for t in (keys, values))
            outs.append(
                function(module, query[:, :, rows], own_keys, own_values, mask, **kwargs)[0]
            )
        return torch.cat(outs, dim=1)

    def _usual_function(self, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
        """What the model would have called: its own eager function, or PyTorch's."""
        from transformers import AttentionInterface

        function: Callable[..., tuple[Tensor, Any]]
        if self._usual == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            function = AttentionInterface()["sdpa"]
        return function


_thread = threading.local()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls by name."""
    attention: PackedAttention | None = getattr(_thread, "attention", None)
    if attention is None:
        raise RouteError("the model is in use by an engine; another thread must wait for its turn")
    return attention.attend(module, query, key, value, **kwargs), None
