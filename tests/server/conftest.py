"""A tiny model with ten adapters, one server over it for most tests, and a service of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from lorafold.engine import Engine
from lorafold.runtime import attach
from lorafold.server.service import Service
from tests.server.process import Process
from tests.tiny_models import make_model, write_adapter
from tests.tiny_text import make_tokenizer, save_model

KEY = "sk-key"
NUM_ADAPTERS = 10
TARGETS = (["q_proj", "v_proj"], ["o_proj", "up_proj"], ["k_proj", "gate_proj", "down_proj"])


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adapter_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a0 .. a9; a0 .. a5 are loaded by the server, which has three slots."""
    root, model = tmp_path_factory.mktemp("adapters"), make_model()
    for at in range(NUM_ADAPTERS):
        write_adapter(model, root / f"a{at}", TARGETS[at % 3], rank=2 + at % 5, seed=at)
    return root


@pytest.fixture
def service(adapter_root: Path) -> Iterator[Service]:
    lora = attach(make_model(), max_loras=1, max_rank=8)
    engine = Engine(lora, make_tokenizer(), max_running=1, max_waiting=2, cache_tokens=256)
    engine.load("a0", adapter_root / "a0")
    yield Service(engine, "tiny")
    engine.close(timeout_s=0)


@pytest.fixture(scope="session")
def server(model_folder: Path, adapter_root: Path) -> Iterator[Process]:
    loaded = [each for at in range(6) for each in ("--adapter", f"a{at}={adapter_root}/a{at}")]
    process = Process(
        [
            *("--model", model_folder, "--served-model-name", "tiny", *loaded),
            *("--max-loras", 3, "--max-running", 8, "--api-key", KEY),
            *("--allow-runtime-loading", "--adapter-root", adapter_root),
        ],
        api_key=KEY,
    )
    try:
        yield process.wait_until_up()
    finally:
        process.stop()


@pytest.fixture(scope="session")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with server.openai() as client:
        yield client
