"""Responses that are computed while their clients wait, and no longer than these are there."""

from __future__ import annotations

import asyncio
import json
import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
from fastapi.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

__all__ = ["EventStream", "Whole"]

_LIFE_S = 1.0
# A comment, which readers of server-sent events pass over.
_LIFE = ":\n\n"

Explain = Callable[[Exception], Response]


class _Live(Response):
    """A response that ends, and what computes it is cancelled, when its client has gone.

    Parameters
    ----------
    reader_s : float
        Seconds that what is sent may be left unread before the client counts as gone.
    explain : callable
        Makes the response that tells of an error.
    end : callable, optional
        Called at the end, however it came.
    """

    def __init__(self, reader_s: float, explain: Explain, end: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._reader_s = reader_s
        self._explain = explain
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            async with anyio.create_task_group() as group:

                async def listen() -> None:
                    while (await receive())["type"] != "http.disconnect":
                        pass
                    group.cancel_scope.cancel()

                async def send_in_time(message: Message) -> None:
                    # A response that then has no end makes the server close the connection.
                    group.cancel_scope.deadline = anyio.current_time() + self._reader_s
                    await send(message)
                    group.cancel_scope.deadline = math.inf

                group.start_soon(listen)
                await self._respond(scope, receive, send_in_time)
                group.cancel_scope.cancel()
        finally:
            if self._end is not None:
                self._end()

    @abstractmethod
    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""


class Whole(_Live):
    """A reply in one piece.

    Parameters
    ----------
    make : callable
        Makes what is sent as JSON.
    reader_s, explain, end
        As above.
    """

    def __init__(
        self,
        make: Callable[[], Awaitable[Any]],
        reader_s: float,
        explain: Explain,
        end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(reader_s, explain, end)
        self._make = make

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response: Response = JSONResponse(await self._make())
        except Exception as error:
            response = self._explain(error)
        await response(scope, receive, send)


class EventStream(_Live):
    """A reply as server-sent events, with a sign of life each second that has none.

    What goes wrong before the first of either is told as if there were to be none, later as an event.

    Parameters
    ----------
    events : AsyncGenerator
        What is sent as JSON, an event each.
    reader_s, explain, end
        As above.
    """

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        reader_s: float,
        explain: Explain,
        end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(reader_s, explain, end)
        self._events = events

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def write(text: str) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        async with aclosing(self._events), aclosing(_with_life(self._events)) as steps:
            try:
                async for event in steps:
                    await write(_LIFE if event is None else _data(json.dumps(event)))
            except Exception as error:
                response = self._explain(error)
                if not has_begun:
                    await response(scope, receive, send)
                    return
                await write(_data(bytes(response.body).decode()))
            await write(_data("[DONE]"))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _data(text: str) -> str:
    return f"data: {text}\n\n"


async def _with_life(events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield what comes, and None where nothing has come for a while."""
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            if not (await asyncio.wait([coming], timeout=_LIFE_S))[0]:
                yield None
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            yield event
            coming = asyncio.ensure_future(anext(events))
    finally:
        coming.cancel()
        # A client that left has cancelled this task too, and a generator can be closed only while it is not running.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([coming])
