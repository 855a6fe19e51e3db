"""Batches of runs, answered together by the engine while LangChain treats each as a run of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, get_executor_for_config, run_in_executor

from cacheblend_rag import BlendEngine, GenerationResult
from cacheblend_rag.errors import CacheBlendError
from langchain_cacheblend.calls import Call, EndWhenSet

__all__ = ["AnswersTogether", "AsyncMeeting", "ThreadMeeting"]

# Threads that wait cost little, but not nothing; more runs than these meet in several rounds.
_MOST_THREADS = 64


Ask = TypeVar("Ask")
Reply = TypeVar("Reply")


class ThreadMeeting(Generic[Ask, Reply]):
    """Gathers what the threads of a batch ask, until all that can be there are.

    Every run takes part, whether it comes to ask or not: its answer may be found in a cache, or its prompt may be wrong. The last
    one that was waited for answers for all, or, when it left without asking, one of those that wait. `members` are the runs of
    the batch, `at_once` those that are under way at the same time, at most.
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
    """The same for the tasks of one event loop; when all tasks that asked are cancelled, so is answering them."""

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


_Meeting = ThreadMeeting[Any, GenerationResult] | AsyncMeeting[Any, GenerationResult]
# The batch under way, for its runs to join; and, inside a run, the meeting that it has joined. Two variables, so that a model
# that is called by a callback of such a run does not take part in its place.
_joining: ContextVar[_Meeting | None] = ContextVar("cacheblend_joining", default=None)
_joined: ContextVar[_Meeting | None] = ContextVar("cacheblend_joined", default=None)


class AnswersTogether:
    """Has the engine answer the runs of a batch together.

    LangChain makes a run of each input as it does for any model, with callbacks, run id, cache and error of its own, in threads
    or tasks. Where each would ask the engine it waits for the others, and `BlendEngine.generate_many` is asked once for all.
    """

    engine: BlendEngine

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with _taking_part():
            return super().invoke(input, config, **kwargs)  # type: ignore[misc]

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with _taking_part():
            return await super().ainvoke(input, config, **kwargs)  # type: ignore[misc]

    def batch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        if len(inputs) < 2:
            return Runnable.batch(self, inputs, config, return_exceptions=return_exceptions, **kwargs)  # type: ignore[arg-type]
        configs = get_config_list(config, len(inputs))
        at_once = configs[0].get("max_concurrency") or min(len(inputs), _MOST_THREADS)
        for each in configs:
            each["max_concurrency"] = at_once
        interrupted = threading.Event()
        answer = partial(self._ask_all_until, interrupted)
        meeting: ThreadMeeting[Any, GenerationResult] = ThreadMeeting(answer, len(inputs), at_once)

        def run(each: Any, config: RunnableConfig) -> Any:
            try:
                return self.invoke(each, config, **kwargs)
            except Exception as error:
                if return_exceptions:
                    return error
                raise

        with _meeting(meeting), get_executor_for_config(configs[0]) as executor:
            try:
                return list(executor.map(run, inputs, configs))
            except BaseException as error:
                # A run failed, or this thread was interrupted: runs that have not begun are cancelled, and those that have must
                # not wait for them, since the executor waits for those. An interrupted batch is not answered to its end either.
                if not isinstance(error, Exception):
                    interrupted.set()
                meeting.break_up()
                raise

    async def abatch(
        self,
        inputs: list[Any],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        configs = get_config_list(config, len(inputs)) if inputs else []
        if len(inputs) < 2:
            return await Runnable.abatch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)  # type: ignore[arg-type]
        at_once = configs[0].get("max_concurrency") or len(inputs)
        with _meeting(AsyncMeeting(self._aask_all, len(inputs), at_once)):
            return await Runnable.abatch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)  # type: ignore[arg-type]

    def _ask(self, call: Call) -> GenerationResult:
        """Answer one call, together with the others of its batch if it is of one."""
        meeting = _joined.get()
        if not isinstance(meeting, ThreadMeeting):
            return self.engine.generate(call.prompt, **call.options)
        # A prompt that cannot be served fails alone.
        self.engine.prompt_layout(call.prompt)
        return meeting.ask(call)

    async def _aask_in_batch(self, call: Call) -> GenerationResult | None:
        """Answer one call together with the others of its batch; None if it is of no batch."""
        meeting = _joined.get()
        if not isinstance(meeting, AsyncMeeting):
            return None
        await run_in_executor(None, self.engine.prompt_layout, call.prompt)
        return await meeting.ask(call)

    def _ask_all(self, calls: Sequence[Call]) -> list[GenerationResult]:
        """Answer calls that were made with the same options."""
        return self.engine.generate_many([call.prompt for call in calls], **_options(calls))

    def _ask_all_until(self, interrupted: threading.Event, calls: Sequence[Call]) -> list[GenerationResult]:
        """Answer calls that were made with the same options, or none of them once the batch was interrupted."""
        options = _options(calls)
        ends = EndWhenSet(interrupted)
        options["stopping_criteria"] = [[*each, ends] for each in options["stopping_criteria"]]
        results = [] if interrupted.is_set() else self.engine.generate_many([call.prompt for call in calls], **options)
        if interrupted.is_set():
            raise CacheBlendError("the batch was interrupted, so this answer is not whole; ask again")
        return results

    async def _aask_all(self, calls: Sequence[Call]) -> list[GenerationResult]:
        """Answer calls that were made with the same options."""
        return await self.engine.agenerate_many([call.prompt for call in calls], **_options(calls))


def _options(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the options of all calls; objects that keep a state for their call are each call's own."""
    own = {name: [call.options.get(name) or [] for call in calls] for name in ("stopping_criteria", "logits_processor")}
    return calls[0].options | own


@contextmanager
def _meeting(meeting: _Meeting) -> Iterator[None]:
    token = _joining.set(meeting)
    try:
        yield
    finally:
        _joining.reset(token)


@contextmanager
def _taking_part() -> Iterator[None]:
    """Make the batch under way that of this run, for the duration of a ``with`` block."""
    meeting = _joining.get()
    tokens = _joining.set(None), _joined.set(meeting)
    try:
        yield
    finally:
        _joining.reset(tokens[0])
        _joined.reset(tokens[1])
        if meeting is not None:
            meeting.leave()
