"""The application, and what a request has to be before it is read: for a name of this machine, from a known key, in bounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag.errors import CacheBlendError
from cacheblend_serve import chunks, completions
from cacheblend_serve.backend import Backend
from cacheblend_serve.errors import Denied, Overload, explained
from cacheblend_serve.server import FromLibrary, FromServer, Server, in_thread
from cacheblend_serve.settings import ServeConfig

__all__ = ["make_app"]

router = APIRouter()
# What is asked without a key.
_OPEN = ("/healthz", "/readyz", "/openapi.json")


def make_app(backend: Backend, config: ServeConfig | None = None) -> FastAPI:
    """Return an application that answers with a backend; by default the settings are those of the environment."""
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
    for part in (router, completions.router, chunks.router):
        app.include_router(part)
    for kind in (Denied, Overload, CacheBlendError, RecursionError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _explained)
    app.add_middleware(_Guarded, server=server)
    return app


async def _explained(_: Request, error: Exception) -> Response:
    return explained(error)


@router.get("/healthz")
async def _healthz() -> Response:
    return JSONResponse({"status": "alive"})


@router.get("/readyz")
def _readyz(server: FromServer) -> Response:
    status = "stopping" if not server.gate.is_open else "ready" if server.backend.is_ready() else "failing"
    return JSONResponse({"status": status}, 200 if status == "ready" else 503)


@router.get("/metrics")
def _metrics(request: Request, server: FromServer, library: FromLibrary) -> Response:
    registry = library.metrics.registry
    if request.state.owner.is_admin:
        registry = CollectorRegistry()
        registry.register(server.backend)
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _Guarded:
    """Middleware that refuses requests before they are read, and limits how much is read of each and for how long."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._check(scope)
        except Exception as error:
            await explained(error)(scope, receive, send)
            return
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, self._bounded(receive), noting)
        except asyncio.CancelledError:
            # The server stops, and has waited as long as it does.
            if not begun:
                text = "the server stops, and this was not finished; what was to be stored may have been; ask, or send it again"
                await explained(HTTPException(503, text, {"Connection": "close"}))(scope, receive, send)
            raise

    async def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._server.check_host(headers.get("host", ""))
        length = headers.get("content-length", "0").encode()
        if not length.isdigit() or int(length) > self._server.config.body_bytes:
            raise self._too_large()
        if scope["path"] not in _OPEN:
            owner = await in_thread(self._server.owner, headers.get("authorization"))
            scope.setdefault("state", {})["owner"] = owner

    def _bounded(self, receive: Receive) -> Receive:
        """Return `receive`, within the limits, whatever the headers say."""
        config = self._server.config
        left, until = config.body_bytes, anyio.current_time() + config.body_s

        async def bounded() -> Message:
            nonlocal left, until
            with anyio.CancelScope(deadline=until) as patience:
                message = await receive()
            if patience.cancelled_caught:
                text = (
                    f"the request did not arrive within {config.body_s:g} s; send less at once, or over a faster line"
                )
                raise HTTPException(408, text, {"Connection": "close"})
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
            if not message.get("more_body", False):
                # All that comes now is that the client leaves, which may take as long as it likes.
                until = math.inf
            return message

        return bounded

    def _too_large(self) -> HTTPException:
        most = self._server.config.body_bytes
        text = f"the request is larger than the {most} bytes that are taken; send less at once"
        return HTTPException(413, text, {"Connection": "close"})
