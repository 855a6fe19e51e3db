"""One prompt on its way through the engine, and what is reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller import Plan
from cacheblend_rag.engine.conversation import Conversation
from cacheblend_rag.engine.prompt import AssembledPrompt, PromptChunk
from cacheblend_rag.engine.sources import SourceAttention
from cacheblend_rag.engine.taken import Resumption
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.report import BlendReport, ChunkReport
from cacheblend_rag.store import KVReader, NamedTarget

__all__ = ["PromptRun"]


@dataclass
class PromptRun:
    """One prompt on its way through the engine, and the figures found on that way.

    Attributes
    ----------
    prompt : AssembledPrompt
        The prompt.
    config : BlendConfig
        The settings in force.
    started : float
        When the call came, by `time.perf_counter`.
    plan : Plan or None
        How it is prefilled, once that is decided.
    hits : list of bool
        For each chunk, whether its KV was there when the call came: in the store, or at its place in the conversation.
    unreadable : set of str
        Keys of the chunks whose stored KV turned out damaged.
    tiers : list of (str or None)
        For each chunk, where its stored KV is read from; None for a miss.
    encode_s, open_s, wait_s : float
        Seconds spent on encoding misses, on opening stored KV, and, in the forward, on waiting for it.
    load_bytes : int
        Bytes of KV that were loaded.
    forward_started : float
        When the forward began.
    charge : float
        Work done on chunk rows, in decoder-block rows; None when the whole prompt was computed.
    recomputed : torch.Tensor or None
        The chunk rows recomputed by the prefill; None when the whole prompt was computed.
    repaired_tokens : int
        Chunk tokens recomputed while the answer was written.
    rows : torch.Tensor or None
        The chunk rows to recompute, ascending, where no selector is to choose them.
    guard_level : int or None
        Which settings of the online guard these are; None for settings that the guard has nothing to do with.
    guard_action : str or None
        What the guard changed in them.
    kv_bytes, kv_bytes_before : int
        Bytes of the prompt's KV in the cache, and what they would be without eviction.
    evicted_tokens : int
        Context tokens that each head of an evicted layer dropped.
    kept_reason : str or None
        Why layers were kept whole although eviction was asked for.
    encoded : dict of (str, ChunkKV)
        KV of misses that was encoded before the prompt's turn came, by key.
    forward_ended : float or None
        When the prefill ended, where other prompts were prefilled before the first output; None where that follows at once.
    batch_size : int
        Prompts that were decoded together, this one included.
    alone_reason : str or None
        Why it was decoded alone although others were asked with it.
    conversation : Conversation or None
        The conversation that it is a turn of.
    resets : int
        How often that had been reset when the call came.
    resumed : Resumption or None
        What it takes over: its fixed head, and what its conversation has.
    head : KVReader or None
        The KV of the rows of its fixed head that it takes over.
    head_tokens : int
        How many of these there were when the call came.
    expiry : dict of str to float
        Of a turn of a conversation, when the KV of its chunks is over, by `steady_s` and by their keys.
    output_ids : tuple of int
        What was generated, once that is over.
    sources : SourceAttention or None
        What the answer attended to, where that is asked for.
    wait_until : float or None
        Until when it waits for the model, by `time.perf_counter`; None for as long as it takes.
    contexts : dict of (str, NamedTarget)
        By their keys, how the KV of chunks is computed that was not stored when the prompt's turn came.
    """

    prompt: AssembledPrompt
    config: BlendConfig
    started: float
    plan: Plan | None = None
    hits: list[bool] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    tiers: list[str | None] = field(default_factory=list)
    encode_s: float = 0.0
    open_s: float = 0.0
    wait_s: float = 0.0
    load_bytes: int = 0
    forward_started: float = 0.0
    charge: float = 0.0
    recomputed: torch.Tensor | None = None
    repaired_tokens: int = 0
    rows: torch.Tensor | None = None
    guard_level: int | None = None
    guard_action: str | None = None
    kv_bytes: int = 0
    kv_bytes_before: int = 0
    evicted_tokens: int = 0
    kept_reason: str | None = None
    encoded: dict[str, ChunkKV] = field(default_factory=dict)
    forward_ended: float | None = None
    batch_size: int = 1
    alone_reason: str | None = None
    conversation: Conversation | None = None
    resets: int = 0
    resumed: Resumption | None = None
    head: KVReader | None = None
    head_tokens: int = 0
    expiry: dict[str, float] = field(default_factory=dict)
    output_ids: tuple[int, ...] = ()
    sources: SourceAttention | None = None
    wait_until: float | None = None
    contexts: dict[str, NamedTarget] = field(default_factory=dict)

    @property
    def layout(self) -> PromptLayout:
        """The prompt as it is computed."""
        return self.prompt.layout if self.resumed is None else self.resumed.layout

    def report(
        self, num_layers: int, first_output: float, output_tokens: int, tpot_s: float | None = None
    ) -> BlendReport:
        """Return the figures.

        Parameters
        ----------
        num_layers : int
            Decoder layers of the model.
        first_output : float
            When the first output was there, by `time.perf_counter`.
        output_tokens : int
            Tokens generated.
        tpot_s : float, optional
            Seconds per token after the first.
        """
        assert self.plan is not None
        layout = self.prompt.layout
        context = layout.context_tokens
        resumed_rows = self.layout.resumed_rows
        taken_over = 0 if self.resumed is None else self.resumed.tokens
        if self.recomputed is None:
            rows = layout.context_rows[layout.context_rows >= resumed_rows]
            charged = rows.numel() / max(context, 1)
        else:
            # What was moved within a conversation is blended as chunks are.
            blended = context + (0 if self.resumed is None else self.resumed.moved)
            rows, charged = self.recomputed, self.charge / max(blended * num_layers, 1)
        in_chunks = rows[layout.is_chunk[rows]]
        deferred = sum(chunk.deferred for chunk in self.prompt.computed)
        fallback = self.plan.fallback_reason
        if self.prompt.computed and not self.prompt.chunks and fallback:
            if deferred:
                fallback = "all of its chunks are retrieved for the first time"
            elif any(chunk.is_elsewhere for chunk in self.prompt.computed):
                fallback = "none of its chunks stands where it was encoded, and the KV of this model cannot be moved"
            elif self.contexts:
                fallback = f"none of its chunks is served: {self.prompt.computed[0].note}"
        if self.guard_action is not None and not self.config.enabled:
            fallback = self.guard_action
        parts: list[_ReportedPart] = []
        tiers = self.tiers or [None] * len(self.hits)
        for chunk, span, hit, tier in zip(self.prompt.chunks, layout.chunks, self.hits, tiers, strict=True):
            inside = int(((rows >= span.start) & (rows < span.stop)).sum())
            held = span.stop <= resumed_rows
            whole = "the whole prompt was computed" if self.recomputed is None and not held else None
            damaged = chunk.key in self.unreadable and not held
            hit = hit and not damaged
            lost = "its stored KV could not be read" if damaged else "its KV was not stored"
            why = whole or chunk.note or (None if hit or held else lost)
            tier = "conversation" if held else tier
            report = ChunkReport(chunk.id, len(span), hit, inside, why, tier, self._attention(span))
            parts.append(_ReportedPart(span.start, chunk, report, is_miss=not hit))
        for chunk in self.prompt.computed:
            count = chunk.rows[1] - chunk.rows[0]
            attention = self._attention(ChunkSpan(chunk.row, chunk.row + count, chunk.row))
            report = ChunkReport(chunk.id, count, False, count, chunk.note, attention=attention)
            parts.append(_ReportedPart(chunk.row, chunk, report, is_miss=chunk.deferred or chunk.is_missed))
        chunks, hits, misses = _whole_chunks(parts)
        return BlendReport(
            ttft_s=first_output - self.started,
            load_s=self.open_s + self.wait_s,
            encode_s=self.encode_s,
            recompute_s=(self.forward_ended or first_output) - self.forward_started - self.wait_s,
            prompt_tokens=len(layout),
            context_tokens=context,
            recomputed_tokens=in_chunks.numel(),
            recompute_ratio=1.0 if self.recomputed is None else self.plan.ratio,
            charged_ratio=charged if context else 0.0,
            hits=hits,
            misses=misses,
            selector=self.plan.selector,
            fallback_reason=fallback,
            chunks=chunks,
            output_tokens=output_tokens,
            load_bytes=self.load_bytes,
            repaired_tokens=self.repaired_tokens,
            guard=self.guard_action,
            tpot_s=tpot_s,
            kv_bytes=self.kv_bytes,
            kv_bytes_before=self.kv_bytes_before,
            evicted_tokens=self.evicted_tokens,
            kept_reason=self.kept_reason,
            batch_size=self.batch_size,
            alone_reason=self.alone_reason,
            conversation_tokens=taken_over,
            conversation_recomputed_tokens=rows.numel() - in_chunks.numel(),
            head_tokens=self.head_tokens,
        )

    def _attention(self, span: ChunkSpan) -> float | None:
        return None if self.sources is None else self.sources.of(span)


class _ReportedPart(NamedTuple):
    """What is reported of a run of a chunk's tokens. What is computed though its KV may be there is neither hit nor miss."""

    row: int
    chunk: PromptChunk
    report: ChunkReport
    is_miss: bool


def _whole_chunks(parts: Sequence[_ReportedPart]) -> tuple[tuple[ChunkReport, ...], int, int]:
    """Put together what is reported of the parts of chunks: a report of each chunk in prompt order, hits and misses."""
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
    return tuple(whole.values()), sum(report.hit for report in whole.values()), sum(missed.values())
