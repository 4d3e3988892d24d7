"""One request on its way: what is computed, what is said, and how it ends."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

from lorafold.engine.request import Delta, FinishReason, Request, TokenLogprob
from lorafold.engine.sampler import Choice, Draw
from lorafold.engine.shelf import Loaded
from lorafold.engine.text import TextStream

__all__ = ["Answering"]

_log = logging.getLogger(__name__)


class Answering:
    """The state of one request. Only the engine's thread changes it; any thread may cancel it.

    Args:
        request: what was asked; its seed is set.
        loaded: the adapter that it was accepted with; None is base.
        deliver: is given every delta, in the engine's thread; must not wait.
        tokenizer: turns tokens into text.
        end_tokens: end-of-sequence tokens.

    Attributes:
        slot: of the adapter in the pool, held while the request runs; -1 is base or not running.
        tokens: of the answer so far.
        num_cached: leading tokens of prompt and answer whose keys and values are in the KV cache.
        finish_reason: None until the end.
        at_end: called at the end, before the last delta is delivered.

    Example:
        >>> from lorafold.engine.request import Sampling
        >>> class Letters:
        ...     def decode(self, ids, **settings):
        ...         return "".join(map(chr, ids))
        >>> said = []
        >>> request = Request([1, 2], sampling=Sampling(max_tokens=2))
        >>> answering = Answering(request, None, said.append, Letters(), end_tokens=[0])
        >>> answering.accept(Choice(ord("H")))
        >>> answering.accept(Choice(ord("i")))
        >>> [delta.text for delta in said], answering.finish_reason
        (['H', 'i'], 'length')
    """

    def __init__(
        self,
        request: Request,
        loaded: Loaded | None,
        deliver: Callable[[Delta], None],
        tokenizer: Any,
        end_tokens: Collection[int],
    ) -> None:
        self.request = request
        self.loaded = loaded
        self.slot = -1
        self.tokens: list[int] = []
        self.num_cached = 0
        self.finish_reason: FinishReason | None = None
        self.is_cancelled = False
        self.at_end: Callable[[Answering], None] = lambda _: None
        self._deliver = deliver
        self._text = TextStream(tokenizer, request.sampling.stop)
        self._unsaid: Choice | None = None
        # Where in the text their tokens begin, and the log-probabilities that wait for that text.
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()
        self._end_tokens = () if request.sampling.ignore_eos else end_tokens

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    @property
    def draw(self) -> Draw:
        """How the next token is chosen."""
        return Draw(self.request.sampling, len(self.tokens))

    @property
    def may_end(self) -> bool:
        """Whether the latest token may be the last one; a stop string is only found in its text."""
        sampling = self.request.sampling
        return (
            bool(sampling.stop)
            or len(self.tokens) == sampling.max_tokens
            or self.tokens[-1] in self._end_tokens
        )

    def accept(self, choice: Choice) -> None:
        """Take the next token of the answer, and deliver what it adds."""
        self.take(choice)
        self.say()

    def take(self, choice: Choice) -> None:
        """Take the next token of the answer, all but `say`, which must come before the next one."""
        self.tokens.append(choice.token)
        self._unsaid = choice

    def say(self) -> None:
        """Deliver what the latest token adds, and end with it if it is the last one.

        Does nothing when that was done, or the answer has ended meanwhile. A tokenizer that fails
        on the token ends this answer and no others.
        """
        choice, self._unsaid = self._unsaid, None
        if choice is None or self.finish_reason is not None:
            return
        if choice.logprob is not None:
            self._logprobs.append((self._text.num_read, choice.logprob))
        try:
            text, self.finish_reason = self._read(choice.token)
        except Exception as error:
            self.finish("error", error)
            return
        self._send(Delta(text, (choice.token,), tuple(self._shown()), self.finish_reason))

    def finish(self, reason: FinishReason, error: BaseException | None = None) -> None:
        """End the answer before its time, if its latest token has not ended it.

        Text that was held back is not delivered, and neither are its tokens' log-probabilities:
        nobody knows how it would have gone on.
        """
        self.say()
        if self.finish_reason is None:
            self.finish_reason = reason
            self._send(Delta(finish_reason=reason, error=error))

    def _read(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that the latest token adds, and why the answer ends with it, if it does."""
        is_end = token in self._end_tokens
        text = "" if is_end else self._text.push(token)
        is_last = len(self.tokens) == self.request.sampling.max_tokens
        if is_end or is_last:
            text += self._text.flush()
        if is_end or self._text.is_stopped:
            return text, "stop"
        return text, "length" if is_last else None

    def _shown(self) -> Iterator[TokenLogprob]:
        """The log-probabilities that are due: of tokens that begin in the text that has been said.

        At the end all are, but for those of tokens that begin where a stop string does, or after.
        """
        is_whole = self.finish_reason is not None and not self._text.is_stopped
        while self._logprobs and (is_whole or self._logprobs[0][0] < self._text.num_said):
            yield self._logprobs.popleft()[1]

    def _send(self, delta: Delta) -> None:
        try:
            if delta.finish_reason is not None:
                self.at_end(self)
        finally:
            # Even if the books cannot be kept, as on a device that is gone, nobody waits for ever.
            self._tell(delta)

    def _tell(self, delta: Delta) -> None:
        try:
            self._deliver(delta)
        except Exception:
            # A listener at fault, or gone with its event loop, is no reason to stop the others.
            _log.warning("a delta could not be delivered; its request is cancelled", exc_info=True)
            self.is_cancelled = True
