"""Answers: what ends one early, its text up to a stop string, why it ended, and what it used."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendStream, Engine, GenerationResult, StopStrings
from cacheblend_rag.errors import AnswerTimeoutError, ConfigError
from cacheblend_rag.report import BlendReport
from cacheblend_rag.stops import StopCutter, Thinking, cut_at_stop, cut_pieces

__all__ = ["Answer", "Deadline", "Ending", "ModelCall", "calls_made"]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One call of a framework's model: its engine, its prompt, and the settings of the call over the engine's."""

    engine: Engine
    prompt: BlendPrompt
    blend: BlendConfig | None

    def note(self) -> None:
        """Tell who gathers calls of it."""
        if (calls := _gathered.get()) is not None:
            calls.append(self)


_gathered: ContextVar[list[ModelCall] | None] = ContextVar("cacheblend_gathered", default=None)


@contextmanager
def calls_made() -> Iterator[list[ModelCall]]:
    """Gather the calls that frameworks' models note within a ``with`` block, in threads and tasks of its runs too."""
    calls: list[ModelCall] = []
    token = _gathered.set(calls)
    try:
        yield calls
    finally:
        _gathered.reset(token)


class Deadline(StoppingCriteria):
    """Ends a generation at the first token that is later than `timeout_s` from now."""

    is_of_one_answer = True

    def __init__(self, timeout_s: float) -> None:
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigError(f"timeout={timeout_s!r} must be a positive number of seconds, or None for no limit")
        self.timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._passed = False

    @property
    def left_s(self) -> float:
        """Seconds until then, less than 0 afterwards."""
        return self._until - time.monotonic()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether each sequence is done."""
        self._passed = self._passed or time.monotonic() > self._until
        return torch.full((input_ids.shape[0],), self._passed, dtype=torch.bool, device=input_ids.device)

    def check(self) -> None:
        """Raise `AnswerTimeoutError` if a generation was ended."""
        if self._passed:
            raise AnswerTimeoutError(
                f"the answer was not finished after timeout={self.timeout_s:g} s, waiting for the model included; "
                "give it more time, or lower max_tokens"
            )


@dataclass(frozen=True)
class Answer:
    """An answer, cut at the first stop string; `finish_reason` is "stop" at an end token or a stop string, else "length"."""

    text: str
    finish_reason: str
    report: BlendReport
    # What was thought before it, which is no part of the text.
    thoughts: str = ""
    reasoning_tokens: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def cached_tokens(self) -> int:
        """Number of the prompt's tokens whose KV was there: of an earlier prompt, of the fixed head, and of chunks, unchanged."""
        report = self.report
        # Chunks of an earlier prompt are among its tokens.
        stored = [chunk for chunk in report.chunks if chunk.hit and chunk.tier != "prefix"]
        read = sum(chunk.tokens - chunk.recomputed_tokens for chunk in stored)
        return report.prefix_tokens + report.head_tokens + read


@dataclass(frozen=True)
class Ending:
    """Limits of an answer beside end tokens and their number: strings, of which none is empty, and a deadline."""

    stop: tuple[str, ...] = ()
    deadline: Deadline | None = None
    thinking: Thinking | None = None

    def criteria(self, tokenizer: Any) -> list[StoppingCriteria]:
        """Return the stopping criteria of a generation."""
        stops = [StopStrings(tokenizer, self.stop, self.thinking)] if self.stop else []
        return [*stops, *([] if self.deadline is None else [self.deadline])]

    def read(self, result: GenerationResult) -> Answer:
        """Return what was generated as an answer; `AnswerTimeoutError` if that took too long."""
        if self.deadline is not None:
            self.deadline.check()
        thoughts, words = ("", result.text) if self.thinking is None else self.thinking.apart(result.text)
        text = cut_at_stop(words, self.stop)
        reason = "stop" if len(text) < len(words) else result.finish_reason
        tokens = 0 if self.thinking is None else min(len(self.thinking.read(thoughts)), result.report.output_tokens)
        return Answer(text, reason, result.report, thoughts, tokens, result.token_ids)

    def pieces(self, stream: BlendStream) -> Generator[str | Answer, None, None]:
        """Yield an answer as it is written, thoughts as `Thought`, up to the first stop string, and at its end all of it."""
        try:
            yield from cut_pieces(stream, StopCutter(self.stop, self.thinking))
            yield self.read(stream.result())
        finally:
            stream.close()

    async def apieces(self, stream: BlendStream) -> AsyncGenerator[str | Answer, None]:
        """Async version of `pieces`; the generation ends soon after reading stops."""
        cutter = StopCutter(self.stop, self.thinking)
        try:
            async for piece in stream:
                for shown in cutter.feed(piece):
                    yield shown
            for shown in cutter.feed("", is_last=True):
                yield shown
            yield self.read(await stream.aresult())
        finally:
            stream.close()
