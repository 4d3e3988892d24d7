"""What one packed forward works on: pieces of sequences, and where they stand in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafold.engine.kv import Stretch

__all__ = ["Piece", "Spans", "Step", "on_host", "send"]


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


@dataclass(frozen=True, eq=False)
class Spans:
    """Where the sequences of a step begin and end, as variable-length attention wants it.

    Args:
        rows: [num_pieces + 1] int32, the first row of each, and the number of all rows.
        starts: [num_pieces + 1] int32, ascending: the place in the cache where the keys of each
            begin, and the end of the last one's.
        used: [num_pieces] int32, how many keys each has.
        max_rows: rows of the longest.

    Example:
        >>> piece = Piece((5, 6), start=3, stretch=Stretch(16, 16), slot=-1, wants_logits=True)
        >>> spans = Spans.of([piece], torch.device("cpu"))
        >>> spans.rows.tolist(), spans.starts.tolist(), spans.used.tolist(), spans.max_rows
        ([0, 2], [16, 32], [5], 2)
    """

    rows: Tensor
    starts: Tensor
    used: Tensor
    max_rows: int

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> Spans:
        """The spans of pieces with ascending stretches."""
        rows = [0]
        for piece in pieces:
            rows.append(rows[-1] + len(piece.tokens))
        last = pieces[-1].stretch
        starts = [*(piece.stretch.start for piece in pieces), last.start + last.length]
        used = [piece.end for piece in pieces]
        num = len(rows)
        ints = send([*rows, *starts, *used], torch.int32, device)
        max_rows = max(len(piece.tokens) for piece in pieces)
        return cls(ints[:num], ints[num : 2 * num], ints[2 * num :], max_rows)


@dataclass(eq=False)
class Step:
    """One packed forward, as attention sees it.

    Args:
        index: [num_rows] int64, the place in the cache of each row.
        pieces: in the order of their rows, with ascending stretches; none where only the device
            knows them.
        spans: of the pieces; None until somebody needs them.

    Attributes:
        masks: made when first needed, and shared by all layers.

    Example:
        >>> piece = Piece((5, 6), start=3, stretch=Stretch(16, 16), slot=-1, wants_logits=True)
        >>> Step.of([piece], torch.device("cpu")).index.tolist()
        [19, 20]
    """

    index: Tensor
    pieces: Sequence[Piece]
    spans: Spans | None = None
    masks: dict[tuple[int, int | None], Tensor] = field(init=False, default_factory=dict)

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> Step:
        """The step of some pieces with ascending stretches."""
        places = [
            place
            for piece in pieces
            for place in range(piece.stretch.start + piece.start, piece.stretch.start + piece.end)
        ]
        return cls(send(places, torch.int64, device), pieces)

    def mask(self, at: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of piece number `at`: [1, 1, num_rows, num_keys].

        Args:
            at: index into `pieces`.
            window: tokens that a token sees, itself included; None for all before it.
            dtype: of the scores.
        """
        if (at, window) not in self.masks:
            piece, device = self.pieces[at], self.index.device
            rows = torch.arange(piece.start, piece.end, device=device).unsqueeze(1)
            keys = torch.arange(piece.end, device=device)
            is_hidden = keys > rows
            if window is not None:
                is_hidden |= keys <= rows - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)
            self.masks[at, window] = mask.masked_fill(is_hidden, torch.finfo(dtype).min)[None, None]
        return self.masks[at, window]


def on_host(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a vector on the host, from where a copy to the device does not block.

    For a CUDA device that is page-locked memory; nobody else is given it before the copy is done.

    Example:
        >>> on_host([1, 2], torch.int32, torch.device("cpu"))
        tensor([1, 2], dtype=torch.int32)
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a vector on the device, without waiting for the device.

    Example:
        >>> send([1, 2], torch.int32, torch.device("cpu"))
        tensor([1, 2], dtype=torch.int32)
    """
    return on_host(values, dtype, device).to(device, non_blocking=True)
