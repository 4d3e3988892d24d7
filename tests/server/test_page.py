"""The status page: its script in Node.js, and the page itself in a browser, where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from lorafold.engine import Engine, Request, Sampling
from lorafold.runtime import attach
from lorafold.server.app import create_app
from lorafold.server.service import Service
from tests.tiny_models import make_model
from tests.tiny_text import make_tokenizer

NODE = shutil.which("node")
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

STATUS: dict[str, Any] = {
    "model": "tiny",
    "batching": "packed",
    "max_length": 4096,
    "max_loras": 2,
    "slots": {"1": "<b>sql</b>"},
    "base": {"name": "tiny", "slot": None, "running": 1, "waiting": 0, "finished": 2},
    "adapters": [{"name": "<b>sql</b>", "slot": 1, "running": 2, "waiting": 3, "finished": 4}],
    "evictions": 5,
}
# Just enough of a document for the script to write into.
DOCUMENT = """
const element = (tag) => ({
  tag, textContent: "", hidden: true, value: "", children: [], attributes: {}, on: {},
  classList: { toggle() {} },
  append(child) { this.children.push(child); },
  replaceChildren(...children) { this.children = children; },
  setAttribute(name, value) { this.attributes[name] = value; },
  addEventListener(name, listener) { this.on[name] = listener; },
});
const known = {};
globalThis.document = {
  getElementById: (id) => (known[id] ??= element(id)),
  createElement: element,
};
let now = 0;
globalThis.performance = { now: () => now };
globalThis.clearTimeout = () => {};
const asked = [];
let next = null;
globalThis.setTimeout = (look) => { next = look; return 1; };
globalThis.fetch = async (path, { headers }) => {
  asked.push([path, headers.Authorization ?? null]);
  const [status, body] = ANSWERS[Math.min(asked.length, ANSWERS.length) - 1];
  if (status === 0) throw new Error("refused");
  return { status, ok: status === 200, json: async () => body };
};
const settle = () => new Promise((done) => setImmediate(done));
const step = async () => { now += 2000; const look = next; next = null; look(); await settle(); };
const texts = (node) => node.children.map((child) =>
  child.children.length ? texts(child) : child.textContent);
const shown = () => ({
  ...Object.fromEntries(["model", "rate", "peak", "running", "waiting", "tokens", "problem"].map(
    (id) => [id, known[id]?.textContent ?? ""])),
  asksForKey: known["key-form"].hidden === false,
  slots: texts(known.slots ?? element()), rows: texts(known.rows ?? element()),
  points: known.line?.attributes.points ?? "", area: known.area?.attributes.points ?? "",
});
"""


def script(answers: list[tuple[int, Any]], moves: str) -> Any:
    """Run the page's script against answers of the server; `moves` ends in a call of `print`."""
    assert NODE is not None
    page = files("lorafold.server").joinpath("page.js").read_text(encoding="utf-8")
    source = (
        f"const ANSWERS = {json.dumps(answers)};\n{DOCUMENT}\n"
        f"const print = (value) => console.log(JSON.stringify(value));\n"
        f"{page.replace(chr(34) + 'use strict' + chr(34) + ';', '', 1)}\n"
        f"(async () => {{ await settle(); {moves} }})();"
    )
    run = subprocess.run(
        [NODE, "-e", source], capture_output=True, text=True, timeout=30, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def status(base_tokens: int, adapter_tokens: int) -> dict[str, Any]:
    (adapter,) = STATUS["adapters"]
    return STATUS | {
        "answer_tokens": base_tokens + adapter_tokens,
        "base": STATUS["base"] | {"answer_tokens": base_tokens},
        "adapters": [adapter | {"answer_tokens": adapter_tokens}],
    }


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_script_shows_numbers_names_and_rates() -> None:
    answers = [(200, status(1000, 50)), (200, status(1000, 110)), (200, status(1005, 110))]
    shown = script(answers, "await step(); await step(); print(shown());")
    assert shown["model"] == "tiny, packed batches, requests of up to 4,096 tokens"
    assert (shown["running"], shown["waiting"], shown["tokens"]) == ("3", "3", "1,115")
    assert shown["rate"] == "2.5"  # five tokens in two seconds, after sixty
    assert shown["slots"] == ["0: empty", "1: <b>sql</b>"]  # as text: nothing here is markup
    assert shown["rows"] == [
        ["tiny", "", "1", "0", "2", "1,005"],
        ["<b>sql</b>", "1", "2", "3", "4", "110"],
    ]
    assert shown["points"].startswith("595.0,2.0 600.0,")
    assert shown["peak"] == "peak 30.0"
    assert shown["area"] == f"595.0,80 {shown['points']} 600.0,80"
    assert shown["problem"] == ""


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_script_asks_for_a_key_and_goes_on_after_faults() -> None:
    answers: list[tuple[int, Any]] = [
        *((401, {}), (401, {}), (200, status(1, 1)), (0, None), (500, {}), (200, status(2, 1)))
    ]
    moves = """
      const seen = [shown()];
      for (const key of ["bad", "good"]) {
        document.getElementById("key").value = key;
        known["key-form"].on.submit({ preventDefault() {} });
        await settle();
        seen.push(shown());
      }
      for (let i = 0; i < 3; i++) { await step(); seen.push(shown()); }
      print([seen, asked]);
    """
    seen, asked = script(answers, moves)
    assert [each["asksForKey"] for each in seen] == [True, True, False, False, False, False]
    assert [each["problem"] for each in seen] == [
        "",
        "The API key is wrong.",
        "",
        "The server cannot be reached: refused",
        "The server cannot be reached: the server answers 500",
        "",
    ]
    assert asked[:3] == [["/status", None], ["/status", "Bearer bad"], ["/status", "Bearer good"]]
    assert seen[-1]["tokens"] == "3"


@pytest.fixture
def url(adapter_root: Path) -> Iterator[str]:
    """A server in this process, which has answered something."""
    engine = Engine(attach(make_model(), max_loras=2, max_rank=8), make_tokenizer())
    engine.load("a0", adapter_root / "a0")
    engine.answer([Request([5], "a0", Sampling(max_tokens=7, ignore_eos=True))])
    config = uvicorn.Config(create_app(Service(engine, "tiny")), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < end
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(20)
    engine.close(timeout_s=0)


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs {CHROMIUM}")
def test_a_browser_shows_the_page(url: str, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    for at, task in enumerate(([f"--screenshot={picture}"], ["--dump-dom"])):
        run = subprocess.run(
            [
                *(str(CHROMIUM), *FLAGS, f"--user-data-dir={tmp_path / str(at)}"),
                *("--window-size=900,600", "--virtual-time-budget=3000", *task, url),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    assert "<td>a0</td>" in run.stdout
    assert "0: a0" in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000
