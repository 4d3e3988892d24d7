"""GET /v1/models, and loading and unloading at run time, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from lorafold.engine import RequestError
from lorafold.errors import AdapterError, AdapterNotFoundError
from lorafold.server.schema import (
    LoadRequest,
    ModelCard,
    ModelList,
    UnloadRequest,
    documented,
)
from lorafold.server.service import Service

__all__ = ["build_router", "confined"]

_ANSWERS = documented(400, 401, 404, 413, 500, media_type="text/plain")


def build_router(service: Service) -> APIRouter:
    """The routes about models; loading and unloading only if the service has adapter roots.

    Args:
        service: whose engine holds the adapters.
    """
    router = APIRouter()

    @router.get("/v1/models", responses=documented(401))
    async def models() -> ModelList:
        """The base model and its adapters."""
        return ModelList(data=_cards(service))

    @router.get("/v1/models/{model:path}", responses=documented(401, 404))
    async def model(model: str) -> ModelCard:
        """One of them."""
        for card in _cards(service):
            if card.id == model:
                return card
        raise AdapterNotFoundError(f"the model `{model}` does not exist", adapter=model)

    if service.adapter_roots:
        _add_loading(router, service)
    return router


def _add_loading(router: APIRouter, service: Service) -> None:
    one_at_a_time = asyncio.Lock()

    @router.post("/v1/load_lora_adapter", responses=_ANSWERS, response_model=None)
    async def load_lora_adapter(body: LoadRequest) -> Response:
        """Load an adapter from a folder inside the adapter roots."""
        name = body.lora_name
        async with one_at_a_time:
            is_taken = any(loaded.name == name for loaded in service.engine.adapters())
            if name == service.model_name or (is_taken and not body.load_inplace):
                raise RequestError(
                    f"the name `{name}` is taken; hint: load_inplace replaces an adapter"
                )
            folder = confined(body.lora_path, service.adapter_roots)
            try:
                await asyncio.to_thread(service.engine.load, name, folder)
            except AdapterError as error:
                # Where the roots are is not the client's business.
                message = str(error).replace(str(folder), body.lora_path)
                error.args = (message, *error.args[1:])
                raise
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", responses=_ANSWERS, response_model=None)
    async def unload_lora_adapter(body: UnloadRequest) -> Response:
        """Unload an adapter; requests that were accepted with it run to their end."""
        await asyncio.to_thread(service.engine.unload, body.lora_name)
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(text)


def confined(path: str, roots: Sequence[Path]) -> Path:
    """The folder that a client means, with all symbolic links followed, inside one of the roots.

    Args:
        path: as the client gives it; a relative one is looked for in each root.
        roots: folders, resolved.

    Raises:
        RequestError: if there is no such folder, or it or a file in it is outside. What is outside
            and what does not exist look alike.

    Example:
        >>> confined("../elsewhere", [Path("/no/such/root")])
        Traceback (most recent call last):
        lorafold.engine.errors.RequestError: `lora_path` must be a folder inside an adapter root ...
    """
    for root in roots:
        try:
            folder = (root / path).resolve(strict=True)
            members = [member.resolve(strict=True) for member in folder.iterdir()]
        except (OSError, RuntimeError, ValueError):
            continue
        is_inside = any(folder.is_relative_to(each) for each in roots)
        if is_inside and all(any(m.is_relative_to(each) for each in roots) for m in members):
            return folder
    raise RequestError(
        "`lora_path` must be a folder inside an adapter root, and so must all that links in it "
        f"point to; given: {path}"
    )


def _cards(service: Service) -> list[ModelCard]:
    base, length = service.model_name, service.engine.max_length
    cards = [
        ModelCard(
            id=base, created=int(service.started_at), root=base, parent=None, max_model_len=length
        )
    ]
    cards += [
        ModelCard(
            id=loaded.name,
            created=int(loaded.loaded_at),
            root=Path(loaded.path).name,
            parent=base,
            max_model_len=length,
        )
        for loaded in service.engine.adapters()
    ]
    return cards
