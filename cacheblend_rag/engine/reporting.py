"""Making the report of an answered prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cacheblend_rag.engine.prompt import PromptChunk
from cacheblend_rag.engine.request import PromptRun
from cacheblend_rag.layout import ChunkSpan
from cacheblend_rag.report import BlendReport, ChunkReport

__all__ = ["make_report"]


class _Part(NamedTuple):
    """What is reported of a run of a chunk's tokens. What is computed though its KV may be there is neither hit nor miss."""

    row: int
    chunk: PromptChunk
    report: ChunkReport
    is_miss: bool


def make_report(
    run: PromptRun, num_layers: int, first_output: float, output_tokens: int, tpot_s: float | None = None
) -> BlendReport:
    """Return what a request cost and where its KV came from.

    Parameters
    ----------
    run : PromptRun
        The request, answered.
    num_layers : int
        Decoder layers of the model.
    first_output : float
        When the first output was there, by `time.perf_counter`.
    output_tokens : int
        Tokens generated.
    tpot_s : float, optional
        Seconds per token after the first.
    """
    assert run.plan is not None
    layout, timings, outcome = run.prompt.layout, run.timings, run.outcome
    context = layout.context_tokens
    taken_over = 0 if run.resumed is None else run.resumed.tokens
    if outcome.recomputed is None:
        rows = layout.context_rows[layout.context_rows >= run.layout.resumed_rows]
        charged = rows.numel() / max(context, 1)
    else:
        # What was moved within a conversation is blended as chunks are.
        blended = context + (0 if run.resumed is None else run.resumed.moved)
        rows, charged = outcome.recomputed, outcome.charge / max(blended * num_layers, 1)
    in_chunks = rows[layout.is_chunk[rows]]
    parts: list[_Part] = []
    tiers = run.kv.tiers or [None] * len(run.kv.hits)
    for chunk, span, hit, tier in zip(run.prompt.chunks, layout.chunks, run.kv.hits, tiers, strict=True):
        inside = int(((rows >= span.start) & (rows < span.stop)).sum())
        parts.append(_served(run, chunk, span, hit, tier, inside))
    for chunk in run.prompt.computed:
        count = chunk.rows[1] - chunk.rows[0]
        attention = _attention(run, ChunkSpan(chunk.row, chunk.row + count, chunk.row))
        report = ChunkReport(chunk.id, count, False, count, chunk.note, attention=attention)
        parts.append(_Part(chunk.row, chunk, report, is_miss=chunk.deferred or chunk.is_missed))
    chunks, missed = _whole_chunks(parts)
    return BlendReport(
        ttft_s=first_output - run.request.started,
        load_s=timings.open_s + timings.wait_s,
        encode_s=timings.encode_s,
        recompute_s=(timings.forward_ended or first_output) - timings.forward_started - timings.wait_s,
        prompt_tokens=len(layout),
        context_tokens=context,
        recomputed_tokens=in_chunks.numel(),
        recompute_ratio=1.0 if outcome.recomputed is None else run.plan.ratio,
        charged_ratio=charged if context else 0.0,
        hits=sum(chunk.hit for chunk in chunks),
        misses=missed,
        selector=run.plan.selector,
        fallback_reason=_fallback_reason(run),
        chunks=chunks,
        output_tokens=output_tokens,
        load_bytes=timings.load_bytes,
        repaired_tokens=outcome.repaired_tokens,
        guard=run.request.guard_action,
        tpot_s=tpot_s,
        kv_bytes=outcome.kv_bytes,
        kv_bytes_before=outcome.kv_bytes_before,
        evicted_tokens=outcome.evicted_tokens,
        kept_reason=outcome.kept_reason,
        batch_size=outcome.batch_size,
        alone_reason=outcome.alone_reason,
        conversation_tokens=taken_over,
        conversation_recomputed_tokens=rows.numel() - in_chunks.numel(),
        head_tokens=run.kv.head_tokens,
    )


def _served(run: PromptRun, chunk: PromptChunk, span: ChunkSpan, hit: bool, tier: str | None, recomputed: int) -> _Part:
    """Return what is reported of a chunk of the layout."""
    held = span.stop <= run.layout.resumed_rows
    whole = "the whole prompt was computed" if run.outcome.recomputed is None and not held else None
    damaged = chunk.key in run.kv.unreadable and not held
    hit = hit and not damaged
    lost = "its stored KV could not be read" if damaged else "its KV was not stored"
    reason = whole or chunk.note or (None if hit or held else lost)
    tier = "conversation" if held else tier
    report = ChunkReport(chunk.id, len(span), hit, recomputed, reason, tier, _attention(run, span))
    return _Part(span.start, chunk, report, is_miss=not hit)


def _fallback_reason(run: PromptRun) -> str | None:
    assert run.plan is not None
    reason, computed = run.plan.fallback_reason, run.prompt.computed
    if run.request.guard_action is not None and not run.request.blend.enabled:
        return run.request.guard_action
    if reason is None or not computed or run.prompt.chunks:
        return reason
    if any(chunk.deferred for chunk in computed):
        return "all of its chunks are retrieved for the first time"
    if any(chunk.is_elsewhere for chunk in computed):
        return "none of its chunks stands where it was encoded, and the KV of this model cannot be moved"
    if run.kv.contexts:
        return f"none of its chunks is served: {computed[0].note}"
    return reason


def _attention(run: PromptRun, span: ChunkSpan) -> float | None:
    return None if run.outcome.attention is None else run.outcome.attention(span)


def _whole_chunks(parts: list[_Part]) -> tuple[tuple[ChunkReport, ...], int]:
    """Put together what is reported of the parts of chunks: a report of each chunk in prompt order, and how many were missed."""
    whole: dict[object, ChunkReport] = {}
    missed: dict[object, bool] = {}
    for part in sorted(parts, key=lambda each: each.row):
        name: object = object() if part.chunk.part is None else part.chunk.key
        missed[name] = missed.get(name, False) or part.is_miss
        report, first = part.report, whole.get(name)
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
        whole[name] = report
    return tuple(whole.values()), sum(missed.values())
