"""Requests that are too large are refused before they are read."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag.serve.troubles import explained

__all__ = ["LimitedBodies"]


class LimitedBodies:
    """Middleware that takes bodies of so many bytes at most, whatever their headers say of themselves.

    Parameters
    ----------
    app : ASGIApp
        The application.
    most : int
        How many bytes.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        text = f"the request is larger than the {self._most} bytes that are taken; send less at once"
        refusal = HTTPException(413, text, {"Connection": "close"})
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._most:
            await explained(refusal)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise refusal
            return message

        await self._app(scope, counted, send)
