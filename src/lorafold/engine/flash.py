"""PyTorch's variable-length flash attention: all sequences of a step in one launch.

What PyTorch publishes as `torch.nn.attention.varlen` takes the number of keys of each sequence
since torch 2.13 only; the operator behind it has taken it since 2.5. Its name is private, so it is
used where its schema has all that is needed, and nowhere else.

Source: FlashAttention-2 (arXiv 2307.08691), as PyTorch builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lorafold.engine.step import Spans

__all__ = ["Flash", "find_flash"]

_NEEDED = {"scale", "window_size_left", "window_size_right", "seqused_k"}
_NO_FLASH = ("softcap", "s_aux", "position_bias")  # arguments that only the model's function knows


class Flash:
    """Attention over keys and values that stand in one long cache, each sequence with its own part.

    Args:
        operator: with the arguments of `aten::_flash_attention_forward`.
        can_split: whether the operator has to be told not to split keys.
        max_keys: keys of the longest sequence that can ever be. Which of its kernels the operator
            takes depends on this number, so it must not depend on the batch.

    Example: `lorafold.engine.attention` uses it.
    """

    def __init__(self, operator: Callable[..., Any], *, can_split: bool, max_keys: int) -> None:
        self._operator = operator
        self._unsplit = {"num_splits": 1} if can_split else {}
        self._max_keys = max_keys

    def fits(self, query: Tensor, value: Tensor, asked: dict[str, Any]) -> bool:
        """Whether the operator can do what a model asks of its attention function.

        Args:
            query: [..., head_dim].
            value: [..., head_dim].
            asked: what the model gives its attention function besides.
        """
        width = query.shape[-1]
        return (
            all(asked.get(name) is None for name in _NO_FLASH)
            and width == value.shape[-1] <= 256
            and width % 8 == 0
            and query.dtype in (torch.bfloat16, torch.float16)
        )

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        spans: Spans,
        *,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        """Attention of all sequences, causal from their ends: the last row sees all keys in use.

        Args:
            query: [num_rows, num_heads, head_dim].
            keys: [num_places, num_kv_heads, head_dim]; each is shared by a group of heads.
            values: likewise.
            spans: which rows and places belong together.
            scale: of the scores; None for head_dim ** -0.5.
            window: tokens that a token sees, itself included; None for all before it.

        Returns:
            [num_rows, num_heads, head_dim].
        """
        # Causal is said as a window to the right of 0, for single rows too. Without any window, the
        # operator would regroup the heads of single rows, and then, before torch 2.13, split their
        # keys by what else is in the batch.
        out: Tensor = self._operator(
            query,
            keys,
            values,
            spans.rows,
            spans.starts,
            spans.max_rows,
            self._max_keys,
            0.0,
            window is None,
            False,
            scale=scale,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=0,
            seqused_k=spans.used,
            **self._unsplit,
        )[0]
        return out


def find_flash(max_keys: int) -> Flash | None:
    """The operator of the installed PyTorch, or None if it cannot do what is needed.

    Args:
        max_keys: as for `Flash`.

    Example:
        >>> find_flash(1024) is not None
        True
    """
    try:
        operator = torch.ops.aten._flash_attention_forward.default
    except AttributeError:
        return None
    known = {argument.name for argument in operator._schema.arguments}
    if not known >= _NEEDED:
        return None
    return Flash(operator, can_split="num_splits" in known, max_keys=max_keys)
