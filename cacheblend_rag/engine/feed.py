"""What a thread makes, handed over to readers in other threads and on event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

__all__ = ["Feed"]

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")
T = TypeVar("T")


class Feed(Generic[Piece, Outcome]):
    """Pieces, and an outcome behind the last of them, which is a value or an error.

    Whoever waits on an event loop costs no thread: answers queue for the model for a long time, and would use up the few threads
    that a loop has for everything else.
    """

    def __init__(self) -> None:
        self._outcome: Future[Outcome] = Future()
        # Each piece comes with the future of the one behind it; behind the last stands None.
        self._next: Future[tuple[Piece, Future[object]] | None] = Future()
        self._last = self._next

    def start(self, work: Callable[[], Outcome], name: str) -> None:
        """Run `work` in a thread of its own, which may put pieces; what it returns or raises is the outcome."""

        def run() -> None:
            try:
                self._outcome.set_result(work())
            except BaseException as error:  # handed to the readers
                self._outcome.set_exception(error)
            self._last.set_result(None)

        # No daemon: an interpreter that ends while this thread computes, or only lets go of its tensors, would abort.
        threading.Thread(target=run, name=name).start()

    def put(self, piece: Piece) -> None:
        """Hand over the next piece."""
        behind: Future[object] = Future()
        self._last.set_result((piece, behind))
        self._last = behind  # type: ignore[assignment]

    def next(self) -> Piece | None:
        """Return the next piece, waiting for it; None when there are no more."""
        return self._open(self._next.result())

    async def anext(self) -> Piece | None:
        """Do what `next` does, on an event loop."""
        return self._open(await _awaited(self._next))

    def outcome(self) -> Outcome:
        """Return the outcome, waiting for it, or raise the error that it is."""
        return self._outcome.result()

    async def aoutcome(self) -> Outcome:
        """Do what `outcome` does, on an event loop."""
        return await _awaited(self._outcome)

    def _open(self, given: tuple[Piece, Future[object]] | None) -> Piece | None:
        if given is None:
            return None
        piece, self._next = given  # type: ignore[assignment]
        return piece


async def _awaited(future: Future[T]) -> T:
    # A reader that is cancelled leaves the work to the others.
    return await asyncio.shield(asyncio.wrap_future(future))
