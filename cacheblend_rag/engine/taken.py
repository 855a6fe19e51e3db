"""What one turn of a conversation leaves, and what the next one takes over of it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.selection import Selector, make_selector
from cacheblend_rag.store import KVReader
from cacheblend_rag.store.device import DeviceReader, ResidentKV, Upload

__all__ = ["LEAST_RUN", "HeldTurn", "Making", "Resumption", "Run", "Seen", "find_runs", "gaps", "readers_of", "seen_by"]

LEAST_RUN = 8
"""Fewer tokens in a row are computed: they cost less than they might lose, and are alike by chance."""


@dataclass(frozen=True, slots=True)
class Run:
    """Half-open rows of a prompt whose tokens are those of a conversation from row `source` on."""

    start: int
    stop: int
    source: int

    @property
    def source_stop(self) -> int:
        """The row behind the last one it is taken from."""
        return self.source + self.stop - self.start


@dataclass(frozen=True, slots=True)
class Seen:
    """The first row of a turn that may know of a chunk, and when the chunk's time to live is over, by `steady_s`."""

    row: int
    expires_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Making:
    """How rows that are not exact were made, or are asked for.

    Attributes
    ----------
    ratio : float
        The recompute ratio; 0 where the selector recomputes nothing.
    selector : Selector
        What says which rows are recomputed, in which layers and when.
    """

    ratio: float
    selector: Selector

    @classmethod
    def of(cls, blend: BlendConfig, ratio: float) -> Making:
        """Return what settings ask for at a ratio."""
        selector = make_selector(blend.selector)
        return cls(0.0 if selector.name == "none" else ratio, selector)

    def serves(self, asked: Making) -> bool:
        """Return whether rows made so are no worse than what is asked for.

        Ratios are compared within one selector only: what one makes of a ratio says nothing about what another would.
        """
        return self.selector == asked.selector and asked.ratio <= self.ratio


@dataclass(frozen=True, eq=False)
class HeldTurn:
    """The sequence of a conversation's last turn.

    Attributes
    ----------
    token_ids : tuple of int
        Prompt and answer, without the last token of the answer, which the model has not read.
    layers : list of LayerKV
        Their KV, ``(1, num_kv_heads, len(token_ids), head_dim)`` for each layer, on the layer's device.
    exact : int
        How many of the first rows are the model's own: computed over rows that are.
    making : Making or None
        How the other rows were made, at the lowest ratio of any; None where there is none.
    seen : dict
        For each chunk that a row may know of, by its id (None without one) and key, what is known of that.
    """

    token_ids: tuple[int, ...]
    layers: list[LayerKV]
    exact: int
    making: Making | None
    seen: dict[tuple[str | None, str], Seen]

    @cached_property
    def names(self) -> frozenset[str]:
        """The ids of the chunks that a row may know of."""
        return frozenset(name for name, _ in self.seen if name is not None)

    @cached_property
    def expires_at(self) -> float:
        """When the first of them is over, by `steady_s`."""
        return min((chunk.expires_at for chunk in self.seen.values()), default=math.inf)

    def cut(self, rows: int) -> HeldTurn | None:
        """Return the first rows, without what the others keep in memory."""
        if rows >= len(self.token_ids):
            return self
        if rows <= 0:
            return None
        return replace(
            self,
            token_ids=self.token_ids[:rows],
            layers=[LayerKV(*(tensor[:, :, :rows].clone() for tensor in layer)) for layer in self.layers],
            exact=min(self.exact, rows),
            seen={chunk: seen for chunk, seen in self.seen.items() if seen.row < rows},
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return max(sum(layer.nbytes for layer in self.layers) // len(self.token_ids), 1)

    @cached_property
    def nbytes(self) -> int:
        """Bytes that it keeps in memory."""
        # A layer may be the beginning of a buffer with room behind it.
        storages = {tensor.untyped_storage() for layer in self.layers for tensor in layer}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True, eq=False)
class Resumption:
    """What a prompt takes over: its fixed head, and what its conversation has.

    Attributes
    ----------
    layout : PromptLayout
        The prompt as it is computed: its first rows resumed, and among the chunks behind them the runs of tokens that stood
        elsewhere in the turn before.
    chunks : int
        How many chunks of the prompt, from the first on, lie in the resumed rows.
    readers : mapping
        A reader of each run, and of the resumed rows unless they are those of the fixed head, by the row that it begins at.
    runs : tuple of Run
        Those runs, ascending.
    held : HeldTurn or None
        The turn before, in a conversation.
    head : int
        How many of the resumed rows are those of the prompt's fixed head: all or none.
    """

    layout: PromptLayout
    chunks: int
    readers: Mapping[int, KVReader]
    runs: tuple[Run, ...]
    held: HeldTurn | None
    head: int = 0

    @classmethod
    def of_head(cls, layout: PromptLayout, head: int, asked: Making | None) -> Resumption:
        """Return what a prompt takes over that has nothing of a conversation: the rows of its fixed head.

        Parameters
        ----------
        layout : PromptLayout
            The prompt.
        head : int
            How many rows there are.
        asked : Making or None
            How it makes its own rows; None where it is computed as a whole.
        """
        spans = layout.chunks if asked is not None else ()
        exact = layout.exact_chunks if spans else 0
        layout = replace(layout, chunks=spans, exact_chunks=exact, resumed_rows=head)
        return cls(layout, 0, {}, (), None, head)

    @property
    def continued(self) -> int:
        """How many first rows the prompt has from the turn before."""
        return self.layout.resumed_rows - self.head

    @property
    def moved(self) -> int:
        """How many tokens have their KV from another place in the turn before."""
        return sum(run.stop - run.start for run in self.runs)

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt have their KV from the conversation."""
        return self.continued + self.moved

    def merge(self, readers: Sequence[KVReader]) -> list[KVReader]:
        """Return a reader for each chunk of `layout`, given those of the prompt's chunks behind the resumed rows, in order."""
        others = iter(readers)
        return [self.readers.get(span.start) or next(others) for span in self.layout.chunks]


def gaps(start: int, spans: Sequence[ChunkSpan], end: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of rows from `start` to `end` that are in no span."""
    for span in spans:
        yield start, min(span.start, end)
        start = span.stop
    yield start, end


def find_runs(
    held: Sequence[int], wanted: Sequence[int], gaps: Iterator[tuple[int, int]], behind: int
) -> Iterator[Run]:
    """Yield runs of `wanted`, within the gaps, that are in `held` from row `behind` on, in the same order in both.

    Each row of `held` is used once at most. A chat only grows, so a question that is asked a second time finds nothing left of
    the first time, and is computed.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for row in range(behind, len(held) - LEAST_RUN + 1):
        places.setdefault(tuple(held[row : row + LEAST_RUN]), []).append(row)
    for start, end in gaps:
        row = start
        while row + LEAST_RUN <= end:
            found = places.get(tuple(wanted[row : row + LEAST_RUN]), [])
            place = bisect_left(found, behind)
            if place == len(found):
                row += 1
                continue
            source = found[place]
            length = LEAST_RUN
            while row + length < end and source + length < len(held) and held[source + length] == wanted[row + length]:
                length += 1
            yield Run(row, row + length, source)
            row, behind = row + length, source + length


def readers_of(held: HeldTurn, runs: Sequence[Run]) -> dict[int, KVReader]:
    """Return a reader of each run, by the row that it begins at in the prompt."""
    # Layers are put together in another stream than that in which the KV was computed.
    devices = {layer.keys.device for layer in held.layers}
    done = {device: _now(device) for device in devices} if runs else {}
    readers: dict[int, KVReader] = {}
    for run in runs:
        rows = slice(run.source, run.source_stop)
        uploads = [
            Upload(LayerKV(*(tensor[0, :, rows] for tensor in layer)), done[layer.keys.device]) for layer in held.layers
        ]
        readers[run.start] = DeviceReader(ResidentKV(held.token_ids[rows], run.source, uploads))
    return readers


def _now(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind all that a CUDA device has been given in the current stream; None on other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seen_by(
    prompt: AssembledPrompt, resumption: Resumption | None, expiry: Mapping[str, float]
) -> dict[tuple[str | None, str], Seen]:
    """Return for each chunk that a row of this turn may know of the first row that does, and when the chunk is over.

    Parameters
    ----------
    prompt : AssembledPrompt
        The turn's prompt.
    resumption : Resumption or None
        What it took over. What knew of a chunk in the turn before is over when it would have been there.
    expiry : mapping of str to float
        When the KV of the prompt's chunks is over, by their keys.
    """
    seen: dict[tuple[str | None, str], Seen] = {}
    placed = [*zip(prompt.chunks, (span.start for span in prompt.layout.chunks), strict=True)]
    placed += [(chunk, chunk.row) for chunk in prompt.computed]
    if resumption is not None and resumption.held is not None:
        resumed = resumption.continued
        for chunk, before in resumption.held.seen.items():
            first = before.row
            rows = [run.start + max(first - run.source, 0) for run in resumption.runs if run.source_stop > first]
            if first < resumed or rows:
                seen[chunk] = Seen(first if first < resumed else min(rows), before.expires_at)
    for part, row in placed:
        name, over = (part.id, part.key), expiry.get(part.key, math.inf)
        # One without an id cannot be deleted; it can only be over.
        if part.id is not None or over < math.inf:
            known = seen.get(name, Seen(row))
            seen[name] = Seen(min(row, known.row), min(over, known.expires_at))
    return seen
