"""Static batches through `generate`, for models whose sequences cannot be packed into one row.

A batch runs until its last request ends; requests that come meanwhile wait. All else is as with
packed batches: each row has its adapter, its sampling, its stop strings, and streams its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lorafold.engine.answering import Answering
from lorafold.engine.clock import ForwardClock
from lorafold.engine.sampler import choose_tokens
from lorafold.runtime import MultiLora

__all__ = ["StaticBatches"]


class StaticBatches:
    """Whole batches, one after the other.

    A batch reads its prompts at once, all padded to the longest. Requests join it while that makes
    at most `max_tokens` tokens; the others wait for a later one. A prompt that is longer by itself
    runs alone, and may be the first for which a kernel has to be compiled.

    Args:
        lora: the model.
        max_length: tokens of the longest request.
        max_tokens: of the prompts of a batch, padding included.

    Example: `lorafold.engine.Engine` uses it.
    """

    def __init__(self, lora: MultiLora, *, max_length: int, max_tokens: int) -> None:
        self.max_length = max_length
        self.is_continuous = False
        self._lora = lora
        self._max_tokens = max_tokens
        self._prompts: dict[Answering, int] = {}  # of those that hold a place, the lengths
        self._clock = ForwardClock(lora.pool.device)

    def session(self) -> AbstractContextManager[None]:
        """A `with` block in which `advance` may be called."""
        return nullcontext()

    def reserve(self, answering: Answering) -> bool:
        """Find room for a request, or return False."""
        length = len(answering.request.prompt)
        num_tokens = (len(self._prompts) + 1) * max([length, *self._prompts.values()])
        if self._prompts and num_tokens > self._max_tokens:
            return False
        self._prompts[answering] = length
        return True

    def release(self, answering: Answering) -> None:
        """Give the room of a request back."""
        del self._prompts[answering]

    def advance(self, running: Iterable[Answering]) -> None:
        """Run the requests to their ends."""
        batch = list(running)
        model: Any = self._lora.model
        width = max(len(each.request.prompt) for each in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, each in enumerate(batch):
            ids[row, width - len(each.request.prompt) :] = torch.tensor(each.request.prompt)
            mask[row, width - len(each.request.prompt) :] = 1
        rows = _Rows(batch)
        with self._timing(model):
            self._lora.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                adapters=[None if each.loaded is None else each.loaded.key for each in batch],
                generation_config=_settings(model, batch),
                logits_processor=[rows.process],
                stopping_criteria=[rows.are_done],
            )

    def timed(self) -> tuple[int, float]:
        """How many forwards have been done since the last call, and their seconds."""
        return self._clock.read()

    @contextmanager
    def _timing(self, model: Any) -> Iterator[None]:
        """Time the forwards of the model inside the `with` block."""
        hooks = (
            model.register_forward_pre_hook(lambda *_: self._clock.begin()),
            model.register_forward_hook(lambda *_: self._clock.end()),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _settings(model: Any, batch: Sequence[Answering]) -> Any:
    """What `generate` must not decide by itself, as the rows choose tokens and end by themselves.

    What is left out here, or None, would come from the defaults that are saved with the model.
    """
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=max(each.request.sampling.max_tokens for each in batch),
        eos_token_id=model.config.get_text_config().vocab_size,  # no token is this one
        pad_token_id=0,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_new_tokens=0,
    )


class _Rows:
    """What `generate` asks at each step: which tokens come next, and which rows are done."""

    def __init__(self, batch: Sequence[Answering]) -> None:
        self._batch = batch

    def process(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [num_rows, vocab_size] of which only those of the chosen tokens are finite."""
        live = [row for row, each in enumerate(self._batch) if not _is_done(each)]
        tokens = [0] * len(self._batch)
        if live:
            logits = scores[torch.tensor(live, device=scores.device)]
            choices = choose_tokens(logits, [self._batch[row].draw for row in live])
            for row, choice in zip(live, choices, strict=True):
                answering = self._batch[row]
                tokens[row] = choice.token
                answering.num_cached = len(answering.request.prompt) + len(answering.tokens)
                answering.accept(choice)
        chosen = torch.tensor(tokens, device=scores.device).unsqueeze(1)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def are_done(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """[num_rows] bool."""
        done = [_is_done(each) for each in self._batch]
        return torch.tensor(done, device=input_ids.device)


def _is_done(answering: Answering) -> bool:
    return answering.finish_reason is not None or answering.is_cancelled
