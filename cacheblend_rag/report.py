"""Reports: cost of a request and where its KV came from; what adding chunks did, or would cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

__all__ = [
    "AddResult",
    "BLENDING_OFF",
    "BlendReport",
    "CallReport",
    "ChunkReport",
    "LayerTimes",
    "OTHER_TEXT",
    "Span",
    "Trace",
    "TracedChunk",
    "WarmEstimate",
]

OTHER_TEXT = "its text is not the text that was added under this id"
"""The reason of a chunk whose id stands for another text."""
BLENDING_OFF = "blending is off"
"""The reason of a full prefill that was asked for."""


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """Report of one chunk of a prompt."""

    id: str | None
    tokens: int
    # Whether its KV was available when the request came: in the store, or at its place in an earlier prompt.
    hit: bool
    # How many of its tokens went through all of the model's later layers again.
    recomputed_tokens: int = 0
    # Why it was not served from stored KV: it was never added, another text was added under its id, its KV was evicted,
    # damaged or not computed yet, or why it was computed like text or left out. None for a hit; where the whole prompt was
    # computed, `BlendReport.fallback_reason` says why.
    reason: str | None = None
    # Where its stored KV was read from, "ram" or "disk" for example; "prefix" if it is part of what an earlier prompt began with
    # too; None if it was not read.
    tier: str | None = None
    # The share of the answer's attention that went to it, 0 to 1: the mean over the answer's tokens, the heads, and the
    # middle layers. None unless `SourceAttention` is attached to the engine.
    attention: float | None = None


@dataclass(frozen=True, slots=True)
class BlendReport:
    """The cost of one request, and where its KV came from.

    Attributes
    ----------
    ttft_s : float
        Seconds from the call to the first output id (or, for `BlendEngine.prefill`, to its logits), including lookup, hash
        check, loading, shifting and selection.
    load_s : float
        Seconds in which nothing was computed because stored KV was not there yet: opening it, and waiting for layers. Loading
        while another layer was computed does not count. On a CUDA device it is the device that waits.
    encode_s : float
        Seconds spent on encoding misses.
    recompute_s : float
        Seconds of the blended forward pass itself, without waiting.
    prompt_tokens : int
        Tokens of the whole prompt.
    context_tokens : int
        Tokens of its chunks.
    recomputed_tokens : int
        Chunk tokens that were recomputed by the prefill, in all layers after the selection.
    recompute_ratio : float
        The ratio that was requested, or that an attachment chose; 1 if the whole prompt was computed.
    charged_ratio : float
        Work done on chunk tokens divided by (chunk tokens x layers): a whole decoder-block row counts 1, a probe its share of
        a block's arithmetic. Selecting and repairing are part of it, encoding misses is not.
    hits, misses : int
        Chunks whose KV was, or was not, available when the request came, in the store or at their place in an earlier prompt.
    selector : str
        The selector that chose the recomputed tokens; "full" when the prompt was prefilled in full.
    fallback_reason : str or None
        Why the prompt was prefilled in full: what kept it from being blended, or that blending was not enabled.
    chunks : tuple of ChunkReport
        One for each chunk, in prompt order; after them those that were left out, without tokens.
    output_tokens : int
        Tokens generated so far.
    load_bytes : int
        Bytes of stored KV that were loaded, in the model's dtype. Layers that are computed in full are not loaded.
    repaired_tokens : int
        Chunk tokens that were recomputed while the answer was written.
    tpot_s : float or None
        Seconds per output token after the first, on average; None with fewer than two.
    kv_bytes : int
        Bytes of the prompt's KV in the cache when decoding began, after eviction.
    kv_bytes_before : int
        What they would have been without eviction (`SnapKV`).
    evicted_tokens : int
        Context tokens whose KV each head dropped, in every layer that is not kept whole.
    kept_reason : str or None
        Which layers were kept whole despite eviction, and why.
    batch_size : int
        Prompts whose answers were decoded together, this one included (`BlendEngine.generate_many`).
    alone_reason : str or None
        Why a prompt of `BlendEngine.generate_many` was decoded alone, if its settings or options are the cause.
    prefix_tokens : int
        Tokens that an earlier prompt, or its answer, began with too, whose KV was still at hand (`EngineConfig.prefix_bytes`).
    head_tokens : int
        Tokens of the fixed text that the prompt begins with (`FixedText`) whose KV was stored instead of computed. Where an
        earlier prompt shares more, `prefix_tokens` counts them instead.
    queue_s : float
        Seconds from when the prompt was tokenised until the model was free for it. For a prompt of `BlendEngine.generate_many`,
        this includes the time that the other prompts of its batch took.
    overhead_s : float
        The rest of `ttft_s` without `queue_s`, `load_s`, `encode_s` and `recompute_s`: tokenising, lookups, and
        the part of a prefill that was lost to damaged KV.
    trace : Trace or None
        What happened to every token, and when, in the process that answered; not printed, compared, copied or part of `to_dict`.
    """

    ttft_s: float
    load_s: float
    encode_s: float
    recompute_s: float
    prompt_tokens: int
    context_tokens: int
    recomputed_tokens: int
    recompute_ratio: float
    charged_ratio: float
    hits: int
    misses: int
    selector: str
    fallback_reason: str | None = None
    chunks: tuple[ChunkReport, ...] = field(default=())
    output_tokens: int = 0
    load_bytes: int = 0
    repaired_tokens: int = 0
    tpot_s: float | None = None
    kv_bytes: int = 0
    kv_bytes_before: int = 0
    evicted_tokens: int = 0
    kept_reason: str | None = None
    batch_size: int = 1
    alone_reason: str | None = None
    prefix_tokens: int = 0
    head_tokens: int = 0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    trace: Trace | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Return the figures that people look for first, on one line."""
        return (
            f"first token after {1000 * self.ttft_s:.0f} ms"
            + (f", {1000 * self.queue_s:.0f} of them waiting for the model" if self.queue_s >= 0.01 else "")
            + (
                f", {1000 * self.encode_s:.0f} of them encoding {'misses' if self.misses else 'the head'}"
                if self.encode_s
                else ""
            )
            + (
                f"; {self.prompt_tokens} tokens prefilled in full"
                if self.selector == "full"
                else f"; {self.hits} of {self.hits + self.misses} chunks hit, {self.recomputed_tokens} of "
                f"{self.context_tokens} chunk tokens recomputed"
                + (f" ({self.selector})" if self.recomputed_tokens else "")
            )
            + (f", {self.head_tokens} tokens of the head reused" if self.head_tokens else "")
            + (f", {self.prefix_tokens} tokens of an earlier prompt reused" if self.prefix_tokens else "")
            + (f", {self.repaired_tokens} repaired while answering" if self.repaired_tokens else "")
            + (f": {self.fallback_reason}" if self.fallback_reason else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain Python objects, one item for each attribute, for logs, JSON and framework metadata."""
        figures = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "trace"}
        return {**figures, "chunks": [asdict(chunk) for chunk in self.chunks]}


class CallReport(dict[str, Any]):
    """The `BlendReport` of a call as a dictionary."""

    # The report itself; None where there is none yet, or the dictionary was read from a file.
    last: BlendReport | None = None

    @classmethod
    def of(cls, report: BlendReport) -> CallReport:
        """Return a report as a dictionary."""
        made = cls(report.to_dict())
        made.last = report
        return made


@dataclass(frozen=True, slots=True)
class AddResult:
    """Result of `BlendEngine.add`."""

    # Texts whose KV was computed, and their `tokens`.
    encoded: int
    # Chunks that are new or have a new text; more than were encoded if texts recur or their KV was there already.
    named: int
    # Chunks that were already stored in exactly this form.
    unchanged: int
    tokens: int


@dataclass(frozen=True, slots=True)
class WarmEstimate:
    """Cost of encoding some chunks."""

    # Texts that are not stored yet, those of their documents that would be encoded again among them, and their tokens.
    chunks: int
    tokens: int
    # Size of their KV as `ram_codec` packs it; RAM keeps at most `EngineConfig.ram_bytes` of it.
    ram_bytes: int = 0
    # Size of their files as `disk_codec` packs them, in a store with a folder.
    disk_bytes: int = 0
    # Time to compute it, with no other work going on.
    seconds: float = 0.0


@dataclass(slots=True)
class LayerTimes:
    """Times at which a prompt's layers were loaded, and handed to the computation, by `time.perf_counter`."""

    # When the first of each layer's pieces was begun, and when the layer was whole.
    load_began: dict[int, float] = field(default_factory=dict)
    load_ended: dict[int, float] = field(default_factory=dict)
    # When the computation came to each layer's attention, and when it had the layer's KV.
    asked: dict[int, float] = field(default_factory=dict)
    handed: dict[int, float] = field(default_factory=dict)


class Span(NamedTuple):
    """Half-open range of rows, or of time, and what became of it."""

    # The tier that the KV of rows came from, "encoded", "head" or "prefix". Of a time: "queue", "open" or "encode".
    what: str
    start: float
    stop: float


class TracedChunk(NamedTuple):
    """A chunk of a prompt: its half-open range of rows, and what became of it, as in `ChunkReport`."""

    start: int
    stop: int
    id: str | None
    key: str
    # How many tokens its KV was read behind, beside the preamble.
    behind: int
    tier: str | None
    reason: str | None
    attention: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Record of what became of every token of a prompt, and when, by `time.perf_counter`."""

    token_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    chunks: tuple[TracedChunk, ...]
    # The rows whose KV was not computed in the prompt's forward; where two have a row, the later one holds.
    reused: tuple[Span, ...]
    # Those of them that were recomputed, ascending.
    recomputed: tuple[int, ...]
    # When the call came.
    started: float
    forward_started: float
    forward_ended: float
    # What the time before the prefill was spent on.
    waits: tuple[Span, ...]
    # None where no stored KV was read.
    layers: LayerTimes | None
    # When each token was there.
    token_times: tuple[float, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
