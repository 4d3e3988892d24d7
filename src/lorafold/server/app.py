"""The HTTP application: OpenAI's routes over one engine.

    GET  /                          a status page                 open
    GET  /health                    200 while requests are taken  open
    GET  /v1/models                 the base model and its adapters
    POST /v1/completions            `model` is the base model or an adapter
    POST /v1/chat/completions       likewise
    POST /v1/load_lora_adapter      only with adapter roots
    POST /v1/unload_lora_adapter    likewise
    GET  /metrics, /status          numbers

Whatever is not open needs the API key, if there is one.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from lorafold import __version__
from lorafold.server import adapters, generation
from lorafold.server.errors import Refusal, add_handlers
from lorafold.server.guard import BodyLimit, KeyCheck
from lorafold.server.metrics import Metrics, status_of
from lorafold.server.schema import documented
from lorafold.server.service import Service

__all__ = ["create_app"]

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


def create_app(service: Service) -> FastAPI:
    """The application.

    Args:
        service: what it offers. The caller closes the engine after the server has stopped.

    Example: `lorafold.server.run` runs it.
    """
    app = FastAPI(title="lorafold", version=__version__, docs_url=None, redoc_url=None)
    add_handlers(app)
    app.include_router(generation.build_router(service))
    app.include_router(adapters.build_router(service))
    _add_numbers(app, service)
    _add_page(app)
    _keep_own_refusals(app)
    app.add_middleware(BodyLimit, max_bytes=service.max_body_bytes)
    if service.api_key is not None:
        open_paths = [*_PAGE, "/health"]
        app.add_middleware(KeyCheck, api_key=service.api_key, open_paths=open_paths)
    return app


def _add_numbers(app: FastAPI, service: Service) -> None:
    metrics = Metrics(service)

    @app.get("/health", responses=documented(503))
    async def health() -> Response:
        """Whether requests are taken."""
        if service.engine.is_open:
            return JSONResponse({"status": "ok"})
        return Refusal(503, "no requests are taken", "closed").response()

    answers = documented(401, media_type="text/plain")

    @app.get("/metrics", responses=answers, response_model=None)
    async def prometheus() -> Response:
        """Numbers for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/status", responses=documented(401))
    async def status() -> dict[str, Any]:
        """Numbers for the status page."""
        return status_of(service)


def _add_page(app: FastAPI) -> None:
    folder = files("lorafold.server")
    for path, (name, media_type) in _PAGE.items():
        content = folder.joinpath(name).read_bytes()

        def part(content: bytes = content, media_type: str = media_type) -> Response:
            return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

        app.add_api_route(path, part, include_in_schema=False)


def _keep_own_refusals(app: FastAPI) -> None:
    """Take the framework's own shape of a wrong body out of the OpenAPI document."""
    document = app.openapi()
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
