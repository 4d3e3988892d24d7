"""The routing of the current forward: which slot each row has, shared by all layers of one model.

`MultiLora` begins and ends a routing and tells it the shape of every forward; `RoutedLinear` reads
it. Sequences either have a row of the batch each, or are packed one after the other into one row
(`begin_packed`). Slots stand in buffers at fixed addresses: a CUDA graph that was captured inside a
routing reads what the latest step of its shape wrote, and nothing but base rows once the routing
has ended. Nothing here knows adapters or names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafold.errors import RouteError
from lorafold.ops import Plan, make_plan

__all__ = ["Routing", "Rows"]

_FIRST_CAPACITY = 4096  # rows: 16 KiB


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one forward.

    Args:
        seq_slot: [num_rows] int32, the slot of each row; -1 is base.
        plan: made of `seq_slot`, shared by all layers.

    Example:
        >>> seq_slot = torch.tensor([0, 0, -1], dtype=torch.int32)
        >>> Rows(seq_slot, make_plan(seq_slot, num_keys=2)).plan.num_rows
        3
    """

    seq_slot: Tensor
    plan: Plan


class Routing:
    """The slots of the rows of the current forward.

    A forward has `num_sequences` sequences of `num_tokens` tokens, and its layers see one row per
    token: sequence 0 first. The output head may see the last `num_kept` tokens of each only.
    Not thread-safe: one forward at a time.

    Args:
        device: where the model is.
        max_loras: slots 0 .. max_loras-1 exist.
        has_head: whether the output head is a target, so that `head_rows` is needed.

    Attributes:
        rows: one row per token; None while every row is base and no graph was captured.
        head_rows: one row per kept token; None likewise, and without `has_head`.

    Example:
        >>> routing = Routing(torch.device("cpu"), max_loras=2)
        >>> routing.begin([1, -1])
        >>> routing.step(num_sequences=2, num_tokens=3, num_kept=3)
        >>> routing.seq_slot.tolist()
        [1, 1, 1, -1, -1, -1]
        >>> routing.end()
        >>> routing.seq_slot is None
        True
    """

    def __init__(self, device: torch.device, max_loras: int, *, has_head: bool = False) -> None:
        self.device = device
        self.max_loras = max_loras
        self.rows: Rows | None = None
        self.head_rows: Rows | None = None
        self._token_buffer = _RowBuffer(device, max_loras)
        self._head_buffer = _RowBuffer(device, max_loras) if has_head else None
        self._slots: tuple[int, ...] | None = None
        self._slot_tensor: Tensor | None = None
        self._may_repeat = False
        self._is_packed = self._are_given = False
        self._shape = (0, 0, 0)

    @property
    def seq_slot(self) -> Tensor | None:
        """[num_rows] int32 at a fixed address, the slot of each row; None while all are base."""
        return None if self.rows is None else self.rows.seq_slot

    @property
    def is_active(self) -> bool:
        """Whether a routing has begun and not ended."""
        return self._slots is not None

    def begin(self, slots: Sequence[int], *, may_repeat: bool = False) -> None:
        """Route the coming forwards, until `end`. Until the first `step`: one token per sequence.

        Args:
            slots: one per sequence; -1 is base.
            may_repeat: whether a forward may carry each sequence several times in a row, as beam
                search does.

        Raises:
            RouteError: if a routing is active already, `slots` is empty or a slot does not exist.
        """
        self._take(slots)
        self._may_repeat = may_repeat
        try:
            self.step(len(slots), 1, 1)
        except BaseException:
            self.end()
            raise

    def begin_packed(self, slots: Sequence[int] | Rows, kept: Sequence[int]) -> None:
        """Route one forward whose sequences stand one after the other in one row of the batch.

        Args:
            slots: one per token of `input_ids` [1, num_tokens]; -1 is base. Or rows of the
                caller's, whose slots only the device knows: the caller makes their plan again when
                they change, and a CUDA graph that is captured with them reads them for ever.
            kept: the tokens that the output head sees; with rows of the caller's all of them.

        Raises:
            RouteError: if a routing is active already, `slots` or `kept` is empty, or a slot or a
                kept token does not exist.

        Example:
            >>> routing = Routing(torch.device("cpu"), max_loras=2)
            >>> routing.begin_packed([1, 1, 1, -1, -1], kept=[2, 4])
            >>> routing.step(num_sequences=1, num_tokens=5, num_kept=2)
            >>> routing.seq_slot.tolist()
            [1, 1, 1, -1, -1]
        """
        if isinstance(slots, Rows):
            self._take_rows(slots, kept)
            return
        if not kept or not all(0 <= token < len(slots) for token in kept):
            raise RouteError(
                f"the kept tokens must be some of 0 .. {len(slots) - 1}; given: {list(kept)}"
            )
        self._take(slots)
        self._is_packed = True
        try:
            if self._slot_tensor is not None:
                self.rows = self._token_buffer.write(self._slot_tensor, 1)
                if self._head_buffer is not None:
                    index = torch.tensor(kept, device=self.device)
                    self.head_rows = self._head_buffer.write(self._slot_tensor[index], 1)
        except BaseException:
            self.end()
            raise
        self._shape = (1, len(slots), len(kept))

    def _take_rows(self, rows: Rows, kept: Sequence[int]) -> None:
        """Make the caller's rows those of the coming forward."""
        num_rows = rows.seq_slot.shape[0]
        if list(kept) != list(range(num_rows)):
            raise RouteError(f"all {num_rows} tokens must be kept; given: {list(kept)}")
        self._check_idle()
        self._slots, self._is_packed, self._are_given = (), True, True
        self.rows = rows
        self.head_rows = None if self._head_buffer is None else rows
        self._shape = (1, num_rows, num_rows)

    def _check_idle(self) -> None:
        if self.is_active:
            raise RouteError("a routing is active already; hint: leave `rows` or `generate` first")

    def _take(self, slots: Sequence[int]) -> None:
        """Make the slots those of the coming forwards."""
        self._check_idle()
        if not slots or not all(-1 <= slot < self.max_loras for slot in slots):
            raise RouteError(
                f"there must be one slot per sequence, each -1 (base) .. {self.max_loras - 1}; "
                f"given: {list(slots)}"
            )
        self._slots = tuple(slots)
        if max(slots) >= 0 or self._token_buffer.is_captured:
            self._slot_tensor = torch.tensor(slots, dtype=torch.int32, device=self.device)

    def step(self, num_sequences: int, num_tokens: int, num_kept: int) -> None:
        """Write the slots of the coming forward; free of work when its shape is the last one's.

        Args:
            num_sequences: sequences of the forward.
            num_tokens: tokens of each.
            num_kept: tokens of each that the output head sees.

        Raises:
            RouteError: if no routing is active, the number of sequences does not fit, or the shape
                changes while a CUDA graph is captured.
        """
        if self._slots is None:
            raise RouteError("no routing is active; hint: call `begin` first")
        shape = (num_sequences, num_tokens, num_kept)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing and not self._are_given:
            self._keep_addresses(shape)
        if shape == self._shape:
            return
        if self._is_packed:
            raise RouteError(
                f"slots were given for a packed forward of {self._shape}, the forward has {shape} "
                "(sequences, tokens, kept)"
            )
        repeats, rest = divmod(num_sequences, len(self._slots))
        if rest or repeats < 1 or (repeats > 1 and not self._may_repeat):
            raise RouteError(
                f"the forward has {num_sequences} sequences, but adapters were named for "
                f"{len(self._slots)}; name one adapter (or None) per sequence"
            )
        if self._slot_tensor is not None:
            self.rows = self._token_buffer.write(self._slot_tensor, repeats * num_tokens)
            if self._head_buffer is not None:
                self.head_rows = self._head_buffer.write(self._slot_tensor, repeats * num_kept)
        self._shape = shape

    def end(self) -> None:
        """Route nothing any more: every row is base. Does no harm when nothing is active."""
        self._slots = self._slot_tensor = self.rows = self.head_rows = None
        self._may_repeat = self._is_packed = self._are_given = False
        self._shape = (0, 0, 0)
        for buffer in self._buffers:
            buffer.clear()

    def _keep_addresses(self, shape: tuple[int, int, int]) -> None:
        """Hold still what a graph under capture is about to read."""
        if self.rows is None:
            raise RouteError(
                "a CUDA graph is being captured with base rows only, and would never apply an "
                "adapter; hint: name an adapter for at least one row"
            )
        if shape != self._shape:
            raise RouteError(
                "a CUDA graph is being captured, and the forward has another shape than the last: "
                f"{self._shape}, then {shape} (sequences, tokens, kept)\n"
                "hint: run the same forward once before capturing"
            )
        for buffer in self._buffers:
            buffer.is_captured = True

    @property
    def _buffers(self) -> list[_RowBuffer]:
        return [b for b in (self._token_buffer, self._head_buffer) if b is not None]


class _RowBuffer:
    """Slots of rows, and the plans made of them, at fixed addresses."""

    def __init__(self, device: torch.device, max_loras: int) -> None:
        self.max_loras = max_loras
        self.is_captured = False
        self._device = device
        self._slots = self._allocate(_FIRST_CAPACITY)
        self._plans: dict[int, Plan] = {}

    def _allocate(self, num_rows: int) -> Tensor:
        # Tensors made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            return torch.empty(num_rows, dtype=torch.int32, device=self._device)

    def write(self, slots: Tensor, repeats: int) -> Rows:
        """Each of `slots` [num_sequences] int32 for `repeats` rows."""
        num_rows = slots.shape[0] * repeats
        if num_rows > self._slots.shape[0]:
            if self.is_captured:
                raise RouteError(
                    "a captured CUDA graph reads slots at an address with room for "
                    f"{self._slots.shape[0]} rows; given: {num_rows}\n"
                    "hint: run the largest forward once before capturing"
                )
            self._slots = self._allocate(1 << (num_rows - 1).bit_length())
        seq_slot = self._slots[:num_rows]
        seq_slot.view(-1, repeats).copy_(slots.unsqueeze(1))
        if not self.is_captured and num_rows not in self._plans:
            self._plans.clear()  # prompts have many lengths; only a graph comes back to an old one
        plan = make_plan(seq_slot, self.max_loras, plan=self._plans.get(num_rows))
        self._plans[num_rows] = plan
        return Rows(seq_slot, plan)

    def clear(self) -> None:
        """Make every row base that a captured graph can see."""
        if self.is_captured:
            self._slots.fill_(-1)
            for num_rows, plan in self._plans.items():
                make_plan(self._slots[:num_rows], self.max_loras, plan=plan)
