"""What the HTTP server serves: an engine, the base model's name, and the rules for clients."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorafold.engine import Engine, RequestError
from lorafold.errors import AdapterNotFoundError
from lorafold.server.schema import ChatMessage

__all__ = ["Service"]


@dataclass(frozen=True)
class Service:
    """One engine and how it is offered.

    Args:
        engine: answers requests.
        model_name: of the base, as clients say it.
        api_key: that clients must send; None for no check.
        adapter_roots: folders from which clients may load adapters; none for no loading.
        max_answer_tokens: of a chat that names no limit.
        max_body_bytes: of a request.
        started_at: seconds since the epoch.

    Raises:
        RequestError: if the API key is empty.

    Example: `lorafold.server.app.create_app` takes one.
    """

    engine: Engine
    model_name: str
    api_key: str | None = None
    adapter_roots: tuple[Path, ...] = ()
    max_answer_tokens: int = 1024
    max_body_bytes: int = 4 << 20
    started_at: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise RequestError("an API key needs at least one character; None is for no check")

    def adapter_of(self, model: str) -> str | None:
        """The adapter that a client means by `model`; None is base.

        Raises:
            AdapterNotFoundError: if the name is neither the base model's nor a loaded adapter's.
        """
        if model == self.model_name:
            return None
        if all(loaded.name != model for loaded in self.engine.adapters()):
            raise AdapterNotFoundError(f"the model `{model}` does not exist", adapter=model)
        return model

    def text_ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a prompt.

        Raises:
            RequestError: if there are none.
        """
        return self._ids(text, add_special_tokens=True)

    def chat_ids(self, messages: list[ChatMessage]) -> tuple[int, ...]:
        """The tokens of a chat, ready for the answer.

        Raises:
            RequestError: if the model has no chat template, or it refuses the messages.
        """
        tokenizer: Any = self.engine.tokenizer
        if not tokenizer.chat_template:
            raise RequestError(f"`{self.model_name}` has no chat template; use /v1/completions")
        try:
            text = tokenizer.apply_chat_template(
                [message.for_template() for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template refuses the messages: {error}") from error
        return self._ids(text, add_special_tokens=False)

    def token_text(self, token: int) -> str:
        """A token by itself, as log-probabilities show it."""
        return str(self.engine.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        ids = self.engine.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        if not ids:
            raise RequestError("a prompt needs at least one token; given: none")
        return tuple(ids)
