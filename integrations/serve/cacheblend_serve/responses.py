"""Replies that are computed while their clients wait, and no longer than these are there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from fastapi import Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from cacheblend_serve.errors import explained

__all__ = ["event_stream", "unless_left"]

Result = TypeVar("Result")
_LIFE_S = 1.0
# How long a client may leave what is sent unread; then it has gone.
_READER_S = 30.0

# A server that is told to stop finishes its streams; uvicorn ends those that take too long.
AppStatus.enable_automatic_graceful_drain = False


async def unless_left(request: Request, work: Awaitable[Result]) -> Result:
    """Return what is awaited; it is cancelled when the client leaves."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise HTTPException(499, "the client has left")
        return await tasks[0]  # type: ignore[return-value]
    finally:
        await _ended(*tasks)


async def event_stream(events: AsyncGenerator[Any, None], leave: Callable[[], None] = lambda: None) -> Response:
    """Return a reply as server-sent events in JSON, with a sign of life each second; `leave` is called at the end.

    What goes wrong before the first event and the first second is raised here, later it is told as an event.
    """
    first = asyncio.ensure_future(anext(events))

    async def end() -> None:
        await _ended(first)
        await events.aclose()
        leave()

    try:
        if (await asyncio.wait([first], timeout=_LIFE_S))[0]:
            first.result()
    except BaseException:
        await end()
        raise
    return _Events(_told(first, events), end)


class _Events(EventSourceResponse):
    """A stream that is cleaned up after, whether or not it has begun."""

    def __init__(self, told: AsyncGenerator[str, None], end: Callable[[], Awaitable[None]]) -> None:
        life = ServerSentEvent(comment="", sep="\n")
        super().__init__(told, sep="\n", ping=_LIFE_S, ping_message_factory=lambda: life, send_timeout=_READER_S)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            # A response that has no end makes the server close the connection.
            pass
        finally:
            with anyio.CancelScope(shield=True):
                await self._end()


async def _told(first: asyncio.Future[Any], events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    try:
        yield json.dumps(await first)
        async for event in events:
            yield json.dumps(event)
    except Exception as error:
        yield bytes(explained(error).body).decode()
    yield "[DONE]"


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    # The task that waits may be cancelled itself.
    with anyio.CancelScope(shield=True):
        await asyncio.wait(tasks)
