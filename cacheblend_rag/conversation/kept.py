"""The last turns of an engine's conversations."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol
from weakref import WeakKeyDictionary

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.selection import Selector, make_selector
from cacheblend_rag.store import NodeRecord

__all__ = ["HeldTurn", "KeptTurns", "KnownChunks", "Making", "Seen"]


class KnownChunks(Protocol):
    """What a conversation asks about chunks; a store answers."""

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None] | None: ...
    def lifetimes(self, keys: Sequence[str]) -> list[float | None]: ...


@dataclass(frozen=True, slots=True)
class Seen:
    """The first row of a turn that may know of a chunk, and when the chunk's time to live is over, by `time.time`."""

    row: int
    expires_at: float = math.inf


@dataclass(frozen=True, slots=True)
class Making:
    """How rows that are not exact were made, or are asked for; a selector that recomputes nothing has ratio 0."""

    ratio: float
    selector: Selector

    @classmethod
    def of(cls, blend: BlendConfig, ratio: float) -> Making:
        """Return what settings ask for at a ratio."""
        selector = make_selector(blend.selector)
        return cls(0.0 if selector.name == "none" else ratio, selector)

    def serves(self, asked: Making) -> bool:
        """Return whether rows made so are no worse than what is asked for; ratios of two selectors cannot be compared."""
        return self.selector == asked.selector and asked.ratio <= self.ratio


@dataclass(frozen=True, eq=False)
class HeldTurn:
    """The sequence of a conversation's last turn: prompt and answer, without its last token, which the model has not read."""

    token_ids: tuple[int, ...]
    # ``(1, num_kv_heads, len(token_ids), head_dim)`` each, on the layer's device.
    layers: list[LayerKV]
    # How many of the first rows are the model's own: computed over rows that are. The others were made as `making` says.
    exact: int
    making: Making | None
    # How many of the first rows are the prompt's.
    given: int
    # Of each chunk that a row may know of, by its id (None without one) and key.
    seen: dict[tuple[str | None, str], Seen]

    @cached_property
    def names(self) -> frozenset[str]:
        """The ids of the chunks that a row may know of."""
        return frozenset(name for name, _ in self.seen if name is not None)

    @cached_property
    def expires_at(self) -> float:
        """When the first of them is over, by `time.time`."""
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
        # A layer may be the beginning of a buffer with room after it.
        storages = {tensor.untyped_storage() for layer in self.layers for tensor in layer}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class KeptTurns:
    """The last turn of each conversation of an engine, as long as the conversation is in use.

    Together they take at most `limit_bytes` of KV; the least recently used turn is dropped first. All methods may be called
    from any thread; `lock` is held by each, and makes several of them one.
    """

    def __init__(self, store: KnownChunks, namespace: str, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.lock = threading.RLock()
        self._store = store
        self._namespace = namespace
        # Least recently used first.
        self._turns: WeakKeyDictionary[object, HeldTurn] = WeakKeyDictionary()
        self._closed = False

    def get(self, owner: object) -> HeldTurn | None:
        """Return what is kept of a conversation, without looking up whether its chunks are still there."""
        with self.lock:
            self._cut([owner])
            return self._turns.get(owner)

    def fresh(self, owner: object, given: Mapping[str, str]) -> HeldTurn | None:
        """Return what knows of no chunk that is gone, or has another key in `given`; forget the rest, and mark it as used."""
        with self.lock:
            self._cut([owner], self._names([owner]), given)
            turn = self._turns.pop(owner, None)
            if turn is not None:
                self._turns[owner] = turn
            return turn

    def keep(self, owner: object, turn: HeldTurn | None) -> None:
        """Keep a turn of a conversation, instead of the one before, and forget others for room."""
        with self.lock:
            self._turns.pop(owner, None)
            if turn is None or self._closed:
                return
            self._turns[owner] = turn
            # A chunk that was deleted while the turn was computed, and what is over by now anywhere.
            self._cut([owner], turn.names)
            self._cut(list(self._turns))
            held = list(self._turns.items())
            total = sum(each.nbytes for _, each in held)
            for oldest, each in held:
                if total <= self.limit_bytes:
                    return
                del self._turns[oldest]
                total -= each.nbytes

    def drop(self, owner: object) -> None:
        """Forget a conversation's turn."""
        with self.lock:
            self._turns.pop(owner, None)

    def refresh(self) -> None:
        """Have all conversations forget, by one lookup, what knows of chunks that are gone or now follow other text."""
        with self.lock:
            owners = list(self._turns)
            self._cut(owners, self._names(owners))

    def close(self) -> None:
        """Forget everything, and keep nothing any more."""
        with self.lock:
            self._closed = True
            self._turns.clear()

    def _names(self, owners: Sequence[object]) -> set[str]:
        """Return the ids of the chunks that the turns of some conversations may know of."""
        return {name for owner in owners if owner in self._turns for name in self._turns[owner].names}

    def _cut(
        self, owners: Sequence[object], names: Collection[str] = (), given: Mapping[str, str] | None = None
    ) -> None:
        """Cut turns before the first row that knows of a chunk whose time is over, or that is one of `names` and is gone."""
        # What cannot be read may be gone.
        known = (self._store.lookup(self._namespace, list(names)) if names else None) or []
        keys = {record.id: record.key for record in known if record is not None}
        given, now = given or {}, time.time()
        for owner in owners:
            turn = self._turns.get(owner)
            if turn is None or (not names and turn.expires_at > now):
                continue
            stale = [
                chunk.row
                for (name, key), chunk in turn.seen.items()
                if chunk.expires_at <= now
                or (name is not None and name in names and not key == keys.get(name) == given.get(name, key))
            ]
            if stale:
                kept = turn.cut(min(stale))
                if kept is None:
                    del self._turns[owner]
                else:
                    self._turns[owner] = kept
