"""The disk tier: chunk files in a folder, and the index of them."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import Codec, make_codec, pack_kv
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError, StoreReadOnlyError
from cacheblend_rag.store.base import Entry, Fate
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from cacheblend_rag.store.folder import RESERVE_BYTES, StoreFolder, is_out_of_room, storing, valid_key
from cacheblend_rag.store.index import Dropped, Index, drop_entries

__all__ = ["DiskTier", "existing_store"]

_log = getLogger(__name__)

Result = TypeVar("Result")

# Recency is written when this many uses have gathered, or on the next write.
_TOUCHES_KEPT = 1024
# How often room is made for one write: what another program fills is not worth the whole store.
_ROOM_MADE = 4

_DAMAGED = (
    "KV in %s is damaged and computed again: %s (this warning is not repeated; `cacheblend-rag store check` finds all)"
)


class DiskTier:
    """Chunk KV in a folder, up to a given number of bytes, or half of the disk; the least recently used is dropped first.

    Where the disk itself is full, so much is dropped as is to be written, what no name leads to first.

    A file is called by its key. It is written and synced outside its place, and brought there in the transaction that gives it
    its entry; it is removed in the one that drops the entry. So whatever a killed process leaves is a miss, or replaced by the
    next file of that key.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int | None = None,
        codec: Codec | None = None,
        clock: Callable[[], float] | None = None,
        read_only: bool = False,
        lock_timeout_s: float = 60.0,
    ) -> None:
        self.codec = codec or make_codec("native")
        self.folder = StoreFolder(path)
        self.read_only = read_only or self.folder.read_only
        self.limit_bytes = limit_bytes
        self.clock = clock or time.time
        self.evicted: Counter[str] = Counter()
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._touched: OrderedDict[str, None] = OrderedDict()
        # Whether room is set aside, or need not be.
        self._has_reserve = True
        # Keys that were discarded where they could not be removed.
        self._discarded: set[str] = set()
        # Those found damaged, until they are written again.
        self._damaged: set[str] = set()
        self.index = Index(self.folder, self.read_only, lock_timeout_s)
        self.index.on_drop = self._remove_files
        self.with_room(self.index.share)
        if not self.read_only:
            self.folder.remove_leftovers()
            self._has_reserve = self.folder.keep_reserve()

    def find(self, key: str) -> tuple[ChunkFile, Entry] | None:
        """Return the file of `key`, its head verified, and its entry; None if it is not held, has expired or is not readable."""
        entry = self.index.entry(key)
        if entry is None or key in self._discarded or not entry.is_live(self.clock()):
            return None
        try:
            file = ChunkFile.open(self.folder.file_path(key), key)
        except FileNotFoundError:
            self._lose(key, f"its file {key[:12]}… is missing")
            return None
        except ChunkReadError as error:
            if error.damaged:
                self._lose(key, str(error))
            else:
                _log.warning("%s", error)
            return None
        self.touch(key)
        return file, entry

    def put(self, key: str, entry: Entry, wanted: Callable[[sqlite3.Connection], bool] | None = None) -> list[str]:
        """Write KV under `key` unless that is held and sound, or it is not `wanted`; return the keys that are dropped."""
        now = self.clock()
        held = self.index.entry(valid_key(key))
        if held is not None and key not in self._discarded and held.is_live(now):
            flaw = self.flaw(key)
            if flaw is None:
                if wanted is None or self.index.transact(wanted):
                    self.index.prolong([key], entry.expires_at, now)
                    self.touch(key)
                return []
            self._warn_once(_DAMAGED, self.folder.path, flaw)
        encoded = encode_chunk(key, pack_kv(entry.kv, self.codec))
        limit_bytes = self._share_bytes(encoded.nbytes) if self.limit_bytes is None else self.limit_bytes
        if encoded.nbytes > limit_bytes:
            raise StoreFullError(
                f"a chunk of {encoded.nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (disk_bytes)"
            )
        self.flush()
        entry = replace(entry, nbytes=encoded.nbytes, added_at=now)
        part = self.with_room(lambda: self.folder.write(encoded.buffers), encoded.nbytes, [key])
        try:
            dropped = self.with_room(
                lambda: self.index.add(key, entry, held, limit_bytes, lambda: self.folder.place(part, key), wanted),
                spared=[key],
            )
        except BaseException:
            with suppress(StoreError):
                self.remove_orphan(key, wait=False)
            raise
        finally:
            part.unlink(missing_ok=True)
        self._discarded.discard(key)
        self._damaged.discard(key)
        self.evicted.update(dropped.tenants)
        if dropped.for_room:
            self._warn_once(
                "the KV in %s has reached its budget of %d bytes, so the least recently used is dropped, and computed again when "
                "it is needed; to change the budget (by default half of the disk's free space), set disk_bytes (this warning is "
                "not repeated; the store's figures count it)",
                self.folder.path,
                limit_bytes,
            )
        return dropped.keys

    def holds(self, keys: Sequence[str]) -> list[bool]:
        there = self.index.holds(keys, self.clock())
        return [held and key not in self._discarded for key, held in zip(keys, there, strict=True)]

    def fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        dropped = self.index.dropped_lately(keys)
        now = self.clock()
        fates: dict[str, Fate] = {}
        for key in keys:
            entry = self.index.entry(key)
            if key in self._damaged:
                fates[key] = "damaged"
            elif key in dropped or (entry is not None and not entry.is_live(now)):
                fates[key] = "evicted"
        return fates

    def discard(self, key: str, wait: bool = True) -> None:
        """Drop the KV under `key`; where that cannot be done now, never open it again."""
        # Not opened again even if it cannot be dropped now; what is put in its place replaces it.
        self._discarded.add(key)
        if not self.read_only:
            self.with_room(lambda: self.index.drop([key], wait))
            self._discarded.discard(key)

    def remove_orphan(self, key: str, wait: bool = True) -> bool:
        """Remove the file of a key without an entry; return whether there was one."""
        with self.index.write(wait) as connection:
            is_known = connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() is not None
            is_orphan = not is_known and self.folder.file_path(key).exists()
            self.folder.unlink([key] if is_orphan else [])
        return is_orphan

    def with_room(self, write: Callable[[], Result], nbytes: int = 0, spared: Collection[str] = ()) -> Result:
        """Run what writes that many bytes, and where the disk is full drop other KV than `spared` first; see `Index.oldest`."""
        wanted_bytes = nbytes + RESERVE_BYTES
        for _ in range(_ROOM_MADE):
            try:
                done = write()
                if not self._has_reserve:
                    self._has_reserve = self.folder.keep_reserve()
                return done
            except StoreFullError as error:
                if not is_out_of_room(error):
                    raise
                self._has_reserve = False
                # In this order: to shorten the log takes room.
                had_reserve = self.folder.give_up_reserve()
                if self.index.shorten_log() < wanted_bytes and not had_reserve:
                    victims = self.index.oldest(wanted_bytes, spared)
                    if not victims:
                        raise
                    # Their files go first: to note in the index that they are gone takes room, too.
                    self.folder.unlink(victims)
                    self.evicted.update(self.index.drop(victims).tenants)
                    self._warn_once(
                        "the disk of %s is full, so the KV least recently used is dropped for room; free some, or give the store "
                        "a smaller byte budget (disk_bytes) (this warning is not repeated; the store's figures count it)",
                        self.folder.path,
                    )
        return write()

    def _share_bytes(self, nbytes: int) -> int:
        """Return the budget where none was given: what is held, half of what is free beside it, and room for this."""
        held_bytes = self.index.share()[1]
        with storing(self.folder.path):
            free_bytes = shutil.disk_usage(self.folder.path).free
        return max((free_bytes + held_bytes) // 2, held_bytes, nbytes)

    def _warn_once(self, message: str, *values: object) -> None:
        with self._lock:
            is_first = message not in self._told
            self._told.add(message)
        if is_first:
            _log.warning(message, *values)

    def _remove_files(self, connection: sqlite3.Connection, keys: list[str]) -> None:
        query = "SELECT 1 FROM entries WHERE key = ?"
        self.folder.unlink(key for key in keys if connection.execute(query, (key,)).fetchone() is None)

    def touch(self, key: str) -> None:
        if self.read_only:
            return
        with self._lock:
            self._touched[key] = None
            self._touched.move_to_end(key)
            is_due = len(self._touched) >= _TOUCHES_KEPT
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Write the recency of what was used, unless others write: losing it costs but a worse choice of what to evict."""
        with self._lock:
            touched, self._touched = list(self._touched), OrderedDict()
        with suppress(StoreError):
            if touched:
                self.index.touch(touched)

    def close(self) -> None:
        if not self.read_only:
            self.flush()
        self.index.close()

    def flaw(self, key: str, every_byte: bool = False) -> str | None:
        """Return what is wrong with the file of a key, with its head at least, or None."""
        try:
            file = ChunkFile.open(self.folder.file_path(key), key)
            if every_byte:
                file.verify()
        except FileNotFoundError:
            return f"its file {key[:12]}… is missing"
        except ChunkReadError as error:
            return str(error)
        return None

    def _lose(self, key: str, reason: str) -> None:
        """Drop the entry of damaged KV, unless another process is about to, or has just replaced it."""

        def drop(connection: sqlite3.Connection) -> bool:
            known = connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone()
            is_lost = known is not None and self.flaw(key) is not None
            drop_entries(connection, [key] if is_lost else [], Dropped())
            return is_lost

        try:
            if not self.with_room(lambda: self.index.transact(drop, wait=False)):
                return
        except StoreReadOnlyError:
            # It must not be met again.
            self._discarded.add(key)
        except StoreError:
            return
        self._damaged.add(key)
        self._warn_once(_DAMAGED, self.folder.path, reason)


@contextmanager
def existing_store(
    location: str | Path, *, read_only: bool = False, clock: Callable[[], float] | None = None
) -> Iterator[DiskTier]:
    """Open the folder of a store that is there, to look after it; StoreError if it is not a store."""
    path = Path(location).expanduser()
    if not path.exists():
        raise StoreError(f"there is no folder {path}; give the folder of a store")
    if not StoreFolder(path).is_made:
        raise StoreError(f"folder {path} is empty; give the folder of a store")
    with closing(DiskTier(path, clock=clock, read_only=read_only)) as tier:
        yield tier
