"""What a conversation has computed, kept from one turn to the next."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from cacheblend_rag.engine.prompt import AssembledPrompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.store.device import DeviceReader, ResidentKV, Upload

__all__ = ["Conversation", "Conversations", "Resumption"]

_LEAST_RUN = 8
"""Fewer tokens in a row are computed: they cost less than they might lose, and are alike by chance."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Half-open rows of a prompt whose tokens are those of a conversation from row `source` on."""

    start: int
    stop: int
    source: int

    @property
    def source_stop(self) -> int:
        return self.source + self.stop - self.start


@dataclass(frozen=True, eq=False)
class Resumption:
    """What a prompt takes over from its conversation.

    Attributes
    ----------
    layout : PromptLayout
        The prompt as it is computed: its first rows resumed, and among the chunks behind them the runs of tokens that stood
        elsewhere in the turn before.
    rows : sequence of LayerKV
        The KV of the resumed rows, ``(1, num_kv_heads, resumed_rows, head_dim)`` for each layer.
    chunks : int
        How many chunks of the prompt, from the first on, lie in the resumed rows.
    """

    layout: PromptLayout
    rows: Sequence[LayerKV]
    chunks: int
    _readers: Mapping[int, KVReader]
    _runs: tuple[_Run, ...]
    _held: _Held

    @property
    def tokens(self) -> int:
        """How many tokens of the prompt have their KV from the conversation."""
        return self.layout.resumed_rows + sum(run.stop - run.start for run in self._runs)

    def merge(self, readers: Sequence[KVReader]) -> list[KVReader]:
        """Return a reader for each chunk of `layout`, given those of the prompt's chunks behind the resumed rows, in order."""
        others = iter(readers)
        return [self._readers.get(span.start) or next(others) for span in self.layout.chunks]


@dataclass(frozen=True, eq=False)
class _Held:
    """The sequence of the last turn.

    Attributes
    ----------
    token_ids : tuple of int
        Prompt and answer, without the last token of the answer, which the model has not read.
    layers : list of LayerKV
        Their KV, ``(1, num_kv_heads, len(token_ids), head_dim)`` for each layer, on the layer's device.
    exact : int
        How many of the first rows are the model's own: computed over rows that are.
    ratio : float
        The lowest recompute ratio that the other rows were made at.
    seen : dict
        For each chunk that a row may know of, its id and key, the first row that does.
    """

    token_ids: tuple[int, ...]
    layers: list[LayerKV]
    exact: int
    ratio: float
    seen: dict[tuple[str, str], int]

    def cut(self, rows: int) -> _Held | None:
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
            seen={chunk: row for chunk, row in self.seen.items() if row < rows},
        )

    @property
    def row_bytes(self) -> int:
        return max(sum(layer.nbytes for layer in self.layers) // len(self.token_ids), 1)

    @property
    def nbytes(self) -> int:
        # A layer may be the beginning of a buffer with room behind it.
        storages = {tensor.untyped_storage() for layer in self.layers for tensor in layer}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class Conversation:
    """The KV of a conversation's last turn, prompt and answer, for the next turn to go on from.

    Made by `BlendEngine.conversation`, and given to each of its turns. What a turn takes over is found by token ids alone:

    - The tokens that both turns begin with keep their KV as it is. Nothing of them is computed, loaded or chosen again.
    - Other tokens in a row that the turn before had elsewhere, as the history of a chat behind another context, keep their KV as
      chunks do: moved to their new positions and blended, by the selector and at the ratio of the turn.
    - All others are computed; chunks come from the store, as ever.

    The KV of a row is exact if the row was computed, and all rows before it are exact. Where a turn is computed as a whole, as at
    ``recompute_ratio=1``, only the exact rows that both turns begin with are taken over, so that the turn has the answer of the
    model's own ``generate`` (as far as rounding lets a token that is computed alone equal one that is computed among others).
    At lower ratios, first rows that are not exact are taken over unless they were made at a lower ratio than this turn's.

    A row that was computed behind a chunk knows of it. When a chunk is deleted or replaced, by whatever process, every row that
    may know of it is dropped: at once by the engine that deletes it, else before the next turn. A chunk that came without an id
    cannot be deleted, and one whose id the engine does not know, or knows for another text, vouches for nothing: what stands
    behind it is computed anew in the next turn.

    Nothing is taken over from or kept of prompts with positions of their own, of models that cannot be blended, and with
    ``kv_capacity``, which drops rows.

    Parameters
    ----------
    store : KVStore
        Knows which chunks there are.
    namespace : str
        Where their names are.
    max_bytes : int
        Most bytes of KV; of a longer turn its first rows are kept.
    """

    def __init__(self, store: KVStore, namespace: str, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._store = store
        self._namespace = namespace
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._resets = 0

    @property
    def tokens(self) -> int:
        """How many tokens it holds KV of."""
        held = self._held
        return 0 if held is None else len(held.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of KV it holds, where the model computes."""
        held = self._held
        return 0 if held is None else held.nbytes

    def reset(self) -> None:
        """Forget everything; what a turn under way computes is not kept."""
        with self._lock:
            self._held = None
            self._resets += 1

    def belongs_to(self, store: KVStore, namespace: str) -> bool:
        """Return whether it is a conversation with this store and model."""
        return self._store is store and self._namespace == namespace

    def refresh(self) -> None:
        """Drop every row that may know of a chunk which was deleted or replaced."""
        with self._lock:
            self._drop_stale()

    @property
    def resets(self) -> int:
        """How often it was reset."""
        return self._resets

    def resume(self, prompt: AssembledPrompt, ratio: float, *, blended: bool) -> Resumption | None:
        """Return what a prompt takes over, or None if that is nothing.

        Parameters
        ----------
        prompt : AssembledPrompt
            The prompt.
        ratio : float
            Its recompute ratio.
        blended : bool
            Whether it is blended; otherwise it is computed as a whole.
        """
        with self._lock:
            self._drop_stale()
            held = self._held
        if held is None or prompt.has_positions:
            return None
        layout = prompt.layout
        # The last row is computed: its logits are what the prompt is for.
        end = len(layout) - 1
        pairs = zip(held.token_ids, layout.token_ids[:end], strict=False)
        rows = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not blended or ratio > held.ratio:
            rows = min(rows, held.exact)
        if blended:
            # A chunk that is held in part comes from the store whole.
            rows = min([rows, *(span.start for span in layout.chunks if span.start < rows < span.stop)])
        if rows < _LEAST_RUN:
            rows = 0
        behind = tuple(span for span in layout.chunks if span.start >= rows)
        runs = tuple(_find_runs(held.token_ids, layout.token_ids, _gaps(rows, behind, end), rows)) if blended else ()
        if not rows and not runs:
            return None
        first = [LayerKV(*(tensor[:, :, :rows] for tensor in layer)) for layer in held.layers]
        spans = [*behind, *(ChunkSpan(run.start, run.stop, run.start) for run in runs)] if blended else []
        exact = layout.exact_chunks if len(behind) == len(layout.chunks) else 0
        spans.sort(key=lambda span: span.start)
        if exact and spans and spans[0] != layout.chunks[0]:
            exact = 0
        return Resumption(
            replace(layout, chunks=tuple(spans), exact_chunks=exact if spans else 0, resumed_rows=rows),
            first,
            len(layout.chunks) - len(behind),
            {run.start: _reader(held, run) for run in runs},
            runs,
            held,
        )

    def keep(
        self,
        prompt: AssembledPrompt,
        output_ids: Sequence[int],
        layers: list[LayerKV],
        resumption: Resumption | None,
        ratio: float,
        *,
        blended: bool,
        resets: int,
    ) -> None:
        """Hold a turn that is over, instead of the one before.

        Parameters
        ----------
        prompt : AssembledPrompt
            The prompt.
        output_ids : sequence of int
            What was generated.
        layers : list of LayerKV
            The KV of all that the model has read, ``(1, num_kv_heads, seq_len, head_dim)`` for each layer. Taken over.
        resumption : Resumption or None
            What the prompt took over.
        ratio : float
            The recompute ratio it was prefilled at.
        blended : bool
            Whether it was blended.
        resets : int
            `resets` when the turn began; nothing is kept where it has changed.
        """
        if prompt.has_positions:
            return
        ids = (prompt.layout.token_ids + tuple(output_ids))[: layers[0].keys.shape[2]]
        resumed = 0 if resumption is None else resumption.layout.resumed_rows
        before = None if resumption is None else resumption._held
        exact, lowest = len(ids), 1.0
        if before is not None and resumed > before.exact:
            exact, lowest = before.exact, before.ratio
        if blended:
            spans = prompt.layout.chunks if resumption is None else resumption.layout.chunks
            exact = min([exact, *(span.start for span in spans)])
            lowest = min(lowest, ratio)
        held: _Held | None = _Held(ids, layers, exact, lowest, _seen(prompt, resumption))
        assert held is not None
        if held.nbytes > self.max_bytes:
            held = held.cut(min(self.max_bytes // held.row_bytes, len(ids) - 1))
        with self._lock:
            if self._resets == resets:
                self._held = held
                # A chunk that was deleted while the turn was computed.
                self._drop_stale()

    def _drop_stale(self) -> None:
        held = self._held
        if held is None or not held.seen:
            return
        known = self._store.lookup(self._namespace, list(dict.fromkeys(name for name, _ in held.seen)))
        keys = {record.id: record.key for record in known if record is not None}
        stale = [row for (name, key), row in held.seen.items() if keys.get(name) != key]
        if stale:
            self._held = held.cut(min(stale))


class Conversations:
    """The conversations of one engine, as long as somebody has them.

    Parameters
    ----------
    store : KVStore
        The engine's store.
    namespace : str
        Where its names are.
    """

    def __init__(self, store: KVStore, namespace: str) -> None:
        self._store = store
        self._namespace = namespace
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[Conversation] = weakref.WeakSet()

    def begin(self, max_bytes: int) -> Conversation:
        """Return a new one, that holds at most so many bytes."""
        conversation = Conversation(self._store, self._namespace, max_bytes)
        with self._lock:
            self._all.add(conversation)
        return conversation

    def checked(self, conversation: Conversation | None) -> Conversation | None:
        """Return `conversation`.

        Raises
        ------
        ConfigError
            If it is one with another engine.
        """
        if conversation is not None and not conversation.belongs_to(self._store, self._namespace):
            raise ConfigError(
                "the conversation is one with another engine, whose KV is of no use here; make it by this engine's conversation()"
            )
        return conversation

    def refresh(self) -> None:
        """Have every one drop what may know of chunks that are no longer there."""
        for conversation in self._listed():
            conversation.refresh()

    def close(self) -> None:
        """Forget everything."""
        for conversation in self._listed():
            conversation.reset()

    def _listed(self) -> list[Conversation]:
        with self._lock:
            return list(self._all)


def _gaps(start: int, spans: Sequence[ChunkSpan], end: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of rows from `start` to `end` that are in no span."""
    for span in spans:
        yield start, min(span.start, end)
        start = span.stop
    yield start, end


def _find_runs(
    held: Sequence[int], wanted: Sequence[int], gaps: Iterator[tuple[int, int]], behind: int
) -> Iterator[_Run]:
    """Yield runs of `wanted`, within the gaps, that are in `held` from row `behind` on, in the same order in both.

    Each row of `held` is used once at most. A chat only grows, so a question that is asked a second time finds nothing left of
    the first time, and is computed.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for row in range(behind, len(held) - _LEAST_RUN + 1):
        places.setdefault(tuple(held[row : row + _LEAST_RUN]), []).append(row)
    for start, end in gaps:
        row = start
        while row + _LEAST_RUN <= end:
            found = places.get(tuple(wanted[row : row + _LEAST_RUN]), [])
            place = bisect_left(found, behind)
            if place == len(found):
                row += 1
                continue
            source = found[place]
            length = _LEAST_RUN
            while row + length < end and source + length < len(held) and held[source + length] == wanted[row + length]:
                length += 1
            yield _Run(row, row + length, source)
            row, behind = row + length, source + length


def _reader(held: _Held, run: _Run) -> KVReader:
    rows = slice(run.source, run.source_stop)
    uploads = [Upload(LayerKV(*(tensor[0, :, rows] for tensor in layer)), None) for layer in held.layers]
    return DeviceReader(ResidentKV(held.token_ids[rows], run.source, uploads))


def _seen(prompt: AssembledPrompt, resumption: Resumption | None) -> dict[tuple[str, str], int]:
    """Return for each chunk that a row of this turn may know of the first row that does."""
    seen: dict[tuple[str, str], int] = {}
    placed = [*zip(prompt.chunks, (span.start for span in prompt.layout.chunks), strict=True)]
    placed += [(chunk, chunk.row) for chunk in prompt.computed]
    if resumption is not None:
        resumed = resumption.layout.resumed_rows
        for chunk, first in resumption._held.seen.items():
            # What knew of it in the turn before, and was taken over.
            rows = [run.start + max(first - run.source, 0) for run in resumption._runs if run.source_stop > first]
            if first < resumed or rows:
                seen[chunk] = first if first < resumed else min(rows)
    for part, row in placed:
        if part.id is not None:
            name = (part.id, part.key)
            seen[name] = min(row, seen.get(name, row))
    return seen
