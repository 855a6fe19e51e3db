"""Notes of a request on its way: what became of every token, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["LayerTimes", "Span", "Trace", "TracedChunk"]


@dataclass(slots=True)
class LayerTimes:
    """When the layers of a prompt's stored KV were loaded, and handed to the computation, by `time.perf_counter`.

    Attributes
    ----------
    load_began, load_ended : dict of (int, float)
        When the first of each layer's pieces was begun, and when the layer was whole.
    asked, handed : dict of (int, float)
        When the computation came to each layer's attention, and when it had the layer's KV.
    """

    load_began: dict[int, float] = field(default_factory=dict)
    load_ended: dict[int, float] = field(default_factory=dict)
    asked: dict[int, float] = field(default_factory=dict)
    handed: dict[int, float] = field(default_factory=dict)


class Span(NamedTuple):
    """What became of the rows of a half-open range, or what a time was spent on, from a moment to another.

    Attributes
    ----------
    what : str
        What became of them: the tier that their KV came from, "encoded", "head" or "conversation". Of a time: "queue", "open" or
        "encode".
    start, stop : float
        The range; whole numbers where it is of rows.
    """

    what: str
    start: float
    stop: float


class TracedChunk(NamedTuple):
    """A chunk of a prompt, and what became of it.

    Attributes
    ----------
    start, stop : int
        Its half-open range of rows.
    id : str or None
        Its id, if it has one.
    key : str
        Where its KV is stored.
    remembers : bool
        Whether its KV knows of text that stands before it in its document.
    tier, reason, attention
        As in `ChunkReport`.
    """

    start: int
    stop: int
    id: str | None
    key: str
    remembers: bool
    tier: str | None
    reason: str | None
    attention: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What became of every token of a prompt, and when; of one process, so that a copy or a pickle of a report is without it.

    Attributes
    ----------
    token_ids, output_ids : tuple of int
        The prompt, and what was generated.
    chunks : tuple of TracedChunk
        The chunks of the prompt, in order.
    reused : tuple of Span
        The rows whose KV was not computed in the prompt's forward; where two have a row, the later one holds.
    recomputed : tuple of int
        Those of them that were recomputed, ascending.
    started : float
        When the call came, by `time.perf_counter`, as all moments here.
    forward_started, forward_ended : float
        When the prefill began and ended.
    waits : tuple of Span
        What the time before was spent on.
    layers : LayerTimes or None
        When each layer was loaded and handed over; None where no stored KV was read.
    token_times : tuple of float
        When each token was there.
    """

    token_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    chunks: tuple[TracedChunk, ...]
    reused: tuple[Span, ...]
    recomputed: tuple[int, ...]
    started: float
    forward_started: float
    forward_ended: float
    waits: tuple[Span, ...]
    layers: LayerTimes | None
    token_times: tuple[float, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
