"""What the demo's batch left behind, and what must be the same in every bit: each row alone, rows
without an adapter, and base rows.

Nothing here generates or prints; `lorafold.demo` calls these functions in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lorafold.adapter import LoraWeights
from lorafold.layers.linear import RoutedLinear
from lorafold.ops import LoraPair, apply_lora_delta
from lorafold.verify.check import bits

__all__ = [
    "BitCheck",
    "Call",
    "Generated",
    "Progress",
    "compare_logits",
    "recording",
    "rows_alone",
    "untouched_rows",
]

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done, and of how much (None: not known)."""

_KEPT_TOKENS = 4
_EVERY_STEP = 8


@dataclass(frozen=True)
class BitCheck:
    """Numbers compared bit for bit.

    Args:
        what: what must be equal to what.
        rows: rows compared; a row is one token at one layer, or the logits of one token.
        elements: numbers compared.
        differences: numbers whose bits differ.
        changed: numbers that the adapter changed; None where there is no adapter.
        note: why nothing was compared.

    Example:
        >>> BitCheck("base rows", rows=1, elements=8, differences=0).status
        'same'
        >>> BitCheck("an adapter that does nothing", 1, 8, 0, changed=0).status
        'differs'
    """

    what: str
    rows: int
    elements: int
    differences: int
    changed: int | None = None
    note: str = ""

    @property
    def status(self) -> Literal["same", "differs", "skipped"]:
        """Whether the bits are the same, and something was compared that could have differed."""
        if self.note:
            return "skipped"
        could_differ = self.elements > 0 and self.changed != 0
        return "same" if could_differ and not self.differences else "differs"


@dataclass(frozen=True, eq=False)
class Generated:
    """What greedy decoding of one batch gave.

    Args:
        prompts: [num_sequences, num_prompt_tokens] int64, padded on the left.
        mask: [num_sequences, num_prompt_tokens] int64, 0 where padded.
        tokens: [num_sequences, num_steps] int64.
        logits: [num_sequences, num_steps, vocabulary] float32.
        lengths: tokens of each answer, the one that ends it included.

    Example:
        >>> prompts, tokens = torch.tensor([[0, 5, 6]]), torch.tensor([[7, 8, 0]])
        >>> batch = Generated(prompts, prompts.sign(), tokens, torch.zeros(1, 3, 9), (2,))
        >>> batch.text_ids(0).tolist()
        [[5, 6, 7]]
    """

    prompts: Tensor
    mask: Tensor
    tokens: Tensor
    logits: Tensor
    lengths: tuple[int, ...]

    def text_ids(self, row: int) -> Tensor:
        """[1, n] prompt and answer of a row without padding, without the last token."""
        prompt = self.prompts[row, self.mask[row].bool()]
        return torch.cat((prompt, self.tokens[row, : self.lengths[row]]))[None, :-1]


@dataclass(frozen=True, eq=False)
class Call:
    """Some rows of one call of a `RoutedLinear`, as they were in the batch.

    Args:
        step: number of the forward; 0 is the prompt.
        target: the path of the layer.
        x: [num_sequences, num_kept, in_features] bfloat16.
        base_out: [num_sequences, num_kept, out_features] bfloat16, before the fold.
        out: the same after it: what the model went on with.

    Example:
        >>> x, out = torch.zeros(2, 1, 8).bfloat16(), torch.zeros(2, 1, 4).bfloat16()
        >>> Call(0, "lm_head", x, out, out).step
        0
    """

    step: int
    target: str
    x: Tensor
    base_out: Tensor
    out: Tensor


class _Recorder:
    """Hooks that copy rows out of a running model."""

    def __init__(self, num_sequences: int) -> None:
        self.calls: list[Call] = []
        self._num_sequences = num_sequences
        self._step = -1
        self._base_outs: dict[str, Tensor] = {}

    def before_forward(self, *_: Any) -> None:
        self._step += 1

    def after_base(self, target: str, out: Tensor) -> None:
        if self._is_sampled:
            self._base_outs[target] = self._kept(out)

    def after_layer(self, target: str, x: Tensor, out: Tensor) -> None:
        if self._is_sampled:
            base_out = self._base_outs[target]
            self.calls.append(Call(self._step, target, self._kept(x), base_out, self._kept(out)))

    @property
    def _is_sampled(self) -> bool:
        return self._step <= 1 or self._step % _EVERY_STEP == 0

    def _kept(self, t: Tensor) -> Tensor:
        return t.reshape(self._num_sequences, -1, t.shape[-1])[:, -_KEPT_TOKENS:].clone()


@contextmanager
def recording(model: nn.Module, num_sequences: int) -> Iterator[list[Call]]:
    """Copy rows of every `RoutedLinear` while the model generates, inside the `with` block.

    Taken are the last 4 tokens of every prompt, and of the tokens generated the first and then
    every eighth: all sequences, all layers.

    Args:
        model: an attached model.
        num_sequences: sequences of the batch.

    Returns:
        A context manager; it gives the list that fills while the model runs.

    Example:
        >>> with recording(nn.Linear(2, 2), num_sequences=1) as calls:
        ...     len(calls)
        0
    """
    recorder = _Recorder(num_sequences)

    def watch_base(target: str) -> Callable[..., None]:
        return lambda module, args, out: recorder.after_base(target, out)

    def watch_layer(target: str) -> Callable[..., None]:
        return lambda module, args, out: recorder.after_layer(target, args[0], out)

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(recorder.before_forward).remove)
        for target, layer in model.named_modules():
            if isinstance(layer, RoutedLinear):
                stack.callback(layer.base.register_forward_hook(watch_base(target)).remove)
                stack.callback(layer.register_forward_hook(watch_layer(target)).remove)
        yield recorder.calls


def rows_alone(
    name: str,
    weights: Mapping[str, LoraWeights],
    calls: Sequence[Call],
    adapters: Sequence[str | None],
    progress: Progress,
) -> BitCheck:
    """Compute each recorded row of one adapter again, alone, and compare with the batch.

    Alone means: one row in one call of `apply_lora_delta`, with the adapter's own tensors at their
    true rank. Pool, slot, padding, plan and the other rows are not there.

    Args:
        name: the adapter.
        weights: its factors, as read from its folder.
        calls: what was recorded.
        adapters: the adapter of every sequence of the batch.
        progress: told how many calls are done.

    Example:
        >>> a, b = torch.ones(1, 4).bfloat16(), torch.ones(2, 1).bfloat16()
        >>> x, base_out = torch.ones(1, 1, 4).bfloat16(), torch.zeros(1, 1, 2).bfloat16()
        >>> call = Call(0, "lm_head", x, base_out, base_out + 8)
        >>> weights = {"lm_head": LoraWeights(a, b, scale=2.0)}
        >>> rows_alone("sql", weights, [call], ["sql"], lambda what, done, total: None)
        BitCheck(what='sql: rows alone', rows=1, elements=2, differences=0, changed=2, note='')
    """
    what = f"{name}: rows alone"
    if not weights:
        return BitCheck(what, 0, 0, 0, note="it adapts no linear layer")
    sequences = [i for i, other in enumerate(adapters) if other == name]
    rows = elements = differences = changed = 0
    adapted = [call for call in calls if call.target in weights]
    pairs: dict[str, LoraPair] = {}
    for done, call in enumerate(adapted):
        progress(f"{name}: each row alone", done, len(adapted))
        if call.target not in pairs:
            factors, device = weights[call.target], call.x.device
            a, b = factors.a.to(device), factors.b.to(device)
            pairs[call.target] = LoraPair(a, b, factors.scale)
        in_batch = call.out[sequences].flatten(0, 1)
        base_out = call.base_out[sequences].flatten(0, 1)
        alone = base_out.clone()
        x = call.x[sequences].flatten(0, 1)
        for row in range(len(alone)):
            apply_lora_delta(pairs[call.target], x[row : row + 1], alone[row : row + 1])
        rows += len(alone)
        elements += alone.numel()
        differences += _num_different(alone, in_batch)
        changed += _num_different(base_out, in_batch)
    return BitCheck(what, rows, elements, differences, changed)


def untouched_rows(
    weights: Mapping[str, Mapping[str, LoraWeights]],
    calls: Sequence[Call],
    adapters: Sequence[str | None],
) -> BitCheck:
    """Rows that have no adapter at a layer: its output after the fold is what it was before.

    Args:
        weights: the factors of every adapter, by name.
        calls: what was recorded.
        adapters: the adapter of every sequence of the batch.

    Example:
        >>> x, out = torch.ones(1, 1, 4).bfloat16(), torch.zeros(1, 1, 2).bfloat16()
        >>> untouched_rows({}, [Call(0, "lm_head", x, out, out + 1)], [None]).differences
        2
    """
    rows = elements = differences = 0
    for call in calls:
        sequences = [
            i for i, name in enumerate(adapters) if name is None or call.target not in weights[name]
        ]
        base_out, out = call.base_out[sequences], call.out[sequences]
        rows += base_out.shape[0] * base_out.shape[1]
        elements += out.numel()
        differences += _num_different(base_out, out)
    return BitCheck("rows without adapter", rows, elements, differences)


def compare_logits(
    what: str, batch: Generated, other: Generated, adapters: Sequence[str | None]
) -> BitCheck:
    """The logits of the base rows in two batches of the same prompts.

    Args:
        what: for the result.
        batch: the mixed batch.
        other: a batch without adapters.
        adapters: the adapter of every sequence of the mixed batch.

    Example:
        >>> ids = torch.tensor([[5]])
        >>> batch = Generated(ids, ids.sign(), ids, torch.zeros(1, 1, 9), (1,))
        >>> compare_logits("base", batch, batch, [None]).status
        'same'
    """
    sequences = [i for i, name in enumerate(adapters) if name is None]
    # A batch ends when its last answer does, so one of the two may have gone on for longer.
    num_steps = min(batch.logits.shape[1], other.logits.shape[1])
    ours, theirs = (each.logits[sequences, :num_steps] for each in (batch, other))
    return BitCheck(
        what,
        rows=len(sequences) * num_steps,
        elements=ours.numel(),
        differences=_num_different(ours, theirs),
    )


def _num_different(a: Tensor, b: Tensor) -> int:
    return int((bits(a) != bits(b)).sum())
