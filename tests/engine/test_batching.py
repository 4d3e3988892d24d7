"""What is prepared for the steps of an engine covers the steps that it takes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from lorafold.engine import Engine, batching
from lorafold.engine.packed import PackedForward
from lorafold.engine.step import Piece
from lorafold.runtime import attach
from tests.engine.asking import TOKENIZER, Listener, request


def test_no_step_has_more_tokens_than_were_compiled_for(
    plain: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled_for, steps, forward = [], [], PackedForward.__call__

    def warm_up(shapes: Any, max_tokens: int, **_: Any) -> int:
        compiled_for.append(max_tokens)
        return 0

    def counted(self: PackedForward, pieces: Sequence[Piece]) -> Tensor:
        steps.append(sum(len(piece.tokens) for piece in pieces))
        return forward(self, pieces)

    monkeypatch.setattr(batching, "warm_up", warm_up)
    monkeypatch.setattr(PackedForward, "__call__", counted)
    lora = attach(copy.deepcopy(plain), max_loras=1, max_rank=8)
    with Engine(lora, TOKENIZER, max_running=24, cache_tokens=24 * 128, chunk=128) as engine:
        first = Listener()
        engine.submit(request(5, max_tokens=9), first)
        assert first.has_begun.wait(30)  # so that the others come all at once
        listeners = [Listener() for _ in range(23)]
        for listener in listeners:
            listener.hold.set()
            engine.submit(request(120, max_tokens=1), listener)
        for listener in (first, *listeners):
            assert listener.answer().finish_reason == "length"
    assert 2000 < max(steps) <= compiled_for[0]


@pytest.mark.parametrize(("chunk", "most"), [(16, 24 + 2048), (100, 24 * 100)])
def test_no_static_batch_has_more_tokens_than_were_compiled_for(
    plain: nn.Module, monkeypatch: pytest.MonkeyPatch, chunk: int, most: int
) -> None:
    """24 prompts of 101 .. 124 tokens, padded to one length, are too many for one batch."""
    compiled_for, rows = [], []

    def warm_up(shapes: Any, max_tokens: int, **_: Any) -> int:
        compiled_for.append(max_tokens)
        return 0

    def counted(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rows.append(kwargs["input_ids"].numel())

    monkeypatch.setattr(batching, "warm_up", warm_up)
    lora = attach(copy.deepcopy(plain), max_loras=1, max_rank=8)
    settings: dict[str, Any] = {"batching": "static", "max_running": 24, "chunk": chunk}
    with Engine(lora, TOKENIZER, **settings) as engine:
        lora.model.register_forward_pre_hook(counted, with_kwargs=True)
        first = Listener()
        engine.submit(request(5, max_tokens=2), first)
        assert first.has_begun.wait(30)  # so that the others come all at once
        listeners = [Listener() for _ in range(24)]
        for at, listener in enumerate(listeners):
            listener.hold.set()
            engine.submit(request(101 + at, max_tokens=2), listener)
        for listener in (first, *listeners):
            assert listener.answer().finish_reason == "length"
    assert compiled_for == [most]
    assert most - 124 < max(rows) <= most
