"""The application in this process: what a healthy server does not show."""

from __future__ import annotations

import importlib.metadata
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lorafold
from lorafold.engine import Delta, Engine, EngineClosedError, QueueFullError, Request, RequestError
from lorafold.engine.packed import PackedForward
from lorafold.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    BackendError,
    LoraError,
    ModelError,
    PoolFullError,
    RouteError,
)
from lorafold.runtime import attach
from lorafold.server.adapters import confined
from lorafold.server.app import create_app
from lorafold.server.errors import refusal_of
from lorafold.server.service import Service
from tests.engine.asking import wait_until
from tests.tiny_models import make_model
from tests.tiny_text import make_tokenizer


@pytest.fixture
def http(service: Service) -> TestClient:
    return TestClient(create_app(service), raise_server_exceptions=False)


BODY = {"model": "a0", "prompt": "hello", "max_tokens": 4, "temperature": 0}


def post(http: TestClient, **changes: Any) -> Any:
    return http.post("/v1/completions", json=BODY | changes)


def held(service: Service, release: threading.Event) -> None:
    """Submit a request that the engine cannot finish before `release` is set."""
    begun = threading.Event()

    def deliver(delta: Delta) -> None:
        begun.set()
        release.wait(30)

    service.engine.submit(Request([5]), deliver)
    assert begun.wait(30)


def test_a_full_queue_is_503_with_a_time_to_come_back(service: Service, http: TestClient) -> None:
    release = threading.Event()
    held(service, release)
    for _ in range(2):
        service.engine.submit(Request([5]), lambda delta: None)
    refused = post(http)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "queue_full"
    assert refused.json()["error"]["type"] == "overloaded_error"
    release.set()
    wait_until(lambda: post(http).status_code == 200)


def test_a_long_prompt_is_cut_into_tokens_beside_the_event_loop(
    service: Service, http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[int, set[int]] = {}
    text_ids = Service.text_ids

    def noted(self: Service, text: str) -> tuple[int, ...]:
        threads.setdefault(len(text), set()).add(threading.get_ident())
        return text_ids(self, text)[:4]

    monkeypatch.setattr(Service, "text_ids", noted)
    with http:  # one event loop for all requests
        for length in (5, 40_000, 5):
            assert post(http, prompt="x" * length).status_code == 200
        assert post(http, prompt="x" * 40_000, model="nobody").status_code == 404
    assert len(threads[5]) == 1
    assert not threads[5] & threads[40_000]


def test_of_several_prompts_none_runs_if_one_finds_no_place(
    service: Service, http: TestClient
) -> None:
    release = threading.Event()
    held(service, release)
    assert post(http, prompt=["x"] * 3).status_code == 503
    release.set()
    wait_until(lambda: service.engine.stats().finished["a0", "cancelled"] == 2)
    assert service.engine.stats().answer_tokens["a0"] == 0


def test_pinned_slots_are_503(service: Service, http: TestClient, adapter_root: Path) -> None:
    service.engine.lora.load("mine", adapter_root / "a1")
    service.engine.lora.pool.pin("mine")
    refused = post(http)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "pool_full")
    assert post(http, model="tiny").status_code == 200
    streamed = post(http, stream=True)
    assert streamed.status_code == 200
    assert '"code": "pool_full"' in streamed.text
    assert "[DONE]" not in streamed.text


def test_a_closed_engine_is_unhealthy(service: Service, http: TestClient) -> None:
    assert http.get("/health").status_code == 200
    service.engine.close()
    assert http.get("/health").status_code == 503
    assert post(http).status_code == 503


def test_what_fails_inside_is_500_and_says_nothing(
    http: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("secret of /srv/models")

    monkeypatch.setattr(PackedForward, "__call__", fail)
    for changes in ({}, {"n": 2}):
        refused = post(http, **changes)
        assert refused.status_code == 500
        assert refused.json()["error"]["message"] == "the server failed on this request"
    streamed = post(http, stream=True)
    assert "secret" not in streamed.text
    assert '"type": "internal_error"' in streamed.text
    monkeypatch.setattr(Service, "text_ids", fail)
    refused = post(http)
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
    assert "secret of /srv/models" in caplog.text


def test_an_adapter_whose_files_are_gone_is_a_fault_of_the_server(
    adapter_root: Path, tmp_path: Path
) -> None:
    lora = attach(make_model(), max_loras=1, max_rank=8)
    folders = [shutil.copytree(adapter_root / f"a{at}", tmp_path / f"a{at}") for at in range(2)]
    host_bytes = max(lora.read("a", folder).nbytes for folder in folders)
    with Engine(lora, make_tokenizer(), cache_tokens=256, host_bytes=host_bytes) as engine:
        for folder in folders:
            engine.load(folder.name, folder)
        shutil.rmtree(folders[0])  # which host memory has no room for
        http = TestClient(create_app(Service(engine, "tiny")), raise_server_exceptions=False)
        refused, streamed = post(http), post(http, stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "internal_error")
        assert '"code": "internal_error"' in streamed.text
        assert str(tmp_path) not in refused.text + streamed.text
        assert post(http, model="a1").status_code == 200


def test_a_model_that_is_not_there_is_refused_before_its_prompt_is_read(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Service, "text_ids")
    assert post(http, model="nobody").status_code == 404


def test_the_version_is_known_without_an_installation(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", not_installed)
    assert create_app(service).version == lorafold.__version__


def test_loading_is_off_without_adapter_roots(http: TestClient) -> None:
    for path in ("load", "unload"):
        body = {"lora_name": "x", "lora_path": "a0"}
        assert http.post(f"/v1/{path}_lora_adapter", json=body).status_code == 404


def test_a_model_without_a_chat_template_says_what_to_use(
    service: Service, http: TestClient
) -> None:
    service.engine.tokenizer.chat_template = None
    chat = {"model": "a0", "messages": [{"role": "user", "content": "x"}]}
    refused = http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400
    assert "use /v1/completions" in refused.json()["error"]["message"]


def test_a_chat_without_a_limit_ends_at_the_servers(service: Service) -> None:
    chat = {"model": "a0", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    for limit, length in ((7, 7), (10_000, 128 - len("<user>x<assistant>"))):
        bounded = Service(service.engine, "tiny", max_answer_tokens=limit)
        answer = TestClient(create_app(bounded)).post(
            "/v1/chat/completions", json=chat | {"ignore_eos": True}
        )
        assert answer.json()["usage"]["completion_tokens"] == length


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AdapterNotFoundError("x"), 404),
        (AdapterFormatError("x"), 400),
        (AdapterMismatchError("x"), 400),
        (RequestError("x"), 400),
        (PoolFullError("x"), 503),
        (QueueFullError("x", retry_after_s=7), 503),
        (EngineClosedError("x"), 503),
        (LoraError("x"), 500),
        (RouteError("x"), 500),
        (ModelError("x"), 500),
        (BackendError("x"), 500),
        (KeyError("x"), 500),
        (MemoryError("x"), 500),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_error_has_its_status(error: BaseException, status: int) -> None:
    refusal = refusal_of(error)
    assert refusal.status == status
    assert (refusal.message == "x") == (status != 500)
    assert ("Retry-After" in refusal.headers) == (status == 503)
    if isinstance(error, QueueFullError):
        assert refusal.headers["Retry-After"] == "7"


@pytest.mark.parametrize("key", ["plain", "schlüssel", "🔑", "a b"])
def test_keys_of_any_letters_are_compared(service: Service, key: str) -> None:
    guarded = TestClient(create_app(Service(service.engine, "tiny", api_key=key)))
    for given, status in ((key, 200), (key + "x", 401), (key[:-1], 401)):
        headers = [(b"authorization", b"Bearer " + given.encode())]
        assert guarded.get("/v1/models", headers=headers).status_code == status  # type: ignore[arg-type]


def test_an_empty_key_would_be_no_check(service: Service) -> None:
    with pytest.raises(RequestError, match="an API key needs at least one character"):
        Service(service.engine, "tiny", api_key="")


def test_a_path_may_be_relative_to_any_root(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (second / "sql").mkdir(parents=True)
    first.mkdir()
    assert confined("sql", [first, second]) == second / "sql"
    assert confined(str(second / "sql"), [first, second]) == second / "sql"
    (first / "link").symlink_to(second / "sql")
    assert confined("link", [first, second]) == second / "sql"
    with pytest.raises(RequestError):
        confined("link", [first])
    (first / "loop").symlink_to(first / "loop")
    with pytest.raises(RequestError):
        confined("loop", [first, second])


def test_the_page_runs_nothing_from_elsewhere(http: TestClient) -> None:
    page = http.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for path, media_type in (("/", "html"), ("/page.js", "javascript"), ("/page.css", "css")):
        part = http.get(path)
        assert media_type in part.headers["content-type"]
        assert "://" not in part.text
        assert "innerHTML" not in part.text


def test_the_status_names_slots_and_adapters(service: Service, http: TestClient) -> None:
    post(http)
    status = http.get("/status").json()
    assert status["slots"] == {"0": "a0"}
    (adapter,) = status["adapters"]
    assert adapter == {
        "name": "a0",
        "slot": 0,
        "running": 0,
        "waiting": 0,
        "finished": 1,
        "answer_tokens": 4,
    }
    assert (status["model"], status["batching"], status["max_loras"]) == ("tiny", "packed", 1)
