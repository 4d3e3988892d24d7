"""From tokens to text, one token at a time: no half characters, and nothing after a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["TextStream"]

_HALF = "\ufffd"  # what a tokenizer gives for bytes that are no whole character yet


class TextStream:
    """The text of an answer as its tokens come in.

    The texts that `push` and `flush` return add up to the whole answer.

    Args:
        tokenizer: of transformers, or anything with its `decode`.
        stop: strings before which the text ends.

    Attributes:
        is_stopped: whether a stop string has been found.
        num_said: characters that have been returned.

    Example:
        >>> class Letters:
        ...     def decode(self, ids, **settings):
        ...         return "".join(map(chr, ids))
        >>> text = TextStream(Letters(), stop=["cd"])
        >>> [text.push(ord(letter)) for letter in "abcxcd"]
        ['a', 'b', '', 'cx', '', '']
        >>> text.is_stopped
        True
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self.num_said = 0
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        # Tokens before `_context` are done with; those up to `_shown` are in the text already, and
        # are decoded again because how a token reads depends on the one before.
        self._context = self._shown = 0
        self._held = ""

    @property
    def num_read(self) -> int:
        """Characters before the next token: what has been returned, and what is held back."""
        return self.num_said + len(self._held)

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        self._ids.append(token)
        text = self._decode(self._ids[self._context :])
        if text.endswith(_HALF):
            return ""
        return self._release(self._take(text))

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        if self.is_stopped:
            return ""
        rest = self._release(self._take(self._decode(self._ids[self._context :])))
        if self.is_stopped:
            return rest
        held, self._held = self._held, ""
        self.num_said += len(held)
        return rest + held

    def _take(self, text: str) -> str:
        """The part of `text`, read from the context on, that is new."""
        new = text[len(self._decode(self._ids[self._context : self._shown])) :]
        self._context, self._shown = self._shown, len(self._ids)
        return new

    def _release(self, new: str) -> str:
        """Of the held and the new text, what cannot belong to a stop string."""
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, end = True, min(found)
            self._held = ""
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
            self._held = text[end:]
        self.num_said += end
        return text[:end]

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
