"""`lorafold serve`: an OpenAI-compatible server over one model and its adapters."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lorafold.cli.options import Device, adapter_paths
from lorafold.cli.output import notices, refusals, usage_error
from lorafold.device import usable_device
from lorafold.errors import BackendError
from lorafold.peft import parse, ranks_of, targets_of

__all__ = ["serve"]

_HINT = "hint: pip install 'lorafold[server]'"


def serve(  # noqa: PLR0913 (the flags of a command)
    model: Annotated[str, typer.Option(help="A folder with a model, or a name on the hub.")],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="Load it; may be repeated.")
    ] = None,
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters on the device at a time.")] = 8,
    max_rank: Annotated[
        int | None, typer.Option(min=1, help="The largest rank; without it, the adapters' largest.")
    ] = None,
    max_expert_rank: Annotated[
        int | None, typer.Option(min=0, help="Likewise for routed experts, which are then targets.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="A layer's path or its end, such as q_proj, or all-linear; may be repeated. "
            "Without it, all linear layers, and the embedding and head that the adapters change."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the base model; without it, --model.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="LORAFOLD_API_KEY", help="Clients must send it.")
    ] = None,
    allow_runtime_loading: Annotated[
        bool, typer.Option("--allow-runtime-loading", help="Clients may load and unload adapters.")
    ] = False,
    adapter_root: Annotated[
        list[Path] | None, typer.Option(help="They may load from this folder; may be repeated.")
    ] = None,
    batching: Annotated[
        str, typer.Option(help="auto, packed (continuous) or static (one batch after the other).")
    ] = "auto",
    max_running: Annotated[int, typer.Option(min=1, help="Requests in the batch.")] = 32,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 1024,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a request; without it, the model's.")
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option(min=16, help="Tokens in the KV cache; without it, what fits.")
    ] = None,
    host_memory_gib: Annotated[
        float | None,
        typer.Option(min=0, help="For adapters; what does not fit is read again when needed."),
    ] = None,
    max_answer_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a chat's answer that names no limit.")
    ] = 1024,
    drain_seconds: Annotated[
        int, typer.Option(min=0, help="On SIGTERM, time for what runs to end.")
    ] = 60,
    device: Device = None,
) -> None:
    """Serve a model and its adapters: a client names an adapter as its `model`.

    GET / shows what is going on. Listens on this machine only, unless --host says otherwise.
    """
    paths = adapter_paths(adapter or [])
    roots = _roots(adapter_root or [], is_allowed=allow_runtime_loading)
    if batching not in ("auto", "packed", "static"):
        raise usage_error(f"--batching must be auto, packed or static; given: {batching}")
    name = served_model_name or model
    if name in paths:
        raise usage_error(f"--adapter: the name `{name}` is the base model's")
    if api_key is None and not _is_loopback(host):
        notices().print(f"warning: {host} may be reached by others, and there is no --api-key")
    with refusals():
        _check_address(host, port)
        engine = _start_engine(
            model,
            paths,
            device=usable_device(device),
            attaching={
                "max_loras": max_loras,
                "max_rank": max_rank,
                "max_expert_rank": max_expert_rank,
                "targets": target,
            },
            running={
                "batching": batching,
                "max_running": max_running,
                "max_waiting": max_waiting,
                "max_length": max_length,
                "cache_tokens": cache_tokens,
                "host_bytes": None if host_memory_gib is None else int(host_memory_gib * 2**30),
            },
        )
        from lorafold.server.run import run
        from lorafold.server.service import Service

        service = Service(
            engine,
            name,
            api_key=api_key,
            adapter_roots=roots,
            max_answer_tokens=max_answer_tokens,
        )
        run(service, host=host, port=port, drain_seconds=drain_seconds)


def _check_address(host: str, port: int) -> None:
    """Neither a port that is taken nor a missing package should need the model to be noticed."""
    try:
        import fastapi
        import prometheus_client
        import uvicorn
    except ModuleNotFoundError as error:
        raise BackendError(f"serving needs {error.name}, which is not installed\n{_HINT}") from None
    del fastapi, prometheus_client, uvicorn
    from lorafold.server.run import check_address

    check_address(host, port)


def _roots(folders: Sequence[Path], *, is_allowed: bool) -> tuple[Path, ...]:
    """The folders that clients may load from, resolved."""
    if is_allowed != bool(folders):
        raise usage_error(
            "--allow-runtime-loading and --adapter-root go together: clients may load adapters "
            "from inside these folders and from nowhere else"
        )
    for folder in folders:
        if not folder.is_dir():
            raise usage_error(f"--adapter-root must be a folder; given: {folder}")
    return tuple(folder.resolve() for folder in folders)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _start_engine(
    model_path: str,
    paths: dict[str, Path],
    *,
    device: torch.device,
    attaching: dict[str, Any],
    running: dict[str, Any],
) -> Any:
    """Load everything. Adapters are read first: a refusal need not wait for the model."""
    specs = {name: parse(path) for name, path in paths.items()}
    if attaching["max_rank"] is None:
        attaching["max_rank"] = max(ranks_of(specs.values())[0], 16)
    if attaching["targets"] is None:
        attaching["targets"] = targets_of(specs.values())
    from lorafold.engine import Engine
    from lorafold.integrations.transformers import load_model, load_tokenizer
    from lorafold.runtime import attach

    tokenizer = load_tokenizer(model_path)
    lora = attach(load_model(model_path, device=device), **attaching)
    engine = Engine(lora, tokenizer, **running)
    try:
        for name, spec in specs.items():
            engine.load(name, spec)
    except BaseException:
        engine.close(timeout_s=0)
        raise
    return engine
