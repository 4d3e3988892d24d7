"""vLLM's HTTP server over two hosts, which are two process groups on the loopback of one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: run `make test-vllm`", allow_module_level=True)

import vllm

from tests.integrations.vllm_engine import ADAPTERS, PROMPTS, environment, tokens

pytestmark = pytest.mark.timeout(600)

ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max-loras": 2,
    "max-cpu-loras": 8,
    "max-lora-rank": 16,
    "max-model-len": 128,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 128,
    "tensor-parallel-size": 2,
    "nnodes": 2,
    "master-addr": "127.0.0.1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(folders, tmp_path_factory) -> Iterator[str]:
    """The address of a server whose second rank is on another "host"."""
    root = tmp_path_factory.mktemp("hosts")
    # The command asks for the version of a distribution named vllm; the CPU build has another name.
    named = root / f"vllm-{vllm.__version__}.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n"
    )
    port, master = free_port(), free_port()
    common = ["--enforce-eager", "--enable-lora", "--no-enable-prefix-caching"]
    common += [f"--{key}={value}" for key, value in (ENGINE | {"master-port": master}).items()]
    lora = [f"{name}={folders / name}" for name in ADAPTERS]
    parts = [
        ["--node-rank=1", "--headless"],
        ["--node-rank=0", "--host=127.0.0.1", f"--port={port}", "--lora-modules", *lora],
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folders / "model")]
    address, logs = f"http://127.0.0.1:{port}", [root / "log0", root / "log1"]
    with contextlib.ExitStack() as stack:
        started = []
        for i, (part, log) in enumerate(zip(parts, logs, strict=True)):
            settings = environment(
                PYTHONPATH=os.pathsep.join([str(root), *sys.path]),
                VLLM_CPU_OMP_THREADS_BIND=str(1 - i),
                VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
                GLOO_SOCKET_IFNAME="lo",
            )
            output = stack.enter_context(log.open("w"))
            process = subprocess.Popen(
                [*command, *common, *part], env=settings, stdout=output, stderr=subprocess.STDOUT
            )
            started.append(process)
            stack.callback(stop, process)
        wait_for(address, started, logs)
        yield address


def stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(address: str, started: list[subprocess.Popen], logs: list[Path]) -> None:
    for _ in range(200):
        if any(process.poll() is not None for process in started):
            break
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
        except OSError:
            time.sleep(2)
        else:
            return
    pytest.fail("\n".join(log.read_text()[-3000:] for log in logs))


def post(address: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_answers_are_those_of_two_ranks_on_one_host(server, folders, two_ranks):
    for name, prompt in PROMPTS.items():
        body = {
            "model": name or str(folders / "model"),
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
        }
        status, text = post(f"{server}/v1/completions", body)
        assert status == 200, text
        given = json.loads(text)["choices"][0]["logprobs"]
        expected = two_ranks["alone"][name]
        assert [int(word.strip()[1:]) for word in given["tokens"]] == tokens(expected)
        assert given["token_logprobs"] == [float.fromhex(value) for _, value in expected]


def test_refusals_reach_the_client(server, folders):
    body = {"lora_name": "beyond", "lora_path": str(folders / "beyond")}
    status, text = post(f"{server}/v1/load_lora_adapter", body)
    assert status >= 400
    assert "unmatched-path" in text
