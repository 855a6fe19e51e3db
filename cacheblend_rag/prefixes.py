"""Earlier prompts whose KV is still at hand, and what a new prompt takes over of them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.prompt import AssembledPrompt, PromptChunk
from cacheblend_rag.store import KVReader, NodeRecord

__all__ = ["HeldPrompt", "KnownChunks", "PrefixCache", "cut_layers", "RowsReader", "drop_oldest", "storage_bytes"]

_LEAST_ROWS = 8
"""A shorter beginning is simply computed: that costs less than taking it over."""
_MOST_PROMPTS = 256

_Place = tuple[int, int, str, int]


class KnownChunks(Protocol):
    """What is asked about the chunks of earlier prompts; a store answers."""

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None] | None: ...


@dataclass(frozen=True, eq=False)
class HeldPrompt:
    """A prompt and its answer whose KV is at hand, without the last token, which the model has not read."""

    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]
    # The rows of chunks that were not computed, ascending; see `_shareable`.
    stored: tuple[_Place, ...]
    # All chunks.
    seen: tuple[PromptChunk, ...]
    # The KV itself, in the form of who keeps it.
    kv: Any
    nbytes: int

    def shared_rows(self, token_ids: np.ndarray[tuple[int], np.dtype[np.int64]], stored: tuple[_Place, ...]) -> int:
        """Return how many first rows are those of a prompt with these tokens and stored chunks."""
        rows = min(len(self.token_ids), len(token_ids))
        differs = self.token_ids[:rows] != token_ids[:rows]
        rows = int(differs.argmax()) if differs.any() else rows
        for mine, other in zip_longest(self.stored, stored):
            if mine != other:
                rows = min([rows, *(each[0] for each in (mine, other) if each is not None)])
                break
        # A chunk that is held in part comes from the store whole.
        return min([rows, *(start for start, stop, *_ in stored if start < rows < stop)])


class PrefixCache:
    """The most recent prompts of an engine, of which the next ones take over what both begin with.

    Rows are shared if all tokens up to there are the same, and stand behind the same stored chunks: the KV is then what the
    prompt would compute itself. What a selector recomputes depends on the whole prompt, so a prompt with a ratio shares what
    stands before its first chunk. What has seen a named chunk that was deleted or replaced since, by any process, is dropped
    before it would be used. All methods may be called from any thread.
    """

    def __init__(
        self,
        store: KnownChunks,
        namespace: str,
        limit_bytes: int,
        shelf: WeakSet[PrefixCache],
        cut: Callable[[Any, int], Any],
    ) -> None:
        self.limit_bytes = limit_bytes
        self._shelf = shelf
        self._store, self._namespace, self._cut_kv = store, namespace, cut
        self._lock = threading.RLock()
        # Least recently used first, each with the moment of its last use.
        self._held: dict[HeldPrompt, float] = {}
        self._closed = False
        shelf.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the KV that it keeps."""
        with self._lock:
            return sum(each.nbytes for each in self._held)

    @property
    def oldest_use(self) -> float:
        """When the prompt that is dropped next was last used, by `time.monotonic`; infinity where there is none."""
        with self._lock:
            return next(iter(self._held.values()), math.inf)

    def find(self, prompt: AssembledPrompt, ratio: float | None, least: int = 0) -> tuple[HeldPrompt, int] | None:
        """Return the prompt that shares most with a new one, and how many rows; None if it is not more than `least`."""
        if prompt.places is not None:
            return None
        most, stored = _shareable(prompt, ratio, len(prompt.layout) - 1)
        token_ids = np.array(prompt.layout.token_ids[:most], np.int64)
        while True:
            with self._lock:
                # Of several that share as much, the last used one, so that the others grow old.
                shared = {each: each.shared_rows(token_ids, stored) for each in reversed(self._held)}
            held = max(shared, key=shared.__getitem__, default=None)
            if held is None or shared[held] < max(least + 1, _LEAST_ROWS):
                return None
            if self._is_fresh(held):
                with self._lock:
                    # It may have been dropped meanwhile.
                    if held in self._held:
                        del self._held[held]
                        self._held[held] = time.monotonic()
                        return held, shared[held]

    def keep(
        self,
        prompt: AssembledPrompt,
        output_ids: Sequence[int],
        ratio: float | None,
        rows: int,
        kv: Any,
        nbytes: int,
    ) -> bool:
        """Keep a prompt and its answer, whose first `rows` the KV is of; return whether it is kept, or was at least cut."""
        most, stored = _shareable(prompt, ratio, rows)
        if prompt.places is not None or nbytes > self.limit_bytes or most < _LEAST_ROWS:
            return False
        if most < rows:
            kv, nbytes, rows = self._cut_kv(kv, most), nbytes * most // rows, most
        chunks = [chunk for chunk in (*prompt.chunks, *prompt.computed) if chunk.start < rows]
        token_ids = np.array((*prompt.layout.token_ids, *output_ids)[:rows], np.int64)
        held = HeldPrompt(token_ids, tuple(each for each in stored if each[0] < rows), tuple(chunks), kv, nbytes)
        with self._lock:
            if self._closed:
                return False
            for each in list(self._held):
                # What begins the new one has nothing that this has not.
                if held.shared_rows(each.token_ids, each.stored) == len(each.token_ids):
                    self._cut(each, 0)
            self._held[held] = time.monotonic()
            if len(self._held) > _MOST_PROMPTS:
                self.drop_oldest()
        while sum(each.nbytes for each in list(self._shelf)) > self.limit_bytes and drop_oldest(self._shelf):
            pass
        # A chunk may have been deleted while the prompt was computed.
        self._is_fresh(held)
        return True

    def drop_oldest(self) -> None:
        """Drop the prompt that was used least recently, if there is one."""
        with self._lock:
            if self._held:
                self._cut(next(iter(self._held)), 0)

    def refresh(self, deleted: Collection[str] = ()) -> None:
        """Drop all rows that have seen a chunk which is gone or replaced, or that of a deleted id which had no name."""
        with self._lock:
            held = list(self._held)
        for each in held:
            self._is_fresh(each, deleted)

    def close(self) -> None:
        """Drop everything, and keep nothing any more."""
        with self._lock:
            self._closed = True
            for each in list(self._held):
                self._cut(each, 0)

    def _is_fresh(self, held: HeldPrompt, deleted: Collection[str] = ()) -> bool:
        """Drop a prompt's rows from the first chunk on that is gone or replaced; return whether there was none."""
        ids = list({chunk.id for chunk in held.seen if chunk.id is not None})
        # What cannot be read may be gone.
        known = (self._store.lookup(self._namespace, ids) if ids else None) or ()
        keys: dict[str | None, tuple[str, ...]] = {each.id: each.keys for each in known if each is not None}
        stale = [
            chunk.start
            for chunk in held.seen
            if chunk.id in deleted or (chunk.key not in keys[chunk.id] if chunk.id in keys else chunk.named)
        ]
        if stale:
            self._cut(held, min(stale))
        return not stale

    def _cut(self, held: HeldPrompt, rows: int) -> None:
        """Keep the first rows of a prompt only."""
        with self._lock:
            used = self._held.pop(held, None)
            if used is None:
                return
            rows = 0 if rows < _LEAST_ROWS else rows
            kv = self._cut_kv(held.kv, rows)
            if rows:
                stored = tuple(each for each in held.stored if each[0] < rows)
                seen = tuple(each for each in held.seen if each.start < rows)
                nbytes = held.nbytes * rows // len(held.token_ids)
                self._held[HeldPrompt(held.token_ids[:rows], stored, seen, kv, nbytes)] = used


def _shareable(prompt: AssembledPrompt, ratio: float | None, rows: int) -> tuple[int, tuple[_Place, ...]]:
    """Return how many of its first rows a prompt may share, and of the chunks that are not computed their half-open rows, keys,
    and the first tokens that stand there.
    """
    chunks = prompt.chunks if ratio is not None else ()
    most = min(rows, chunks[0].start) if ratio and chunks else rows
    return most, tuple((chunk.start, chunk.stop, chunk.key, chunk.first) for chunk in chunks)


def drop_oldest(shelf: Iterable[PrefixCache]) -> bool:
    """Drop the prompt of all caches that was used least recently; return whether there was one."""
    oldest = min(shelf, key=lambda each: each.oldest_use, default=None)
    if oldest is None or oldest.oldest_use == math.inf:
        return False
    oldest.drop_oldest()
    return True


def cut_layers(layers: list[LayerKV], rows: int) -> list[LayerKV]:
    """Return the first rows of layers, ``(1, num_kv_heads, rows, head_dim)``, without what the others keep in memory."""
    return [LayerKV(*(tensor[:, :, :rows].clone() for tensor in layer)) for layer in layers if rows]


def storage_bytes(layers: Sequence[LayerKV]) -> int:
    """Return the bytes that layers keep in memory: each may be the beginning of a buffer with room after it."""
    storages = {tensor.untyped_storage() for layer in layers for tensor in layer}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class RowsReader(KVReader):
    """Reads the first rows of layers on their devices, as many as there are tokens."""

    tier = "device"

    def __init__(self, token_ids: tuple[int, ...], layers: Sequence[LayerKV]) -> None:
        self._layers = [LayerKV(*(tensor[0, :, : len(token_ids)] for tensor in layer)) for layer in layers]
        super().__init__(token_ids, 0, "", len(layers), "native", sum(layer.nbytes for layer in self._layers))

    def layer(self, index: int) -> LayerKV:
        return self._layers[index]
