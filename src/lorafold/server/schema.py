"""What comes in and goes out over HTTP, in OpenAI's shapes.

A field that is not known is refused, and so is a known one that is not supported unless it says
what is done anyway: nothing a client asks for is dropped in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lorafold.engine import Sampling

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "ErrorBody",
    "LoadRequest",
    "ModelCard",
    "ModelList",
    "UnloadRequest",
    "documented",
]

_Text = Annotated[str, Field(max_length=1 << 20)]
_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1 << 18)]
_Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    """What a stream tells besides the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class _Generation(_Body):
    """What completions and chats have in common."""

    # Where a value other than these would change the answer, it is refused.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "echo": (None, False),
        "frequency_penalty": (None, 0),
        "logit_bias": (None, {}),
        "presence_penalty": (None, 0),
        "suffix": (None, ""),
        "functions": (None, []),
        "function_call": (None, "none"),
        "modalities": (None, ["text"]),
        "response_format": (None, {"type": "text"}),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
    }

    model: _Name
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, gt=0, le=1)
    n: int | None = Field(1, ge=1, le=16)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, values in cls.neutral.items():
            if name in data and name not in cls.model_fields and data[name] not in values:
                raise ValueError(f"`{name}` is not supported; leave it out")
        return {key: value for key, value in data.items() if key not in cls.neutral}

    @model_validator(mode="after")
    def _check_options(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` needs `stream`")
        return self

    def sampling(self, max_tokens: int, num_logprobs: int | None, index: int) -> Sampling:
        """How the tokens of choice number `index` are chosen."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=seed,
            stop=tuple(stop),
            num_logprobs=num_logprobs,
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: _Text | Annotated[list[_Text] | list[_Ids], Field(min_length=1, max_length=64)] | _Ids
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)


class TextPart(_Body):
    """A piece of a message."""

    type: Literal["text"]
    text: _Text


class ChatMessage(BaseModel):
    """A message of a chat; other fields, which clients repeat of answers, must be empty."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: _Text | Annotated[list[TextPart], Field(max_length=256)]
    name: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _check_content(cls, content: Any) -> Any:
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            return content
        raise ValueError("`content` must be a text, or a list of parts of the type `text`")

    @model_validator(mode="after")
    def _check_rest(self) -> ChatMessage:
        filled = [name for name, value in (self.model_extra or {}).items() if value]
        if filled:
            raise ValueError(f"`{filled[0]}` in a message is not supported")
        return self

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=1024)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`")
        return self


class LoadRequest(_Body):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
    load_inplace: bool = False


class UnloadRequest(_Body):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: _Name
    lora_int_id: int | None = None


class ModelCard(BaseModel):
    """The base model, or an adapter: its parent is the base model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["lorafold"] = "lorafold"
    root: str
    parent: str | None
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


def documented(*refusals: int, media_type: str | None = None) -> dict[int | str, dict[str, Any]]:
    """What an operation may answer, for the OpenAPI document.

    Args:
        refusals: the statuses that are not a success.
        media_type: of a success that is not JSON, or not always.
    """
    answers: dict[int | str, dict[str, Any]] = {s: {"model": ErrorBody} for s in refusals}
    if media_type == "text/event-stream":  # a schema would be taken for that of one event
        answers[200] = {"content": {media_type: {}}}
    elif media_type is not None:
        answers[200] = {"content": {media_type: {"schema": {"type": "string"}}}}
    return answers
