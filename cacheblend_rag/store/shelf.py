"""Entries in memory by key, at most so many bytes of them, least recently used dropped first."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["Shelf"]


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


Entry = TypeVar("Entry", bound=_Sized)


class Shelf(Generic[Entry]):
    """What the RAM tier and the device tier have in common. All methods may be called from any thread.

    Parameters
    ----------
    limit_bytes : int
        Most bytes held, reservations included. An entry that is bigger than this is not kept.

    Attributes
    ----------
    on_drop : callable or None
        Called with the key of every entry that was dropped, replaced or evicted, without the lock: no thread may hold two.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.on_drop: Callable[[str], None] | None = None
        self._lock = ForkSafeLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._used_bytes = 0
        self._reserved_bytes = 0
        # Reservations come back here, without the lock, since they may come back from a finalizer.
        self._returned: deque[int] = deque()
        self._evictions = 0
        self._pinned: set[str] = set()
        self._hidden: set[str] = set()
        # What `on_drop` is to be told.
        self._gone: list[str] = []

    def get(self, key: str) -> Entry | None:
        """Return the entry under `key` and mark it as recently used, or None."""
        with self._lock:
            entry = None if key in self._hidden else self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def keep(self, key: str, entry: Entry, hidden: bool = False) -> bool:
        """Keep an entry, dropping the least recently used for room; return whether it was kept.

        With `hidden` nobody gets it until `reveal` is called, unless it is dropped before.
        """
        with self._dropping():
            self._drop(key)
            if entry.nbytes > self.limit_bytes or not self._make_room(entry.nbytes):
                return False
            self._entries[key] = entry
            if hidden:
                self._hidden.add(key)
            self._used_bytes += entry.nbytes
            return True

    def reveal(self, key: str) -> None:
        """Let others get what was kept hidden."""
        with self._lock:
            self._hidden.discard(key)

    def reserve(self, nbytes: int) -> bool:
        """Set room aside for an entry that is still being read; return whether there is any."""
        with self._dropping():
            if not self._make_room(nbytes):
                return False
            self._reserved_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """End a reservation; takes no lock."""
        self._returned.append(nbytes)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget these entries."""
        with self._dropping():
            for key in keys:
                self._drop(key)

    def pin(self, keys: Iterable[str]) -> None:
        """Never drop these for room, once they are held."""
        with self._lock:
            self._pinned.update(keys)

    def unpin(self, keys: Iterable[str]) -> None:
        """Let these be dropped for room again."""
        with self._lock:
            self._pinned.difference_update(keys)

    def pinned(self) -> list[str]:
        """Return the keys that are never dropped for room."""
        with self._lock:
            return sorted(self._pinned)

    def nbytes(self, keys: Iterable[str]) -> int:
        """Return the bytes held under these keys."""
        with self._lock:
            return sum(self._entries[key].nbytes for key in keys if key in self._entries)

    def clear(self) -> None:
        """Forget every entry, and what was pinned."""
        with self._dropping():
            self._pinned.clear()
            for key in list(self._entries):
                self._drop(key)

    def keys(self) -> list[str]:
        """Return the keys held, least recently used first."""
        with self._lock:
            return list(self._entries)

    def holds(self, key: str) -> bool:
        """Return whether `key` is held, hidden or not, without marking it as used."""
        with self._lock:
            return key in self._entries

    def shows(self, key: str) -> bool:
        """Return whether `key` is held and not hidden, without marking it as used."""
        with self._lock:
            return key in self._entries and key not in self._hidden

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._used_bytes

    @property
    def evictions(self) -> int:
        """Entries dropped for room."""
        return self._evictions

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Hold the lock, and tell what was dropped once it is free again."""
        gone: list[str] = []
        try:
            with self._lock:
                try:
                    yield
                finally:
                    gone, self._gone = self._gone, []
        finally:
            if self.on_drop is not None:
                for key in gone:
                    self.on_drop(key)

    def _make_room(self, nbytes: int) -> bool:
        while self._returned:
            self._reserved_bytes -= self._returned.popleft()
        kept_bytes = sum(self._entries[key].nbytes for key in self._pinned if key in self._entries)
        if kept_bytes + self._reserved_bytes + nbytes > self.limit_bytes:
            return False
        while self._used_bytes + self._reserved_bytes + nbytes > self.limit_bytes:
            self._drop(next(key for key in self._entries if key not in self._pinned))
            self._evictions += 1
        return True

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        self._hidden.discard(key)
        if entry is not None:
            self._used_bytes -= entry.nbytes
            self._gone.append(key)
