"""What a request has to be before it is read: for a name of this machine, from somebody who may ask, neither large nor slow."""

from __future__ import annotations

import asyncio
import math

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_serve.asker import Server, in_thread
from cacheblend_serve.errors import explained

__all__ = ["Guarded"]

# What is asked without a key.
_OPEN = ("/healthz", "/readyz", "/openapi.json")


class Guarded:
    """Middleware that refuses requests before they are read, and reads only so many bytes for so long.

    Parameters
    ----------
    app : ASGIApp
        The application; it finds who asks in the request's state, as ``owner``.
    server : Server
        Knows who may ask, and the limits.
    """

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
        path = scope["path"]
        if path not in _OPEN:
            owner = await in_thread(self._server.owner, headers.get("authorization"), path.startswith("/ui"))
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
        text = (
            f"the request is larger than the {self._server.config.body_bytes} bytes that are taken; send less at once"
        )
        return HTTPException(413, text, {"Connection": "close"})
