"""The OpenAPI document against the application: whatever it allows is answered as it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorafold.engine import Engine
from lorafold.runtime import attach
from lorafold.server.app import create_app
from lorafold.server.service import Service
from tests.tiny_models import make_model
from tests.tiny_text import make_tokenizer

schemathesis = pytest.importorskip("schemathesis")

OPERATIONS = {
    "GET": ["/health", "/metrics", "/status", "/v1/models", "/v1/models/{model}"],
    "POST": [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ],
}


@pytest.fixture(scope="module")
def document(adapter_root: Path) -> Iterator[Any]:
    lora = attach(make_model(), max_loras=1, max_rank=8)
    engine = Engine(lora, make_tokenizer(), max_length=32, cache_tokens=512)
    engine.load("a0", adapter_root / "a0")
    service = Service(engine, "tiny", adapter_roots=(adapter_root.resolve(),))
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(service))
    engine.close(timeout_s=0)


def test_every_operation_is_documented(document: Any) -> None:
    paths = document.raw_schema["paths"]
    assert {path: [*map(str.upper, methods)] for path, methods in paths.items()} == {
        path: [method] for method, group in OPERATIONS.items() for path in group
    }


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for method, group in OPERATIONS.items() for path in group]
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_document_and_the_application_agree(
    document: Any, method: str, path: str, data: st.DataObject
) -> None:
    """Neither allowed nor twisted requests find an answer that the document does not know."""
    mode = data.draw(st.sampled_from(list(schemathesis.GenerationMode)))
    case = data.draw(document[path][method].as_strategy(generation_mode=mode))
    # A name that exists; put into a twisted request it might make that one right again.
    is_allowed = mode == schemathesis.GenerationMode.POSITIVE
    if is_allowed and isinstance(case.body, dict) and data.draw(st.booleans()):
        case.body["model" if "completions" in path else "lora_name"] = "a0"
    # A prompt may be too long, or a folder absent: no schema says so.
    case.call_and_validate(excluded_checks=[schemathesis.checks.positive_data_acceptance])
