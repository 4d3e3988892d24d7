"""Attention over a packed batch: each sequence with its own keys and values, and with no others.

transformers lets an attention function be named (`AttentionInterface`). Ours is named while packed
forwards run; it stores keys and values in the KV cache and then, sequence by sequence, calls the
function that the model would have used, with that sequence alone. So what a sequence attends to,
and the bits of the result, do not depend on its neighbours.

On CUDA one call of PyTorch's variable-length attention does the same for all sequences, told not to
split the keys by the longest of them, which keeps that promise.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lorafold.engine.kv import KvCache, Stretch
from lorafold.errors import RouteError

__all__ = ["PackedAttention", "Piece", "Step"]

_NAME = "lorafold_packed"
_NO_FLASH = ("softcap", "s_aux", "position_bias")  # arguments that only the model's function knows


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence in a packed forward.

    Args:
        tokens: token ids, at least one.
        start: the place of the first in its sequence; all before it are in the cache.
        stretch: the sequence's part of the cache.
        slot: of its adapter; -1 is base.
        wants_logits: whether the logits after its last token are asked for.

    Example:
        >>> Piece((5, 6), start=3, stretch=Stretch(0, 16), slot=-1, wants_logits=True).end
        5
    """

    tokens: Sequence[int]
    start: int
    stretch: Stretch
    slot: int
    wants_logits: bool

    @property
    def end(self) -> int:
        """Tokens of the sequence that are in the cache after the forward."""
        return self.start + len(self.tokens)


@dataclass(eq=False)
class Step:
    """One packed forward, as attention sees it.

    Args:
        pieces: in the order of their rows, with ascending stretches.
        device: where the model is.

    Attributes:
        index: [num_rows] int64, the place in the cache of each row.
        masks: made when first needed, and shared by all layers.

    Example:
        >>> piece = Piece((5, 6), start=3, stretch=Stretch(16, 16), slot=-1, wants_logits=True)
        >>> Step([piece], torch.device("cpu")).index.tolist()
        [19, 20]
    """

    pieces: Sequence[Piece]
    device: torch.device
    index: Tensor = field(init=False)
    masks: dict[tuple[int, int | None], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        places = [
            place
            for piece in self.pieces
            for place in range(piece.stretch.start + piece.start, piece.stretch.start + piece.end)
        ]
        self.index = torch.tensor(places, device=self.device)

    def mask(self, at: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of piece number `at`: [1, 1, num_rows, num_keys].

        Args:
            at: index into `pieces`.
            window: tokens that a token sees, itself included; None for all before it.
            dtype: of the scores.
        """
        if (at, window) not in self.masks:
            piece = self.pieces[at]
            rows = torch.arange(piece.start, piece.end, device=self.device).unsqueeze(1)
            keys = torch.arange(piece.end, device=self.device)
            is_hidden = keys > rows
            if window is not None:
                is_hidden |= keys <= rows - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=self.device)
            self.masks[at, window] = mask.masked_fill(is_hidden, torch.finfo(dtype).min)[None, None]
        return self.masks[at, window]

    def flash_arguments(self) -> dict[str, Any]:
        """The shape of the batch, as variable-length attention wants it."""
        lengths = [len(piece.tokens) for piece in self.pieces]
        ends = [piece.end for piece in self.pieces]
        last = self.pieces[-1].stretch
        starts = [piece.stretch.start for piece in self.pieces] + [last.start + last.length]
        offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return {
            "cu_seq_q": ints(offsets),
            "cu_seq_k": ints(starts),
            "seqused_k": ints(ends),
            "max_q": max(lengths),
            "max_k": max(ends),
        }


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
        self._flash = _find_flash() if use_flash and model.device.type == "cuda" else None
        self._step: Step | None = None
        self._flash_arguments: dict[str, Any] | None = None

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
        self._step = step
        self._flash_arguments = step.flash_arguments() if self._flash else None
        try:
            yield
        finally:
            self._step = self._flash_arguments = None

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
        """
        step = self._step
        if step is None or query.shape[2] != step.index.shape[0]:
            raise RouteError(f"no packed forward of {query.shape[2]} rows is under way")
        layer: Any = module.layer_idx
        keys, values = self.cache.write(
            layer, step.index, key[0].transpose(0, 1), value[0].transpose(0, 1)
        )
        window: int | None = kwargs.get("sliding_window")
        if self._flash_arguments is not None and _fits_flash(query, values, kwargs):
            assert self._flash is not None
            out: Tensor = self._flash(
                query[0].transpose(0, 1),
                keys,
                values,
                **self._flash_arguments,
                scale=kwargs.get("scaling"),
                window_size=(-1 if window is None else window - 1, 0),
                enable_gqa=True,
                num_splits=1,
            )
            return out.unsqueeze(0)
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


def _find_flash() -> Callable[..., Any] | None:
    """PyTorch's variable-length attention, if it can be told not to split keys."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    has_all = {"seqused_k", "num_splits", "window_size", "enable_gqa"} <= known.keys()
    return varlen_attn if has_all else None


def _fits_flash(query: Tensor, values: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether variable-length attention can do what the model asks for."""
    return (
        all(kwargs.get(name) is None for name in _NO_FLASH)
        and query.shape[-1] == values.shape[-1] <= 256
        and query.dtype in (torch.bfloat16, torch.float16)
    )
