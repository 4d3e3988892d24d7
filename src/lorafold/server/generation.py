"""POST /v1/completions and /v1/chat/completions: whole, or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from lorafold.engine import Answer, Delta, Sampling, TokenLogprob
from lorafold.engine import Request as EngineRequest
from lorafold.server.answers import Answers, running_answers
from lorafold.server.errors import refusal_of
from lorafold.server.schema import ChatRequest, CompletionRequest, documented
from lorafold.server.service import Service

__all__ = ["build_router"]

_LONG_BODY_BYTES = 32 << 10

_ANSWERS = documented(400, 401, 404, 413, 500, 503, media_type="text/event-stream")


def build_router(service: Service) -> APIRouter:
    """The routes that generate.

    Args:
        service: answers the requests.
    """
    router = APIRouter()

    @router.post("/v1/completions", responses=_ANSWERS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Go on with a prompt, or with each of several."""
        return await _respond(await _made(_Completion, service, body, request), request)

    @router.post("/v1/chat/completions", responses=_ANSWERS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer the last message of a chat."""
        return await _respond(await _made(_Chat, service, body, request), request)

    return router


class _Job:
    """A request of a client: one engine request per choice, and the shape of the answer."""

    object_name = ""
    id_prefix = ""

    def __init__(self, service: Service, body: CompletionRequest | ChatRequest) -> None:
        self.service = service
        self.body = body
        adapter = service.adapter_of(body.model)  # before any work on a long prompt
        self.prompts = self.prompt_ids()
        self.num_choices = body.n or 1
        self.head = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "object": self.object_name,
            "created": int(time.time()),
            "model": body.model,
        }
        self.requests = [
            EngineRequest(prompt, adapter, self.sampling(prompt, index))
            for prompt in self.prompts
            for index in range(self.num_choices)
        ]

    def prompt_ids(self) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def sampling(self, prompt: tuple[int, ...], index: int) -> Sampling:
        raise NotImplementedError

    def choice(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, delta: Delta, state: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def usage(self, num_answer_tokens: int) -> dict[str, Any]:
        num_prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_answer_tokens,
            "total_tokens": num_prompt_tokens + num_answer_tokens,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {"index": index, **self.choice(answer), "finish_reason": answer.finish_reason}
            for index, answer in enumerate(answers)
        ]
        num_tokens = sum(len(answer.tokens) for answer in answers)
        return {**self.head, "choices": choices, "usage": self.usage(num_tokens)}

    async def events(self, answers: Answers) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream."""
        num_tokens, states = 0, [dict[str, Any]() for _ in self.requests]
        async for index, delta in answers:
            num_tokens += len(delta.tokens)
            is_silent = not (delta.text or delta.finish_reason or delta.logprobs)
            if is_silent and states[index]:
                continue
            choice = self.chunk(delta, states[index])
            choice = {"index": index, **choice, "finish_reason": delta.finish_reason}
            yield {**self.head, "choices": [choice]}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield {**self.head, "choices": [], "usage": self.usage(num_tokens)}


class _Completion(_Job):
    object_name, id_prefix = "text_completion", "cmpl"
    body: CompletionRequest

    def prompt_ids(self) -> list[tuple[int, ...]]:
        prompt: Any = self.body.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            prompt = [prompt]
        text_ids = self.service.text_ids
        return [text_ids(each) if isinstance(each, str) else tuple(each) for each in prompt]

    def sampling(self, prompt: tuple[int, ...], index: int) -> Sampling:
        max_tokens = 16 if self.body.max_tokens is None else self.body.max_tokens
        return self.body.sampling(max_tokens, self.body.logprobs, index)

    def choice(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text, "logprobs": self._logprobs(answer.logprobs, 0)}

    def chunk(self, delta: Delta, state: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(delta.logprobs, state.setdefault("offset", 0))
        if logprobs is not None:
            state["offset"] += sum(map(len, logprobs["tokens"]))
        return {"text": delta.text, "logprobs": logprobs}

    def _logprobs(self, places: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not places:
            return None
        text_of = self.service.token_text
        tokens = [text_of(place.token) for place in places]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(place.logprob) for place in places],
            "top_logprobs": [{text_of(t): _finite(p) for t, p in place.top} for place in places],
            "text_offset": [offset + sum(map(len, tokens[:at])) for at in range(len(tokens))],
        }


class _Chat(_Job):
    object_name, id_prefix = "chat.completion", "chatcmpl"
    body: ChatRequest

    def __init__(self, service: Service, body: ChatRequest) -> None:
        super().__init__(service, body)
        if body.stream:
            self.head["object"] = "chat.completion.chunk"

    def prompt_ids(self) -> list[tuple[int, ...]]:
        return [self.service.chat_ids(self.body.messages)]

    def sampling(self, prompt: tuple[int, ...], index: int) -> Sampling:
        limit = self.body.max_completion_tokens or self.body.max_tokens
        if limit is None:
            rest = self.service.engine.max_length - len(prompt)
            limit = max(1, min(rest, self.service.max_answer_tokens))
        num_logprobs = (self.body.top_logprobs or 0) if self.body.logprobs else None
        return self.body.sampling(limit, num_logprobs, index)

    def choice(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(answer.logprobs)}

    def chunk(self, delta: Delta, state: dict[str, Any]) -> dict[str, Any]:
        said = {"content": delta.text} if delta.text or not state else {}
        if not state:
            state["is_begun"] = True
            said["role"] = "assistant"
        return {"delta": said, "logprobs": self._logprobs(delta.logprobs)}

    def _logprobs(self, places: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not places:
            return None
        return {
            "content": [
                {
                    **self._token(place.token, place.logprob),
                    "top_logprobs": [self._token(*each) for each in place.top],
                }
                for place in places
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.service.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, -9999.0)


async def _made(kind: type[_Job], service: Service, body: Any, request: Request) -> _Job:
    """The job of a body; a long prompt is cut into tokens beside the event loop, which streams."""
    num_bytes = int(request.headers.get("content-length", _LONG_BODY_BYTES))
    if num_bytes < _LONG_BODY_BYTES:
        return kind(service, body)
    return await asyncio.to_thread(kind, service, body)


async def _respond(job: _Job, request: Request) -> Response:
    answers = Answers(job.service.engine, job.requests)
    if job.body.stream:
        return _EventStream(answers, job.events)
    async with running_answers(answers, request.receive):
        return JSONResponse(job.whole(await answers.whole()))


class _EventStream(Response):
    """Server-sent events, one per object, until the answers end or the client goes away."""

    media_type = "text/event-stream"

    def __init__(
        self, answers: Answers, events: Callable[[Answers], AsyncIterator[dict[str, Any]]]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        # The length is not known, and there is one from the empty body.
        del self.headers["content-length"]
        self._answers = answers
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with running_answers(self._answers, receive):
            await send(start)
            try:
                async for event in self._events(self._answers):
                    await _send_event(send, json.dumps(event, allow_nan=False))
            except Exception as error:
                # The status is out already: the error is the last event.
                await _send_event(send, json.dumps(refusal_of(error).body))
            else:
                await _send_event(send, "[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
