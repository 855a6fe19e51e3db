"""Batches of runs, answered together by the engine while LangChain treats each as a separate run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, get_executor_for_config, run_in_executor

from cacheblend_rag import GenerationResult
from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import CacheBlendError
from langchain_cacheblend.calls import Call

__all__ = ["AnswersTogether", "Meeting", "options_of_all"]

# Threads that wait cost little, but not nothing; more runs than these meet in several rounds.
_MOST_THREADS = 64


Ask = TypeVar("Ask")
Reply = TypeVar("Reply")


class Meeting(Generic[Ask, Reply]):
    """Gathers what the runs of a batch ask, until all that can be there are, and answers that in its own thread.

    Every run takes part, whether it comes to ask or not: its answer may be found in a cache, or its prompt may be wrong. `answer`
    is given what was gathered and an event, which is set when all who asked have cancelled; of what fails it returns the error.
    `members` are the runs of the batch,
    `at_once` those that are under way at the same time, at most.
    """

    def __init__(
        self, answer: Callable[[list[Ask], threading.Event], Sequence[Reply | Exception]], members: int, at_once: int
    ) -> None:
        self._answer = answer
        self._left = members
        self._at_once = at_once
        self._is_broken = self._is_interrupted = False
        self._lock = threading.Lock()
        self._waiting: list[tuple[Ask, Future[Reply]]] = []
        self._replies: list[Future[Reply]] = []

    def ask(self, ask: Ask) -> Future[Reply]:
        """Return the reply, which comes when the others are there; who cancels it is not waited for."""
        reply: Future[Reply] = Future()
        with self._lock:
            if self._is_interrupted:
                reply.cancel()
            self._waiting.append((ask, reply))
            self._replies.append(reply)
            self._begin_if_all_here()
        return reply

    def leave(self) -> None:
        """Note that a run has ended."""
        with self._lock:
            self._left -= 1
            self._begin_if_all_here()

    def break_up(self, interrupted: bool) -> None:
        """Note that some runs will never come, so that none waits for them; an interrupted batch is not answered."""
        with self._lock:
            self._is_broken, self._is_interrupted = True, interrupted
            for reply in self._replies if interrupted else ():
                reply.cancel()
            self._begin_if_all_here()

    def _begin_if_all_here(self) -> None:
        self._waiting = [each for each in self._waiting if not each[1].cancelled()]
        if self._waiting and (self._is_broken or len(self._waiting) >= min(self._at_once, self._left)):
            threading.Thread(target=self._serve, args=[self._waiting], name="cacheblend-batch").start()
            self._waiting = []

    def _serve(self, gathered: list[tuple[Ask, Future[Reply]]]) -> None:
        unwanted = threading.Event()

        def note(_: Future[Reply]) -> None:
            if all(reply.cancelled() for _, reply in gathered):
                unwanted.set()

        for _, reply in gathered:
            reply.add_done_callback(note)
        replies: Sequence[Reply | BaseException]
        try:
            replies = self._answer([ask for ask, _ in gathered], unwanted)
        except BaseException as error:  # handed to all who asked
            replies = [error] * len(gathered)
        for (_, reply), value in zip(gathered, replies, strict=True):
            if not reply.set_running_or_notify_cancel():
                continue
            if isinstance(value, BaseException):
                reply.set_exception(value)
            else:
                reply.set_result(value)


_CallMeeting = Meeting[Call, GenerationResult]
# The batch under way, for its runs to join; and, inside a run, the meeting that it has joined. Two variables, so that a model
# that is called by a callback of such a run does not take part in its place.
_joining: ContextVar[_CallMeeting | None] = ContextVar("cacheblend_joining", default=None)
_joined: ContextVar[_CallMeeting | None] = ContextVar("cacheblend_joined", default=None)


class AnswersTogether:
    """Has the engine answer the runs of a batch together.

    LangChain makes a run of each input as it does for any model, with callbacks, run id, cache and error of its own, in threads
    or tasks. Where each would ask the engine it waits for the others, and `BlendEngine.generate_many` is asked once for all.
    """

    engine: Engine

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

        def run(each: Any, config: RunnableConfig) -> Any:
            try:
                return self.invoke(each, config, **kwargs)
            except Exception as error:
                if return_exceptions:
                    return error
                raise

        with self._meeting(len(inputs), at_once) as meeting, get_executor_for_config(configs[0]) as executor:
            try:
                return list(executor.map(run, inputs, configs))
            except BaseException as error:
                # A run failed, or this thread was interrupted: runs that have not begun are cancelled, and those that have must
                # not wait for them, since the executor waits for those.
                meeting.break_up(interrupted=not isinstance(error, Exception))
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
        at_once = (configs and configs[0].get("max_concurrency")) or len(inputs)
        with self._meeting(len(inputs), at_once):
            return await Runnable.abatch(self, inputs, configs, return_exceptions=return_exceptions, **kwargs)  # type: ignore[arg-type]

    def _answer(self, call: Call) -> Answer:
        """Answer one call, together with the others of its batch if it is of one."""
        meeting = _joined.get()
        if meeting is None:
            return call.ending.read(self.engine.generate(call.prompt, **call.options))
        # A prompt that cannot be served fails alone.
        self.engine.prompt_layout(call.prompt)
        try:
            return call.ending.read(meeting.ask(call).result())
        except CancelledError:
            raise CacheBlendError("the batch was interrupted, so this answer is incomplete; try again") from None

    async def _aanswer(self, make_call: Callable[[], Call]) -> Answer:
        """Answer asynchronously; see `_answer`. Cancelling ends the generation, that of a batch when all are cancelled."""
        call = await run_in_executor(None, make_call)
        meeting = _joined.get()
        if meeting is not None:
            await run_in_executor(None, self.engine.prompt_layout, call.prompt)
            return call.ending.read(await asyncio.wrap_future(meeting.ask(call)))
        # A stream, so that a cancelled task does not leave the engine busy with an answer that is not wanted any more.
        stream = await run_in_executor(None, self.engine.stream, call.prompt, **call.options)
        try:
            return call.ending.read(await stream.aresult())
        finally:
            stream.close()

    @contextmanager
    def _meeting(self, members: int, at_once: int) -> Iterator[_CallMeeting]:
        """Have the runs that begin within a ``with`` block meet, where there are several."""

        def answer(calls: list[Call], unwanted: threading.Event) -> list[GenerationResult | Exception]:
            failed: dict[int, Exception] = {}
            options = options_of_all(calls) | {"stop": unwanted, "on_failed": failed.__setitem__}
            answers = iter(self.engine.generate_many([call.prompt for call in calls], **options))
            return [failed.get(number) or next(answers) for number in range(len(calls))]

        meeting: _CallMeeting = Meeting(answer, members, at_once)
        token = _joining.set(meeting if members > 1 else None)
        try:
            yield meeting
        finally:
            _joining.reset(token)


def options_of_all(calls: Sequence[Call]) -> dict[str, Any]:
    """Return the options of calls that were made with the same; objects that keep a state for their call are each call's own."""
    own = {name: [call.options.get(name) or [] for call in calls] for name in ("stopping_criteria", "logits_processor")}
    return calls[0].options | own


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
