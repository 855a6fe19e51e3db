"""Batches of runs, answered together by the engine while LangChain treats each as a run of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import get_config_list, get_executor_for_config, run_in_executor

from cacheblend_rag import BlendEngine, BlendPrompt, GenerationResult
from langchain_cacheblend.meeting import AsyncMeeting, ThreadMeeting

__all__ = ["AnswersTogether"]

# Threads that wait cost little, but not nothing; more runs than these meet in several rounds.
_MOST_THREADS = 64


class _Asked(Protocol):
    @property
    def prompt(self) -> BlendPrompt: ...

    @property
    def options(self) -> dict[str, Any]: ...


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
        meeting: ThreadMeeting[Any, GenerationResult] = ThreadMeeting(self._ask_all, len(inputs), at_once)

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
            except BaseException:
                # A run failed, or this thread was interrupted: runs that have not begun are cancelled, and those that have must
                # not wait for them, since the executor waits for those.
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

    def _ask(self, call: _Asked) -> GenerationResult:
        """Answer one call, together with the others of its batch if it is of one."""
        meeting = _joined.get()
        if not isinstance(meeting, ThreadMeeting):
            return self.engine.generate(call.prompt, **call.options)
        # A prompt that cannot be served fails alone.
        self.engine.prompt_layout(call.prompt)
        return meeting.ask(call)

    async def _aask_in_batch(self, call: _Asked) -> GenerationResult | None:
        """Answer one call together with the others of its batch; None if it is of no batch."""
        meeting = _joined.get()
        if not isinstance(meeting, AsyncMeeting):
            return None
        await run_in_executor(None, self.engine.prompt_layout, call.prompt)
        return await meeting.ask(call)

    def _ask_all(self, calls: Sequence[_Asked]) -> list[GenerationResult]:
        """Answer calls that were made with the same options."""
        return self.engine.generate_many([call.prompt for call in calls], **_options(calls))

    async def _aask_all(self, calls: Sequence[_Asked]) -> list[GenerationResult]:
        """Answer calls that were made with the same options."""
        return await self.engine.agenerate_many([call.prompt for call in calls], **_options(calls))


def _options(calls: Sequence[_Asked]) -> dict[str, Any]:
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
