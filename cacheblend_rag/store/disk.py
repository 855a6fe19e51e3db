"""The disk tier: chunk files in a folder, and the index of them."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import Codec, PackedKV, make_codec
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from cacheblend_rag.store.folder import RESERVE_BYTES, StoreFolder, storing, valid_key
from cacheblend_rag.store.index import Index, drop_entries

__all__ = ["DiskTier"]

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

    Where the disk itself is full, so much is dropped as is to be written.

    A file is called by its key. It is written and synced outside its place, and brought there in the transaction that gives it
    its entry; it is removed in the one that drops the entry. So whatever a killed process leaves is a miss, or replaced by the
    next file of that key.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int | None = None,
        codec: Codec | None = None,
        lock_timeout_s: float = 60.0,
    ) -> None:
        self.codec = codec or make_codec("native")
        self.folder = StoreFolder(path)
        self.limit_bytes = limit_bytes
        self.evicted: Counter[str] = Counter()
        self._told: set[str] = set()
        # Uses that are not written yet, in their order.
        self._touched: dict[str, None] = {}
        # Whether room is set aside, or need not be.
        self._has_reserve = True
        # Keys that were discarded where they could not be removed.
        self._discarded: set[str] = set()
        self.index = Index(self.folder, lock_timeout_s)
        self.with_room(self.index.share)
        self.folder.remove_leftovers()
        self._has_reserve = self.folder.keep_reserve()

    def find(self, key: str) -> tuple[ChunkFile, str] | None:
        """Return the file of `key`, its head verified, and whose it is; None if it is not held, or not readable."""
        tenant = self.index.tenant_of(key)
        if tenant is None or key in self._discarded:
            return None
        try:
            file = ChunkFile.open(self.folder.file_path(key), key)
        except ChunkReadError as error:
            if error.damaged:
                self._lose(key, str(error))
            else:
                _log.warning("%s", error)
            return None
        self.touch(key)
        return file, tenant

    def put(
        self, key: str, kv: PackedKV, tenant: str, wanted: Callable[[sqlite3.Connection], bool] | None = None
    ) -> list[str]:
        """Write KV under `key` unless that is held and sound, or it is not `wanted`; return the keys dropped for room."""
        if self.holds([valid_key(key)])[0]:
            flaw = self.flaw(key)
            if flaw is None:
                self.touch(key)
                return []
            self._warn_once(_DAMAGED, self.folder.path, flaw)
        encoded = encode_chunk(key, kv)
        limit_bytes = self._share_bytes(encoded.nbytes) if self.limit_bytes is None else self.limit_bytes
        if encoded.nbytes > limit_bytes:
            raise StoreFullError(
                f"a chunk of {encoded.nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (disk_bytes)"
            )
        self.flush()

        def write() -> dict[str, str]:
            with self.folder.written(key, encoded.buffers) as place:
                return self.index.add(key, encoded.nbytes, tenant, limit_bytes, place, wanted)

        try:
            dropped = self.with_room(write, encoded.nbytes)
        except BaseException:
            with suppress(StoreError):
                self.remove_orphan(key, wait=False)
            raise
        self._discarded.discard(key)
        self.evicted.update(dropped.values())
        if dropped:
            self._warn_once(
                "the KV in %s has reached its budget of %d bytes, so the least recently used is dropped, and computed again when "
                "it is needed; to change the budget (by default half of the disk's free space), set disk_bytes (this warning is "
                "not repeated; the store's figures count it)",
                self.folder.path,
                limit_bytes,
            )
        return list(dropped)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        return [held and key not in self._discarded for key, held in zip(keys, self.index.holds(keys), strict=True)]

    def discard(self, key: str, wait: bool = True) -> None:
        """Drop the KV under `key`; where that cannot be done now, never open it again."""
        # What is put in its place replaces it.
        self._discarded.add(key)
        self.with_room(lambda: self.index.drop([key], wait))
        self._discarded.discard(key)

    def drop_damaged(self, key: str, wait: bool = True) -> bool:
        """Drop KV whose file is damaged, unless another process has just replaced or dropped it; return whether it was there."""
        with self.index.write(wait) as connection:
            known = connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone()
            is_damaged = known is not None and self.flaw(key, every_byte=True) is not None
            drop_entries(connection, [key] if is_damaged else [])
        return is_damaged

    def remove_orphan(self, key: str, wait: bool = True) -> int | None:
        """Remove the file of a key without an entry; return its bytes, or None where there was none."""
        with self.index.write(wait) as connection:
            path = self.folder.file_path(key)
            if connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() or not path.exists():
                return None
            nbytes = path.stat().st_size
            self.folder.remove(key)
        return nbytes

    def with_room(self, write: Callable[[], Result], nbytes: int = 0) -> Result:
        """Run what writes that many bytes, and where the disk is full drop the KV least recently used first."""
        for _ in range(_ROOM_MADE):
            try:
                done = write()
                if not self._has_reserve:
                    self._has_reserve = self.folder.keep_reserve()
                return done
            except StoreFullError as error:
                # Not a byte budget, nor a file as large as it may be.
                if error.__cause__ is None or getattr(error.__cause__, "errno", None) == errno.EFBIG:
                    raise
                self._has_reserve = False
                if not self.folder.give_up_reserve():
                    victims = self.index.oldest(nbytes + RESERVE_BYTES)
                    if not victims:
                        raise
                    # Their files go first: to note in the index that they are gone takes room, too.
                    for victim in victims:
                        self.folder.remove(victim)
                    self.index.drop(victims)
                    self.evicted.update(victims.values())
                    self._warn_once(
                        "the disk of %s is full, so the KV least recently used is dropped for room; free some, or give the store "
                        "a smaller byte budget (disk_bytes) (this warning is not repeated; the store's figures count it)",
                        self.folder.path,
                    )
        return write()

    def touch(self, key: str) -> None:
        """Note that KV is used."""
        self._touched.pop(key, None)
        self._touched[key] = None
        if len(self._touched) >= _TOUCHES_KEPT:
            self.flush()

    def flush(self) -> None:
        """Write the recency of what was used, unless others write: losing it costs but a worse choice of what to evict."""
        touched, self._touched = self._touched, {}
        with suppress(StoreError):
            if touched:
                self.index.touch(list(touched))

    def close(self) -> None:
        self.flush()
        self.index.close()

    def flaw(self, key: str, every_byte: bool = False) -> str | None:
        """Return what is wrong with the file of a key, with its head at least, or None."""
        try:
            file = ChunkFile.open(self.folder.file_path(key), key)
            if every_byte:
                file.verify()
        except ChunkReadError as error:
            return str(error)
        return None

    def _share_bytes(self, nbytes: int) -> int:
        """Return the budget where none was given: what is held, half of what is free beside it, and room for this."""
        held_bytes = self.index.share()[1]
        with storing(self.folder.path):
            free_bytes = shutil.disk_usage(self.folder.path).free
        return max((free_bytes + held_bytes) // 2, held_bytes, nbytes)

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._told:
            self._told.add(message)
            _log.warning(message, *values)

    def _lose(self, key: str, reason: str) -> None:
        """Drop damaged KV, and say so once."""
        self._warn_once(_DAMAGED, self.folder.path, reason)
        with suppress(StoreError):
            self.drop_damaged(key, wait=False)
