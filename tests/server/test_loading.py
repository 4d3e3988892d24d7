"""Adapters that are loaded, replaced and unloaded over HTTP while requests run."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from lorafold.pool import Pool
from lorafold.server.app import create_app
from lorafold.server.service import Service
from tests.server.asking import complete, text
from tests.server.process import Process


def test_others_are_answered_while_an_adapter_is_unloaded(
    service: Service, adapter_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow unload holds up neither the event loop nor the engine."""
    has_begun, may_end, ends = threading.Event(), threading.Event(), []
    evict = Pool.evict

    def slow(pool: Pool, name: str) -> None:
        if name.startswith("a1@"):
            has_begun.set()
            ends.append(may_end.wait(20))
        evict(pool, name)

    monkeypatch.setattr(Pool, "evict", slow)
    service.engine.load("a1", adapter_root / "a1")
    app = create_app(replace(service, adapter_roots=(adapter_root,)))
    with TestClient(app) as http, ThreadPoolExecutor(1) as threads:
        body = {"lora_name": "a1"}
        unloading = threads.submit(http.post, "/v1/unload_lora_adapter", json=body)
        assert has_begun.wait(20)
        asked = {"model": "a0", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
        answered = http.post("/v1/completions", json=asked)
        streamed = http.post("/v1/completions", json=asked | {"stream": True})
        names = [model["id"] for model in http.get("/v1/models").json()["data"]]
        may_end.set()
        assert unloading.result(20).status_code == 200
    assert answered.json()["usage"]["completion_tokens"] == 4
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert names == ["tiny", "a0"]
    assert ends == [True]  # it waited for the others, and not they for it


class TestLoading:
    """Adapters come and go while requests run."""

    def post(self, server: Process, path: str, **body: Any) -> httpx.Response:
        with server.http() as http:
            return http.post(f"/v1/{path}_lora_adapter", json=body)

    def test_an_adapter_is_loaded_used_replaced_and_unloaded(
        self, server: Process, client: openai.OpenAI, adapter_root: Path
    ) -> None:
        loaded = self.post(server, "load", lora_name="new", lora_path=str(adapter_root / "a7"))
        assert loaded.status_code == 200
        assert loaded.text == "Success: LoRA adapter 'new' added successfully."
        first = text(client, "new")
        taken = self.post(server, "load", lora_name="new", lora_path="a8")
        assert taken.status_code == 400
        assert "the name `new` is taken" in taken.json()["error"]["message"]
        assert text(client, "new") == first
        self.post(server, "load", lora_name="new", lora_path="a8", load_inplace=True)
        assert text(client, "new") != first
        assert "new" in {model.id for model in client.models.list()}
        gone = self.post(server, "unload", lora_name="new")
        assert gone.text == "Success: LoRA adapter 'new' removed successfully."
        with pytest.raises(openai.NotFoundError):
            text(client, "new")
        assert self.post(server, "unload", lora_name="new").status_code == 404
        assert self.post(server, "load", lora_name="tiny", lora_path="a7").status_code == 400

    def test_loading_and_unloading_change_no_running_answer(
        self, server: Process, client: openai.OpenAI
    ) -> None:
        self.post(server, "load", lora_name="swap", lora_path="a6")
        expected = text(client, "swap", max_tokens=60)
        stream = complete(client, "swap", max_tokens=60, stream=True)
        said = next(stream).choices[0].text
        self.post(server, "load", lora_name="swap", lora_path="a9", load_inplace=True)
        other = text(client, "swap", max_tokens=60)
        self.post(server, "unload", lora_name="swap")
        said += "".join(chunk.choices[0].text for chunk in stream)
        assert said == expected
        assert other != expected

    def test_paths_outside_the_root_look_like_paths_that_do_not_exist(
        self, server: Process, adapter_root: Path, model_folder: Path
    ) -> None:
        outside = adapter_root.parent / "outside"
        outside.mkdir(exist_ok=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (outside / name).write_bytes((adapter_root / "a0" / name).read_bytes())
        (adapter_root / "link").symlink_to(outside)
        half = adapter_root / "half"
        half.mkdir()
        (half / "adapter_config.json").write_bytes(
            (adapter_root / "a0" / "adapter_config.json").read_bytes()
        )
        (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
        inside = adapter_root / "inside"
        inside.symlink_to(adapter_root / "a0")
        for path in (
            *(str(outside), "../outside", "a0/../../outside", "link", "half", "no-such", ""),
            *(
                "/etc",
                "/",
                "~",
                f"{adapter_root}/../outside",
                str(model_folder),
                "a0/adapter_config.json",
            ),
            *("a" * 4000, "a0\x00", "//etc/passwd", "file:///etc", "."),
        ):
            refused = self.post(server, "load", lora_name="escape", lora_path=path)
            assert refused.status_code == 400, path
            if path not in ("", "a0\x00"):
                assert "must be a folder inside an adapter root" in refused.text, path
        # A link that stays inside is fine.
        assert self.post(server, "load", lora_name="inside", lora_path="inside").status_code == 200
        self.post(server, "unload", lora_name="inside")

    def test_a_broken_adapter_is_refused_with_its_reason_but_not_with_the_servers_paths(
        self, server: Process, adapter_root: Path
    ) -> None:
        broken = adapter_root / "broken"
        broken.mkdir()
        (broken / "adapter_config.json").write_text("{}")
        refused = self.post(server, "load", lora_name="broken", lora_path="broken")
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "adapter_format"
        assert str(adapter_root) not in refused.text
