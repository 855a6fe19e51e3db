"""Where the runs of one batch wait for each other, so that the engine is asked once for all of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["AsyncMeeting", "ThreadMeeting"]

Ask = TypeVar("Ask")
Reply = TypeVar("Reply")


class ThreadMeeting(Generic[Ask, Reply]):
    """Gathers what the threads of a batch ask, until all that can be there are.

    Every run takes part, whether it comes to ask or not: its answer may be found in a cache, or its prompt may be wrong. The last
    one that was waited for answers for all, or, when it left without asking, one of those that wait.

    Parameters
    ----------
    answer : callable
        Answers everything that was gathered, in order.
    members : int
        Runs of the batch.
    at_once : int
        Runs that are under way at the same time, at most.
    """

    def __init__(self, answer: Callable[[list[Ask]], Sequence[Reply]], members: int, at_once: int) -> None:
        self._answer = answer
        self._left = members
        self._at_once = at_once
        self._broken = False
        self._changed = threading.Condition()
        self._waiting: list[tuple[Ask, Future[Reply]]] = []

    def ask(self, ask: Ask) -> Reply:
        """Wait for the others, and return the reply."""
        reply: Future[Reply] = Future()
        with self._changed:
            self._waiting.append((ask, reply))
            self._changed.notify_all()
            self._changed.wait_for(lambda: reply.done() or self._all_here())
            gathered: list[tuple[Ask, Future[Reply]]] = []
            if not reply.done():
                gathered, self._waiting = self._waiting, []
        if gathered:
            self._serve(gathered)
        return reply.result()

    def leave(self) -> None:
        """Note that a run has ended."""
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def break_up(self) -> None:
        """Note that some runs will never come; from now on nobody waits for others."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def _all_here(self) -> bool:
        return bool(self._waiting) and (self._broken or len(self._waiting) >= min(self._at_once, self._left))

    def _serve(self, gathered: list[tuple[Ask, Future[Reply]]]) -> None:
        try:
            replies = self._answer([ask for ask, _ in gathered])
        except BaseException as error:  # handed to all who asked
            for _, reply in gathered:
                reply.set_exception(error)
        else:
            for (_, reply), value in zip(gathered, replies, strict=True):
                reply.set_result(value)
        with self._changed:
            self._changed.notify_all()


@dataclass(eq=False)
class _Round(Generic[Reply]):
    replies: list[asyncio.Future[Reply]]
    task: asyncio.Task[None] | None = None


class AsyncMeeting(Generic[Ask, Reply]):
    """The same for the tasks of one event loop; when all tasks that asked are cancelled, so is answering them.

    Parameters
    ----------
    answer : callable
        Answers everything that was gathered, in order.
    members : int
        Runs of the batch.
    at_once : int
        Runs that are under way at the same time, at most.
    """

    def __init__(self, answer: Callable[[list[Ask]], Awaitable[Sequence[Reply]]], members: int, at_once: int) -> None:
        self._answer = answer
        self._left = members
        self._at_once = at_once
        self._waiting: list[tuple[Ask, asyncio.Future[Reply]]] = []
        self._rounds: list[_Round[Reply]] = []

    async def ask(self, ask: Ask) -> Reply:
        """Wait for the others, and return the reply."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((ask, reply))
        self._begin_if_all_here()
        try:
            return await reply
        finally:
            self._waiting = [each for each in self._waiting if each[1] is not reply]
            for each in self._rounds:
                if each.task is not None and all(other.done() for other in each.replies):
                    each.task.cancel()

    def leave(self) -> None:
        """Note that a run has ended."""
        self._left -= 1
        self._begin_if_all_here()

    def _begin_if_all_here(self) -> None:
        if self._waiting and len(self._waiting) >= min(self._at_once, self._left):
            gathered, self._waiting = self._waiting, []
            begun = _Round([reply for _, reply in gathered])
            self._rounds.append(begun)
            begun.task = asyncio.get_running_loop().create_task(self._serve(begun, [ask for ask, _ in gathered]))

    async def _serve(self, begun: _Round[Reply], asks: list[Ask]) -> None:
        outcome: Sequence[Any] | BaseException
        try:
            outcome = await self._answer(asks)
        except asyncio.CancelledError:
            for reply in begun.replies:
                reply.cancel()
            raise
        except BaseException as error:  # handed to all who asked
            outcome = error
        finally:
            self._rounds.remove(begun)
        for number, reply in enumerate(begun.replies):
            if reply.done():
                continue
            if isinstance(outcome, BaseException):
                reply.set_exception(outcome)
            else:
                reply.set_result(outcome[number])
