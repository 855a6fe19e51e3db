"""Work that stores chunks: it goes on to its end, whoever waits for it, and tells how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import Response

from cacheblend_rag.engine import ChunkLibrary
from cacheblend_serve.asker import Asker, in_thread
from cacheblend_serve.errors import explained
from cacheblend_serve.live import EventStream, Whole

__all__ = ["Add", "store"]

Tell = Callable[[int, int], None]
Add = Callable[[ChunkLibrary, Tell], dict[str, Any]]
"""Stores chunks in a library, telling how many are done of how many, and returns what the client is told at the end."""


async def store(asker: Asker, add: Add, *, is_streamed: bool, document: str | None = None) -> Response:
    """Encode and store chunks, to the end even if the client leaves; what is told is stored, whatever becomes of this process.

    Parameters
    ----------
    asker : Asker
        Whose chunks they are.
    add : callable
        See `Add`; called in a thread.
    is_streamed : bool
        Whether the client is told how far it is.
    document : str, optional
        The document that is written, by one at a time.
    """
    server = asker.server
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()

    def tell(done: int, total: int) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, (done, total))

    async def work(library: ChunkLibrary, place: ExitStack) -> dict[str, Any]:
        with place:
            try:
                if document is None:
                    return await in_thread(add, library, tell)
                async with server.writer(asker.owner.tenant, document):
                    return await in_thread(add, library, tell)
            finally:
                steps.put_nowait(None)

    with ExitStack() as entered:
        entered.enter_context(server.gate.pass_through())
        library = await asker.library()
        task = server.begin(work(library, entered.pop_all()))
    if is_streamed:
        return EventStream(_progress(steps, task), server.config.reader_s, explained, tells_life=True)
    return Whole(partial(asyncio.shield, task), server.config.reader_s, explained)


async def _progress(
    steps: asyncio.Queue[tuple[int, int] | None], task: asyncio.Task[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    while (step := await steps.get()) is not None:
        yield {"done": step[0], "total": step[1]}
    yield await asyncio.shield(task)
