"""Notes of a request on its way: what became of every token, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["LayerTimes", "Span", "Trace", "TracedChunk"]


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
