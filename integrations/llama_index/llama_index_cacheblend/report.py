"""Cost of an answer: the model's calls behind it, the report that its response carries, and what it says of source nodes."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import aclosing, closing
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, fields
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import AgentChatResponse, StreamingAgentChatResponse
from llama_index.core.schema import NodeWithScore

from cacheblend_rag.chat.answer import ModelCall
from cacheblend_rag.engine import Engine
from cacheblend_rag.report import OTHER_TEXT, BlendReport, CallReport

__all__ = [
    "ATTENTION_KEY",
    "REPORT_KEY",
    "STATUS_KEY",
    "AnswerReport",
    "Calls",
    "annotate",
    "warn_of_other_texts",
    "watching",
]

logger = logging.getLogger(__name__)

REPORT_KEY = "blend"
"""Key of the report in a response's metadata."""

ATTENTION_KEY = "blend_attention"
"""Key of the share of the answer's attention that went to a node, 0 to 1."""

STATUS_KEY = "blend_status"
"""Key of why a node's KV was not used unchanged; "blended" if it was."""

_KEYS = [ATTENTION_KEY, STATUS_KEY]

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
"""Watchers of the calls that are made here."""


def annotate(nodes: Sequence[NodeWithScore], report: dict[str, Any]) -> None:
    """Write into the metadata of source nodes what the report says of them, if it says what the answer looked at.

    No model is shown what is written.
    """
    calls = [*report.get("earlier_calls", ()), report]
    chunks = {chunk["id"]: (chunk, call) for call in calls for chunk in call.get("chunks", ())}
    if all(chunk["attention"] is None for chunk, _ in chunks.values()):
        return
    dropped = set(report.get("dropped", ()))
    for each in nodes:
        found, metadata = chunks.get(each.node_id), each.node.metadata
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys"):
            setattr(each.node, name, [*dict.fromkeys([*getattr(each.node, name), *_KEYS])])
        if found is not None:
            chunk, call = found
            is_whole = call["selector"] == "full"
            whole = call.get("fallback_reason") or "the whole prompt was computed"
            metadata[STATUS_KEY] = chunk["reason"] or (whole if is_whole else "blended")
            if chunk["attention"] is not None:
                metadata[ATTENTION_KEY] = chunk["attention"]
        elif each.node_id in dropped:
            metadata[STATUS_KEY] = "the model's window had no room for it"
        else:
            metadata[STATUS_KEY] = report.get("fallback_reason") or "it has no text"


_warned_of: WeakKeyDictionary[Engine, object] = WeakKeyDictionary()


def warn_of_other_texts(engine: Engine, calls: Iterable[dict[str, Any]]) -> None:
    """Warn, once for each engine, of nodes that the model is shown otherwise than they were stored."""
    others = [chunk["id"] for call in calls for chunk in call.get("chunks", ()) if chunk["reason"] == OTHER_TEXT]
    mine = object()
    # One call, which threads cannot get between.
    if others and _warned_of.setdefault(engine, mine) is mine:
        logger.warning(
            "the model is shown another text of node %s than the stored one, so its KV is computed for the question: "
            "a postprocessor, a template or the metadata have changed it since. Say what the model is shown, and call "
            "warm_index(index) once: BlendVectorStore(store, engine=llm.engine, text_of=postprocessor) (this warning is not "
            "repeated)",
            others[0],
        )
