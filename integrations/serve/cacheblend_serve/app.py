"""The application: what each address does, and what is said when something goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from cacheblend_rag.errors import CacheBlendError
from cacheblend_serve.answers import ANSWERS
from cacheblend_serve.asker import FromAsker, Server, in_thread
from cacheblend_serve.backend import Backend
from cacheblend_serve.engine_calls import ENGINE_CALLS
from cacheblend_serve.errors import Denied, explained
from cacheblend_serve.guarded import Guarded
from cacheblend_serve.limits import Overload
from cacheblend_serve.pages import PAGE_HEADERS
from cacheblend_serve.settings import ServeConfig
from cacheblend_serve.stock import STOCK

__all__ = ["make_app"]


def make_app(backend: Backend, config: ServeConfig | None = None) -> FastAPI:
    """Return an application that answers with a model.

    Parameters
    ----------
    backend : Backend
        What answers: `EngineBackend` for the engine of this process.
    config : ServeConfig, optional
        The server's settings; by default those of the environment.

    Raises
    ------
    ConfigError
        If the file of keys cannot be read, or holds none.
    """
    server = Server(backend, ServeConfig.of(config))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server.start()
        try:
            yield
        finally:
            await in_thread(server.stop)

    app = FastAPI(title="cacheblend-rag", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    for path, method, answer in (*_SELF, *ANSWERS, *STOCK, *ENGINE_CALLS):
        app.add_api_route(path, answer, methods=[method], response_model=None)
    for kind in (Denied, Overload, CacheBlendError, RecursionError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _explained)
    app.add_middleware(Guarded, server=server)
    return app


async def _explained(_: Request, error: Exception) -> Response:
    return explained(error)


# Whether it lives


async def _healthz() -> dict[str, str]:
    return {"status": "alive"}


async def _readyz(request: Request) -> Response:
    server = request.app.state.server
    is_ready = await in_thread(server.backend.is_ready)
    status = "stopping" if not server.gate.is_open else "ready" if is_ready else "failing"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


async def _metrics(asker: FromAsker) -> Response:
    if asker.owner.is_admin:
        registry = CollectorRegistry()
        registry.register(asker.server.backend)
    else:
        registry = (await asker.library()).metrics.registry
    return Response(await in_thread(generate_latest, registry), media_type="text/plain; version=0.0.4")


# Pages of answers


async def _list_pages(asker: FromAsker) -> Response:
    return HTMLResponse(asker.server.pages.index(asker.owner), headers=PAGE_HEADERS)


async def _show_page(name: str, asker: FromAsker) -> Response:
    page = asker.server.pages.page(asker.owner, name)
    if page is None:
        raise HTTPException(404, "there is no such page, or it is not kept any more")
    return HTMLResponse(page, headers=PAGE_HEADERS)


_SELF: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("/healthz", "GET", _healthz),
    ("/readyz", "GET", _readyz),
    ("/metrics", "GET", _metrics),
    ("/ui", "GET", _list_pages),
    ("/ui/{name}", "GET", _show_page),
)
