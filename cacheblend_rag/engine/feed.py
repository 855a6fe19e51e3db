"""What a thread makes, handed over to readers in other threads and on event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

__all__ = ["Feed"]

Piece = TypeVar("Piece")
Outcome = TypeVar("Outcome")


class Feed(Generic[Piece, Outcome]):
    """Pieces, and an outcome behind the last of them, which is a value or an error.

    Whoever waits in a thread is woken there, and whoever waits on an event loop costs no thread: answers queue for the model for
    a long time, and would use up the few threads that a loop has for everything else.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._outcome: tuple[Outcome] | BaseException | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def start(self, work: Callable[[], Outcome], name: str) -> None:
        """Run `work` in a thread of its own, which may put pieces; what it returns or raises is the outcome."""

        def run() -> None:
            try:
                outcome: tuple[Outcome] | BaseException = (work(),)
            except BaseException as error:  # handed to the readers
                outcome = error
            with self._changed:
                self._outcome = outcome
                self._wake()

        # No daemon: an interpreter that ends while this thread computes, or only lets go of its tensors, would abort.
        threading.Thread(target=run, name=name).start()

    def put(self, piece: Piece) -> None:
        """Hand over the next piece."""
        with self._changed:
            self._pieces.append(piece)
            self._wake()

    def next(self) -> Piece | None:
        """Return the next piece, waiting for it; None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pieces) or self._outcome is not None)
            return self._pieces.popleft() if self._pieces else None

    async def anext(self) -> Piece | None:
        """Do what `next` does, on an event loop."""
        await self._until(lambda: bool(self._pieces) or self._outcome is not None)
        with self._changed:
            return self._pieces.popleft() if self._pieces else None

    def outcome(self) -> Outcome:
        """Return the outcome, waiting for it, or raise the error that it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None)
        return self._opened()

    async def aoutcome(self) -> Outcome:
        """Do what `outcome` does, on an event loop."""
        await self._until(lambda: self._outcome is not None)
        return self._opened()

    def _opened(self) -> Outcome:
        outcome = self._outcome
        assert outcome is not None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]

    async def _until(self, ready: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if ready():
                    return
                woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiting.append(woken)
            try:
                await woken
            finally:
                with self._changed, suppress(ValueError):
                    self._waiting.remove(woken)

    def _wake(self) -> None:
        self._changed.notify_all()
        for woken in self._waiting:
            # A closed loop has no reader left.
            with suppress(RuntimeError):
                woken.get_loop().call_soon_threadsafe(_mark, woken)
        self._waiting.clear()


def _mark(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
