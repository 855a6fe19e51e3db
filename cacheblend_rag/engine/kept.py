"""The last turns of an engine's conversations."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from weakref import WeakKeyDictionary

from cacheblend_rag.engine.taken import HeldTurn
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.clock import steady_s

__all__ = ["KeptTurns"]


class KeptTurns:
    """What is kept of each conversation, as long as somebody has it.

    It is at most so many bytes of KV together; the least recently used turn is dropped first. All methods may be called from any
    thread.

    Parameters
    ----------
    store : KVStore
        Knows which chunks there are.
    namespace : str
        Where their names are.
    limit_bytes : int
        Most bytes of all turns together.

    Attributes
    ----------
    lock : threading.RLock
        Held by every method; held around several of them, they are one.
    """

    def __init__(self, store: KVStore, namespace: str, limit_bytes: int) -> None:
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
            self._forget([owner], {}, {}, ())
            return self._turns.get(owner)

    def fresh(self, owner: object, given: Mapping[str, str]) -> HeldTurn | None:
        """Return of a conversation what knows of no chunk that is gone, forget the rest, and mark it as used.

        Parameters
        ----------
        owner : object
            The conversation.
        given : mapping of str to str
            The keys of a prompt's chunks by their ids, which may be news.
        """
        with self.lock:
            turn = self._turns.get(owner)
            if turn is None:
                return None
            self._forget([owner], self._keys(turn.names), given, turn.names)
            turn = self._turns.pop(owner, None)
            if turn is not None:
                self._turns[owner] = turn
            return turn

    def keep(self, owner: object, turn: HeldTurn | None) -> None:
        """Keep a turn of a conversation, instead of the one before, and forget others for room."""
        with self.lock:
            self._turns.pop(owner, None)
            if turn is None or turn.nbytes > self.limit_bytes or self._closed:
                return
            self._turns[owner] = turn
            # A chunk that was deleted while the turn was computed, and what is over by now anywhere.
            self._forget([owner], self._keys(turn.names), {}, turn.names)
            self._forget(list(self._turns), {}, {}, ())
            self._make_room()

    def drop(self, owner: object) -> None:
        """Forget a conversation's turn."""
        with self.lock:
            self._turns.pop(owner, None)

    def refresh(self) -> None:
        """Have all conversations forget what knows of chunks that are gone, or stand behind other text by now, by one lookup."""
        with self.lock:
            names = {name for turn in list(self._turns.values()) for name in turn.names}
            if names:
                self._forget(list(self._turns), self._keys(names), {}, names)

    def close(self) -> None:
        """Forget everything, and keep nothing any more."""
        with self.lock:
            self._closed = True
            self._turns.clear()

    def _keys(self, names: Collection[str]) -> dict[str, str]:
        """Return the keys that names lead to; those that lead nowhere are not in it."""
        known = self._store.lookup(self._namespace, list(names)) if names else []
        return {record.id: record.key for record in known if record is not None}

    def _forget(
        self, owners: Iterable[object], keys: Mapping[str, str], given: Mapping[str, str], names: Collection[str]
    ) -> None:
        """Cut turns before the first row that knows of a chunk whose time is over, or that is one of `names` and is gone."""
        now = steady_s()
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

    def _make_room(self) -> None:
        total = sum(turn.nbytes for turn in list(self._turns.values()))
        for owner, turn in list(self._turns.items()):
            if total <= self.limit_bytes:
                return
            del self._turns[owner]
            total -= turn.nbytes
