"""What an answer cost: the model's calls behind it, and the report that its response carries."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from typing import Any

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse

from cacheblend_rag.chat.answer import ModelCall
from cacheblend_rag.report import BlendReport, CallReport

__all__ = ["REPORT_KEY", "AnswerReport", "Calls", "watching"]

REPORT_KEY = "blend"
"""Where a response's metadata hold the report."""

_END = object()


class AnswerReport(CallReport):
    """The report of an answer's last call, which prints as lines that people read.

    ``earlier_calls`` are the reports of the calls before it, ``dropped`` the ids of the nodes for which there was no room. It is
    empty until the answer is whole.
    """

    def fill(self, call: CallReport, earlier_calls: Sequence[CallReport], dropped: list[Any]) -> None:
        """Take the report of the last call."""
        self.update(call, dropped=dropped, earlier_calls=earlier_calls)
        self.last = call.last

    def __str__(self) -> str:
        if not self:
            return "no report: the answer is not finished"
        lines = []
        for call in [*self["earlier_calls"], self]:
            known = {each.name: call[each.name] for each in fields(BlendReport) if each.name in call}
            lines.append(str(BlendReport(**known)))
            lines += [f"  {chunk['id']}: {chunk['reason']}" for chunk in call["chunks"] if chunk["reason"]]
        if self["dropped"]:
            lines.append(f"no room for {', '.join(map(str, self['dropped']))}")
        return "\n".join(lines)


@dataclass(eq=False)
class Calls:
    """The calls of every `BlendLLM` that are made within a ``with`` block, also in the tasks that it begins.

    Attributes
    ----------
    made : list of ModelCall
        The calls, in the order in which they began.
    report : AnswerReport
        Filled when a call ends, with all that have ended; the last of them is the answer's.
    """

    made: list[ModelCall] = field(default_factory=list)
    report: AnswerReport = field(default_factory=AnswerReport)
    _ended: list[CallReport] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _token: Token[tuple[Calls, ...]] | None = None
    _all: tuple[Calls, ...] = ()

    def __enter__(self) -> Calls:
        self._all = (*watching.get(), self)
        self._token = watching.set(self._all)
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._token is not None
        watching.reset(self._token)

    def end(self, report: BlendReport) -> None:
        """Take the report of a call that has ended."""
        with self._lock:
            self._ended.append(CallReport.of(report))
            self.report.fill(self._ended[-1], self._ended[:-1], [])

    def complete(self, response: Any, is_ours: bool) -> Any:
        """Put the report into a response that has none yet, if the model that was asked is ours.

        A stream is read as within the block, since much of it is only computed then.
        """
        if isinstance(response, StreamingResponse) and isinstance(response.response_gen, Generator):
            response.response_gen = self._pieces(response.response_gen)
        elif isinstance(response, AsyncStreamingResponse) and isinstance(response.response_gen, AsyncGenerator):
            response.response_gen = self._apieces(response.response_gen)
        kinds = (StreamingResponse, AsyncStreamingResponse, StreamingAgentChatResponse)
        will_ask = isinstance(response, kinds) and bool(response.source_nodes)
        metadata = getattr(response, "metadata", None) or {}
        if REPORT_KEY in metadata or not (self.made or is_ours):
            return response
        report = self.report if self.made or will_ask else None
        if isinstance(response, AgentChatResponse | StreamingAgentChatResponse):
            # A chat engine over a query engine keeps that one's response.
            for source in response.sources:
                kept = getattr(source.raw_output, "metadata", None)
                report = kept[REPORT_KEY] if isinstance(kept, dict) and REPORT_KEY in kept else report
        response.metadata = {**metadata, REPORT_KEY: report}
        return response

    def _pieces(self, stream: Generator[str, None, None]) -> Generator[str, None, None]:
        with closing(stream):
            while True:
                token = watching.set(self._all)
                try:
                    piece: Any = next(stream, _END)
                finally:
                    watching.reset(token)
                if piece is _END:
                    return
                yield piece

    async def _apieces(self, stream: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        async with aclosing(stream):
            while True:
                token = watching.set(self._all)
                try:
                    piece: Any = await anext(stream, _END)
                finally:
                    watching.reset(token)
                if piece is _END:
                    return
                yield piece


watching: ContextVar[tuple[Calls, ...]] = ContextVar("cacheblend_watching", default=())
"""Who watches the calls that are made here."""
