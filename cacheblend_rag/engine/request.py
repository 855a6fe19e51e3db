"""A request on its way through the engine: what was asked, what is done, what it cost, and the report."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.protocol import GenerationResult
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.prompt import AssembledPrompt, PromptChunk
from cacheblend_rag.report import BLENDING_OFF, BlendReport, ChunkReport, LayerTimes, Span, Trace, TracedChunk
from cacheblend_rag.selection import Selection, make_selector

if TYPE_CHECKING:
    from cacheblend_rag.engine.supply import KVSupply

__all__ = ["DAMAGED", "Request", "RequestState", "make_report", "why_missed"]

DAMAGED = "its stored KV could not be read"


@dataclass(slots=True, eq=False)
class RequestState:
    """What is done for a prompt on its way through the engine, and what it cost."""

    # What chooses the rows to recompute; None of a prompt that is prefilled in full, and why, if blending was asked for.
    selection: Selection | None = None
    fallback_reason: str | None = None
    # The prompt as it is computed, if that begins with rows that are taken over, and how many of them are of its fixed head.
    layout: PromptLayout | None = None
    head_rows: int = 0
    # Whether KV was stored when the call came, and where it is read from.
    hits: dict[str, bool] = field(default_factory=dict)
    tiers: dict[str, str | None] = field(default_factory=dict)
    # Whether what could not be read is damaged. What is not stays stored, and is not opened again.
    unreadable: dict[str, bool] = field(default_factory=dict)
    # Why KV is not stored, where that is not in the chunk's name.
    reasons: dict[str, str] = field(default_factory=dict)
    # KV of misses that was computed before the prompt's turn came.
    encoded: dict[str, ChunkKV] = field(default_factory=dict)
    # Seconds spent on waiting for the model, encoding misses, opening stored KV, and on waiting for it in the forward.
    queue_s: float = 0.0
    encode_s: float = 0.0
    open_s: float = 0.0
    wait_s: float = 0.0
    # When the forward began, and when its prefill ended if others were prefilled before the first output.
    forward_started: float = 0.0
    forward_ended: float | None = None
    # What came before the forward.
    waits: list[Span] = field(default_factory=list)
    # Chunk rows that the prefill computed, and its work on them in decoder-block rows; None when the whole prompt was computed.
    recomputed: torch.Tensor | None = None
    charge: float = 0.0
    # Returns the share of the answer's attention that went to a chunk, where that is asked for.
    attention: Callable[[ChunkSpan], float] | None = None
    output_ids: tuple[int, ...] = ()
    # Whether a piece of its answer was shown, which cannot be begun anew then.
    has_shown: bool = False
    # Fields of its `BlendReport` besides: what few prompts use, and what backends and attachments have to say.
    figures: dict[str, Any] = field(default_factory=dict)
    # When the layers of its stored KV were loaded and handed over.
    layers: LayerTimes | None = None

    def note(self, what: str, began: float) -> float:
        """Note what has just ended, and when it began; return the seconds that it took."""
        ended = time.perf_counter()
        self.waits.append(Span(what, began, ended))
        return ended - began


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What was asked: a prompt under the settings and options in force."""

    # Of the engine that was asked.
    supply: KVSupply
    asked: BlendPrompt
    prompt: AssembledPrompt
    blend: BlendConfig
    started: float
    # Until when the model must be free for it, by `time.perf_counter`.
    deadline: float = math.inf
    # Whether it takes over what earlier prompts begin with, and is kept for later ones.
    shares: bool = True
    max_new_tokens: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    # Ends the answer at the next token.
    stop: threading.Event = field(default_factory=threading.Event)
    # Takes the text of the answer piece by piece.
    show: Callable[[str], None] | None = None
    # When it was in tokens.
    ready: float = field(default_factory=time.perf_counter)
    state: RequestState = field(default_factory=RequestState)
    # Where another request's thread computes it.
    answer: Future[GenerationResult | Exception] = field(default_factory=Future)

    @property
    def is_given_up(self) -> bool:
        """Whether its answer is wanted no more."""
        # The interpreter waits for a stream's thread when it ends.
        return self.stop.is_set() or (self.show is not None and not threading.main_thread().is_alive())

    @property
    def layout(self) -> PromptLayout:
        """The prompt as it is computed."""
        return self.state.layout or self.prompt.layout

    def resume(self, rows: int, *, whole: bool = False, is_head: bool = False) -> None:
        """Note how many first rows are taken over of an earlier prompt or of the fixed head; if `whole`, no chunk is blended."""
        layout = self.prompt.layout
        chunks = () if whole else tuple(span for span in layout.chunks if span.start >= rows)
        self.state.layout = replace(layout, chunks=chunks, resumed_rows=rows) if rows else None
        self.state.head_rows = rows if is_head else 0

    @property
    def chunkless(self) -> str | None:
        """Why none of its chunks is blended; None where one is."""
        why = next((each.note for each in self.prompt.computed if each.computed != "last"), None)
        return None if self.prompt.chunks else why or "the prompt has no chunks"

    @property
    def waiting(self) -> list[PromptChunk]:
        """The chunks after what is taken over of an earlier prompt."""
        return [chunk for chunk in self.prompt.chunks if chunk.stop > self.layout.resumed_rows]


def make_report(
    request: Request, num_layers: int, output_ids: tuple[int, ...] = (), token_times: Sequence[float] = ()
) -> BlendReport:
    """Return what a request cost, and where its KV came from; without `token_times` the output is there now."""
    state = request.state
    first_output = token_times[0] if token_times else time.perf_counter()
    layout = request.prompt.layout
    context = layout.context_tokens
    if state.recomputed is None:
        rows = layout.context_rows[layout.context_rows >= request.layout.resumed_rows]
        charged = rows.numel() / max(context, 1)
    else:
        rows, charged = state.recomputed, state.charge / max(context * num_layers, 1)
    in_chunks = rows[torch.isin(rows, layout.context_rows)]
    in_order = sorted((*request.prompt.chunks, *request.prompt.computed), key=lambda each: each.start)
    parts = [(chunk, _chunk_report(request, chunk, rows)) for chunk in in_order]
    chunks, misses = _chunk_reports(request, parts)
    ended = state.forward_ended or first_output
    ttft_s, load_s = first_output - request.started, state.open_s + state.wait_s
    recompute_s = ended - state.forward_started - state.wait_s
    # Between its prefill and its first token the model had the other prompts of a batch.
    queue_s = state.queue_s + first_output - ended
    count = len(output_ids)
    traced = [
        TracedChunk(
            chunk.start, chunk.stop, chunk.id, chunk.key, len(chunk.target.context), its.tier, its.reason, its.attention
        )
        for chunk, its in parts
    ]
    trace = Trace(
        layout.token_ids,
        output_ids,
        tuple(traced),
        tuple(_reused(request)),
        () if state.recomputed is None else tuple(rows.tolist()),
        request.started,
        state.forward_started,
        ended,
        tuple(state.waits),
        state.layers,
        tuple(token_times[:count]),
    )
    figures: dict[str, Any] = dict(
        ttft_s=ttft_s,
        load_s=load_s,
        encode_s=state.encode_s,
        recompute_s=recompute_s,
        prompt_tokens=len(layout),
        context_tokens=context,
        recomputed_tokens=in_chunks.numel(),
        recompute_ratio=1.0 if state.recomputed is None else request.blend.recompute_ratio,
        charged_ratio=charged if context else 0.0,
        hits=sum(chunk.hit for chunk in chunks),
        misses=misses,
        selector="full" if state.selection is None else make_selector(request.blend.selector).name,
        fallback_reason=state.fallback_reason or (None if request.blend.enabled else BLENDING_OFF),
        chunks=chunks,
        output_tokens=count,
        tpot_s=None if count < 2 else (token_times[count - 1] - first_output) / (count - 1),
        prefix_tokens=request.layout.resumed_rows - state.head_rows,
        queue_s=queue_s,
        overhead_s=max(ttft_s - queue_s - load_s - state.encode_s - recompute_s, 0.0),
        trace=trace,
    )
    return BlendReport(**figures | state.figures)


def _reused(request: Request) -> Iterator[Span]:
    """Yield the rows whose KV was not computed in the prompt's forward; where two have a row, the later one holds."""
    state, resumed = request.state, request.layout.resumed_rows
    if state.recomputed is not None:
        for chunk in request.waiting:
            yield Span(state.tiers.get(chunk.key) or "encoded", chunk.start, chunk.stop)
    if state.head_rows:
        yield Span("head" if state.figures.get("head_tokens") else "encoded", 0, resumed)
    elif resumed:
        yield Span("prefix", 0, resumed)


def _chunk_reports(
    request: Request, parts: Sequence[tuple[PromptChunk, ChunkReport]]
) -> tuple[tuple[ChunkReport, ...], int]:
    """Return a report of each chunk in prompt order, its parts put together, then of those left out, and how many were missed."""
    reports: dict[object, ChunkReport] = {}
    missed = set[object]()
    for chunk, report in parts:
        name: object = chunk.key if chunk.is_part else chunk.start
        # What is computed though its KV may be there is neither hit nor miss.
        if chunk.computed == "unread" or not (chunk.computed or report.hit):
            missed.add(name)
        first = reports.get(name)
        if first is not None:
            report = replace(
                first,
                tokens=first.tokens + report.tokens,
                hit=first.hit or report.hit,
                recomputed_tokens=first.recomputed_tokens + report.recomputed_tokens,
                reason=first.reason or report.reason,
                tier=first.tier or report.tier,
                attention=None if first.attention is None else first.attention + (report.attention or 0.0),
            )
        reports[name] = report
    reason = "this id no longer exists, so it was left out of the prompt"
    skipped = [ChunkReport(id, 0, False, reason=reason) for id in request.prompt.skipped]
    return (*reports.values(), *skipped), len(missed)


def _chunk_report(request: Request, chunk: PromptChunk, recomputed: torch.Tensor) -> ChunkReport:
    state = request.state
    attention = None if state.attention is None else state.attention(chunk)
    if chunk.computed is not None:
        return ChunkReport(chunk.id, len(chunk), False, len(chunk), chunk.note, attention=attention)
    rows = int(((recomputed >= chunk.start) & (recomputed < chunk.stop)).sum())
    if chunk.stop <= request.layout.resumed_rows:
        return ChunkReport(chunk.id, len(chunk), True, rows, None, "prefix", attention)
    hit = state.hits.get(chunk.key, False) and chunk.key not in state.unreadable
    reason = None if hit else why_missed(request, chunk)
    return ChunkReport(chunk.id, len(chunk), hit, rows, reason, state.tiers.get(chunk.key), attention)


def why_missed(request: Request, chunk: PromptChunk) -> str:
    """Return why a chunk was not served from stored KV."""
    if chunk.key in request.state.unreadable:
        return DAMAGED
    missing = "its KV is not stored: evicted, not computed yet, or gone with a deleted chunk that it was read behind"
    return request.state.reasons.get(chunk.key) or chunk.note or missing
