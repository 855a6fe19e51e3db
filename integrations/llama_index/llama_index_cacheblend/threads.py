"""Blocking iterators, read from an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import TypeVar

__all__ = ["iterate_in_thread"]

T = TypeVar("T")


async def iterate_in_thread(items: Iterator[T], cancel: Callable[[], None]) -> AsyncGenerator[T, None]:
    """Yield the items of a blocking iterator that is read in a thread of its own.

    The thread starts with the first item asked for. It is none of the loop's executor threads: answers may queue for the model
    for a long time, and must not use those up meanwhile.

    Parameters
    ----------
    items : iterator
        The iterator.
    cancel : callable
        Called when nobody reads any more, at the end too; it should make the iterator end soon.

    Yields
    ------
    Any
        The items.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[tuple[list[T], BaseException | None] | None] = asyncio.Queue()

    def hand_over(entry: tuple[list[T], BaseException | None] | None) -> None:
        # A closed loop has no reader left.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(queue.put_nowait, entry)

    def read() -> None:
        try:
            for item in items:
                hand_over(([item], None))
        except BaseException as error:
            hand_over(([], error))
        else:
            hand_over(None)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(read,), name="cacheblend-read", daemon=True).start()
    try:
        while (entry := await queue.get()) is not None:
            found, error = entry
            if error is not None:
                raise error
            yield found[0]
    finally:
        cancel()
