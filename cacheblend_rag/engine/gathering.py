"""Calls of several threads at the same time: who finds the model busy is answered together with the others that do."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from cacheblend_rag.engine.generation import GenerationResult, PieceStreamer
from cacheblend_rag.engine.many import OBJECTS, Call, Many
from cacheblend_rag.engine.request import PromptRun
from cacheblend_rag.engine.runner import Runner
from cacheblend_rag.errors import CacheBlendError

__all__ = ["Gathering"]

# Seconds after which a call that waits looks whether anybody still wants its answer.
_GLANCE_S = 0.2


@dataclass(eq=False)
class _Waiting(Call):
    """A call that waits for its answer in another thread than the one that computes it."""

    outcome: Future[GenerationResult] = field(default_factory=Future)


@dataclass
class _Line:
    """The calls of one process; what is in it is guarded by its lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    # Whether a thread answers, which looks for those that wait when it is done.
    is_served: bool = False
    waiting: deque[_Waiting] = field(default_factory=deque)


class Gathering:
    """Answers calls one at a time as long as they come one at a time, and those that had to wait together.

    A call that finds nobody before it is answered in its own thread, as if there were no others. Those that come meanwhile wait,
    and are then answered in batches by a thread of their own, the oldest first, each batch with all that may be decoded
    with its oldest call. An answer does not depend on its company, except for rounding.

    Parameters
    ----------
    runner : Runner
        Runs prompts.
    many : Many
        Answers one by one, or in batches.
    """

    def __init__(self, runner: Runner, many: Many) -> None:
        self._runner = runner
        self._many = many
        # A child of a fork has none of the threads that answer in its parent.
        self._lines = {os.getpid(): _Line()}

    @property
    def _line(self) -> _Line:
        """The line of this process."""
        # `setdefault` is one step, which threads cannot get between.
        return self._lines.get(os.getpid()) or self._lines.setdefault(os.getpid(), _Line())

    def answer(self, run: PromptRun, stop: threading.Event, streamer: PieceStreamer | None = None) -> GenerationResult:
        """Answer a prompt, in this thread or in another.

        Parameters
        ----------
        run : PromptRun
            The prompt.
        stop : threading.Event
            Ends the answer at the next token.
        streamer : PieceStreamer or None
            Shows the answer as it comes.

        Raises
        ------
        AnswerTimeoutError
            If the model was not free within the time that the prompt may wait.
        """
        if self._runner.lock.is_mine:
            # A criterion of an answer under way asks something itself.
            return self._many.alone(Call(run, stop, streamer))
        line, call = self._line, _Waiting(run, stop, streamer)
        with line.lock:
            waits = line.is_served
            line.is_served = True
            if waits:
                line.waiting.append(call)
        if waits:
            return self._wait(line, call)
        try:
            return self._many.alone(call)
        finally:
            self._hand_on(line)

    def _wait(self, line: _Line, call: _Waiting) -> GenerationResult:
        patience = call.run.request.patience
        try:
            while not call.outcome.done():
                left_s = patience.left_s
                is_over, is_given_up = left_s <= 0, call.is_given_up
                if (is_over or is_given_up) and self._withdraw(line, call):
                    if is_over:
                        raise patience.error()
                    raise CacheBlendError("the answer was ended before it began; ask again")
                # Once it is being answered, there is nothing to look for any more.
                futures.wait([call.outcome], None if is_over or is_given_up else min(left_s, _GLANCE_S))
            return call.outcome.result()
        except BaseException:
            # Nobody waits for it any more.
            call.stop.set()
            self._withdraw(line, call)
            raise

    def _withdraw(self, line: _Line, call: _Waiting) -> bool:
        """Take a call out of the line; return whether it was still in it."""
        with line.lock:
            if call not in line.waiting:
                return False
            line.waiting.remove(call)
            return True

    def _hand_on(self, line: _Line) -> None:
        with line.lock:
            line.is_served = bool(line.waiting)
            if line.is_served:
                # No daemon: an interpreter that ends while this thread computes would abort.
                threading.Thread(target=self._serve, args=(line,), name="cacheblend-gathering").start()

    def _serve(self, line: _Line) -> None:
        """Answer those that wait, until there are none."""
        while True:
            # Who comes while others have the model is answered with this batch.
            with self._runner.lock:
                with line.lock:
                    if not line.waiting:
                        line.is_served = False
                        return
                    group = [line.waiting.popleft()]
                try:
                    self._gather(line, group)
                    self._answer_group(group)
                except BaseException as error:  # handed to those who wait
                    for call in group:
                        call.outcome.set_exception(error)

    def _gather(self, line: _Line, group: list[_Waiting]) -> None:
        """Take those out of the line that may be decoded with the first of a group, as far as there is room."""
        [oldest] = group
        if oldest.is_given_up or self._reason(oldest) is not None:
            return
        extent = self._many.extent(oldest.run)
        with line.lock:
            others = list(line.waiting)
        for call in others:
            if call.is_given_up or not _agree(oldest, call) or self._reason(call) is not None:
                continue
            joined = extent.joined(self._many.extent(call.run))
            # It may have left the line meanwhile.
            if self._many.has_room(joined) and self._withdraw(line, call):
                group.append(call)
                extent = joined

    def _reason(self, call: Call) -> str | None:
        """Return why a call is answered alone."""
        # Objects that are not ours could hold up the others.
        brought = [each for name in OBJECTS for each in call.run.request.options.get(name) or ()]
        if not all(getattr(each, "is_of_one_answer", False) for each in brought):
            return "it brings objects of its own"
        return self._many.alone_reason(call.run)

    def _answer_group(self, group: list[_Waiting]) -> None:
        if len(group) == 1:
            answers: Sequence[GenerationResult | Exception] = [self._many.alone(group[0])]
        else:
            answers = self._many.together(group)
        for call, answer in zip(group, answers, strict=True):
            if isinstance(answer, Exception):
                call.outcome.set_exception(answer)
            else:
                call.outcome.set_result(answer)


def _agree(one: Call, other: Call) -> bool:
    """Return whether two calls ask for the same way of decoding."""
    mine, theirs = (
        {name: value for name, value in call.run.request.options.items() if name not in OBJECTS}
        for call in (one, other)
    )
    return mine.keys() == theirs.keys() and all(_is_same(mine[name], theirs[name]) for name in mine)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other))
