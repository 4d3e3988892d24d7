"""Requests of OpenAI's client that repeat themselves: greedy, short, to the last token."""

from __future__ import annotations

from typing import Any

import openai

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who?"}]


def complete(client: openai.OpenAI, model: str, prompt: Any = "hello", **settings: Any) -> Any:
    defaults: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    defaults["extra_body"] = {"ignore_eos": True}
    return client.completions.create(model=model, prompt=prompt, **(defaults | settings))


def chat(client: openai.OpenAI, model: str, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(model=model, **(defaults | settings))


def text(client: openai.OpenAI, model: str, prompt: str = "hello", **settings: Any) -> str:
    return str(complete(client, model, prompt, **settings).choices[0].text)
