"""The disk tier: chunk files in a folder, and the index of them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import Codec, PackedKV, make_codec, pack_kv
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.base import Fate, KVReader, OpenProbe
from cacheblend_rag.store.chunkfile import ChunkFile, EncodedChunk, encode_chunk
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.folder import (
    RESERVE_BYTES,
    Part,
    StoreFolder,
    existing_folder,
    is_out_of_room,
    storing,
    valid_key,
)
from cacheblend_rag.store.index import Dropped, Entry, Index
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["DiskTier", "disk_probe", "existing_store", "forget_pages"]

_log = getLogger(__name__)

Result = TypeVar("Result")

# Recency is written when this many uses have gathered and the last time is this long ago, or on the next write.
_TOUCHES_KEPT = 256
_TOUCH_S = 1.0
# How often room is made for one write: what another program fills is not worth the whole store.
_ROOM_MADE = 3
_ADOPTED_AT_ONCE = 100

_DAMAGED = (
    "KV in %s is damaged, and computed again: %s (this warning is not repeated; `cacheblend-rag store check` finds all)"
)


class DiskTier:
    """Chunk KV in a folder, up to a given number of bytes, or half of the disk; the least recently used is dropped first.

    Where the disk itself is full, so much is dropped as is to be written, what no name leads to first.

    A file is written and synced outside its place, given its entry, and then brought to its place; its name is never used again.
    A file that is dropped loses its entry first, and in the same transaction is noted as one to be removed. Whoever opens the
    store next finishes what a killed process had begun. `codec` packs what is written; files are read whatever their codec.
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
        self._lock = ForkSafeLock()
        self._touched: OrderedDict[str, None] = OrderedDict()
        self._touched_at = time.monotonic()
        # Keys that were discarded where they could not be removed.
        self._discarded: set[str] = set()
        # Those found damaged, until they are written again.
        self._damaged: set[str] = set()
        if self.read_only:
            self.database = Database(self.folder.index_path, read_only=True, lock_timeout_s=lock_timeout_s)
            self.index = Index(self.database)
        else:
            with self.folder.opening(lock_timeout_s):
                try:
                    self.database = Database(self.folder.index_path, False, lock_timeout_s, self.folder.prepare)
                except StoreFullError:
                    if not self.folder.give_up_reserve():
                        raise
                    self.database = Database(self.folder.index_path, False, lock_timeout_s, self.folder.prepare)
                self.index = Index(self.database)
                with self.database.hurrying():
                    self._recover()

    def find(self, key: str) -> tuple[ChunkFile, Entry] | None:
        """Return the file of `key`, its head verified, and its entry; None if it is not held, has expired or is not readable."""
        if key in self._discarded:
            return None
        entry = self.index.entry(key)
        if entry is not None and not entry.is_live(self.clock()):
            entry = self.index.believed(key)
        while entry is not None and entry.is_live(self.clock()):
            try:
                file = self._verified(key, entry)
            except (FileNotFoundError, ChunkReadError) as error:
                if isinstance(error, ChunkReadError) and not error.damaged:
                    _log.warning("%s", error)
                    return None
                # Another process may have dropped it since, or put it anew; or it is the index that is damaged.
                now = self.index.believed(key)
                if now == entry:
                    is_gone = isinstance(error, FileNotFoundError)
                    self._lose(key, entry, f"file {entry.file} is missing" if is_gone else str(error))
                    return None
                entry = now
            else:
                self.touch(key)
                return file, entry
        return None

    def put(
        self,
        key: str,
        kv: ChunkKV | PackedKV | EncodedChunk,
        tenant: str = "",
        expires_at: float | None = None,
        wanted: Callable[[sqlite3.Connection], bool] | None = None,
    ) -> list[str]:
        """Write `kv` under `key`, unless it is held and its head is sound; return the keys whose copies are out of date.

        `wanted` is called in the transaction that adds the entry; if it returns False, nothing is added. What is held already
        lives until `expires_at` at least.
        """
        now = self.clock()
        held = self.index.entry(valid_key(key))
        if held is not None and key not in self._discarded and held.is_live(now):
            flaw = self.flaw(key, held)
            if flaw is None:
                if not self.read_only:
                    # Whoever gave it its entry may not have come to that yet.
                    self.folder.settle(held.file)
                if wanted is None or self.database.transact(wanted):
                    self.index.prolong([key], expires_at)
                    self.touch(key)
                return []
            if self.index.has_file(held.file, key):
                # Otherwise another process or thread has just dropped it.
                self._warn_once(_DAMAGED, self.folder.path, flaw)
        encoded = kv if isinstance(kv, EncodedChunk) else encode_chunk(key, pack_kv(kv, self.codec))
        limit_bytes = self._share_bytes(encoded.nbytes) if self.limit_bytes is None else self.limit_bytes
        if encoded.nbytes > limit_bytes:
            raise StoreFullError(
                f"a chunk of {encoded.nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (disk_bytes)"
            )
        self.flush(wait=False)
        name = self.folder.new_file_name(key)
        entry = Entry(name, encoded.nbytes, encoded.digest, tenant, now, expires_at)
        part = self.with_room(lambda: self.folder.write(name, encoded.buffers), encoded.nbytes, key)
        try:
            dropped = self.with_room(lambda: self.index.add(key, entry, held, limit_bytes, now, wanted), spared=key)
            if name not in dropped.files:
                try:
                    self.with_room(lambda: self.folder.settle(name), spared=key)
                except BaseException:
                    self.discard(key)
                    raise
        finally:
            part.remove()
        self._discarded.discard(key)
        self._damaged.discard(key)
        self.evicted.update(dropped.tenants)
        if dropped.for_room:
            self._warn_once(
                "the KV in %s has reached its budget of %d bytes, so what was used least recently is dropped, and computed again "
                "when it is needed; disk_bytes sets another budget, by default half of the disk's free space (this warning is "
                "not repeated; the store's figures count it)",
                self.folder.path,
                limit_bytes,
            )
        self._unlink(dropped.files)
        return dropped.keys

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it is held and has not expired."""
        there = self.index.holds(keys, self.clock())
        return [held and key not in self._discarded for key, held in zip(keys, there, strict=True)]

    def fates(self, keys: Sequence[str]) -> dict[str, Fate]:
        """Return how those of the keys lost their KV of which that is known."""
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

    def discard(self, key: str) -> None:
        """Drop the KV under `key`; in a folder that is not writable, never open it again."""
        # Not opened again even if it cannot be dropped now; what is put in its place replaces it.
        self._discarded.add(key)
        if not self.read_only:
            self.remove(self.deleting(lambda: self.index.drop([key])))
            self._discarded.discard(key)

    def with_room(self, write: Callable[[], Result], nbytes: int = 0, spared: str = "") -> Result:
        """Run what writes so many bytes, and where the disk is full drop other KV than `spared` first; see `drop_for_room`."""
        wanted_bytes = nbytes + RESERVE_BYTES
        for _ in range(_ROOM_MADE):
            try:
                return write()
            except StoreFullError as error:
                if not is_out_of_room(error):
                    raise
                dropped = Dropped()
                if self._shorten_log() < wanted_bytes:
                    dropped = self.deleting(lambda: self.index.drop_for_room(wanted_bytes, spared))
                    if not dropped.keys:
                        raise
                    self.evicted.update(dropped.tenants)
                    self._warn_once(
                        "the disk of %s is full, so KV is dropped for room: what no name leads to first, then what was used "
                        "least recently; free some, or give the store a smaller byte budget (disk_bytes) (this warning is not "
                        "repeated; the store's figures count it)",
                        self.folder.path,
                    )
                self.remove(dropped)
        return write()

    def _share_bytes(self, nbytes: int) -> int:
        """Return the budget where none was given: half of the disk's free space, what is held counted as free.

        What is held is not dropped because others filled the disk, and there is always room for one chunk of `nbytes`.
        """
        held_bytes = self.index.held_bytes()
        with storing(self.folder.path):
            free_bytes = shutil.disk_usage(self.folder.path).free
        return max((free_bytes + held_bytes) // 2, held_bytes, nbytes)

    def _warn_once(self, message: str, *values: object) -> None:
        with self._lock:
            is_first = message not in self._told
            self._told.add(message)
        if is_first:
            _log.warning(message, *values)

    def _shorten_log(self) -> int:
        """Give up the room set aside, and bring the index's log, which may be most of a small disk, into the index."""
        self.folder.give_up_reserve()
        return self.database.shorten_log()

    def deleting(self, delete: Callable[[], Result]) -> Result:
        """Run what a full disk must not prevent, deleting above all; it may take the room set aside for that."""
        try:
            return delete()
        except StoreFullError as error:
            if not is_out_of_room(error):
                raise
            self._shorten_log()
            return delete()

    def remove(self, dropped: Dropped) -> None:
        """Remove the files that a transaction of the index dropped."""
        self._unlink(dropped.files)
        self.folder.keep_reserve()

    def is_orphan(self, path: Path) -> bool:
        """Return whether a file belongs to no entry, and nobody is about to remove it."""
        # In this order: a file has its entry before it is in its place, and is noted as one to be removed until it is gone.
        is_known = self.index.has_file(path.name, path.name.partition(".")[0]) or self.index.is_removed(path.name)
        return not is_known and path.exists()

    def adopt(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Give files without an entry one, by their own heads, if the index was made without knowing of all there were.

        It ends early once it is not `wanted` any more; whoever opens the store next goes on.
        """
        if not self.index.is_adopting():
            return
        paths = (path for path in self.folder.files() if self.folder.is_file_name(path.name) and self.is_orphan(path))
        while batch := list(islice(paths, _ADOPTED_AT_ONCE)):
            if not wanted():
                return
            found = []
            for path in batch:
                key = path.name.partition(".")[0]
                try:
                    file = ChunkFile.open(path, key)
                except (ChunkReadError, OSError) as error:
                    if isinstance(error, ChunkReadError) and error.damaged:
                        _log.warning("file removed: %s", error)
                        self.folder.unlink(path.name)
                    continue
                found.append((key, Entry(path.name, file.file_bytes, file.digest, "", self.clock())))
            for name in self.index.add_many(found):
                self.folder.unlink(name)
        self.index.end_adopting()

    def touch(self, key: str) -> None:
        """Mark `key` as used now."""
        if self.read_only:
            return
        with self._lock:
            self._touched[key] = None
            self._touched.move_to_end(key)
            due = len(self._touched) >= _TOUCHES_KEPT and time.monotonic() - self._touched_at > _TOUCH_S
        if due:
            self.flush(wait=False)

    def flush(self, wait: bool = True) -> None:
        """Write the recency of what was used, unless another process writes and this is not to `wait`.

        Losing it costs nothing but a worse choice of what to evict.
        """
        with self._lock:
            touched, self._touched = list(self._touched), OrderedDict()
            self._touched_at = time.monotonic()
        if not touched:
            return
        try:
            self.index.touch(touched, wait)
        except StoreError as error:
            _log.debug("recency of %d chunks not written: %s", len(touched), error)
            with self._lock:
                # What was used meanwhile is more recent.
                self._touched = OrderedDict.fromkeys(
                    [key for key in touched if key not in self._touched] + list(self._touched)
                )

    def close(self) -> None:
        """Write what is left to write and release files and connections."""
        if not self.read_only:
            self.flush()
        self.database.close()

    def _verified(self, key: str, entry: Entry) -> ChunkFile:
        try:
            file = self.folder.open(entry.file, lambda path: ChunkFile.open(path, key))
        except ChunkReadError:
            raise
        except StoreError as error:
            raise ChunkReadError(key, str(error)) from error
        if file.digest != entry.digest:
            raise ChunkReadError(key, f"file {entry.file} is not the one that was written")
        return file

    def flaw(self, key: str, entry: Entry, every_byte: bool = False) -> str | None:
        """Return what is wrong with an entry's file, with its head at least, or None."""
        try:
            file = self._verified(key, entry)
            if every_byte:
                file.verify()
        except FileNotFoundError:
            return f"file {entry.file} is missing"
        except ChunkReadError as error:
            return str(error)
        return None

    def _lose(self, key: str, entry: Entry, reason: str) -> None:
        self._warn_once(_DAMAGED, self.folder.path, reason)
        self._damaged.add(key)
        try:
            self.remove(self.deleting(lambda: self.index.drop([key], entry.file)))
        except StoreError:
            # Most likely a folder that is not writable: it must not be met again.
            self._discarded.add(key)

    def _unlink(self, files: list[str], forgiving: bool = False) -> None:
        if not files:
            return
        try:
            for name in files:
                self.folder.unlink(name)
            # That it is done may be noted later.
            with suppress(StoreFullError):
                self.index.settle(files)
        except StoreError as error:
            if not forgiving:
                raise
            _log.debug("files left for the next opening of the store: %s", error)

    def _recover(self) -> None:
        """Finish what killed processes had begun; nobody else opens the store meanwhile."""
        for path in self.folder.leftovers():
            name = path.name.removesuffix(".part")
            if self.folder.is_file_name(name) and self.index.has_file(name, name.partition(".")[0]):
                self.folder.settle(name)
            else:
                path.unlink(missing_ok=True)
        files = self.index.removals()
        if files:
            _log.info("removing %d files that a killed process left in %s", len(files), self.folder.path)
            self._unlink(files, forgiving=True)


@contextmanager
def existing_store(
    location: str | Path, *, read_only: bool = False, clock: Callable[[], float] | None = None
) -> Iterator[DiskTier]:
    """Open the folder of a store that is there, to look after it; StoreError if it is not a store."""
    tier = DiskTier(existing_folder(location).path, clock=clock, read_only=read_only)
    try:
        yield tier
    finally:
        tier.close()


@contextmanager
def disk_probe(tier: DiskTier, chunks: Sequence[ChunkKV]) -> Iterator[OpenProbe]:
    """Read chunks as the disk tier does, from files that the system's page cache does not hold; see `TierProbe`."""
    key = "0" * 32
    parts: list[Part] = []
    try:
        for kv in chunks:
            buffers = encode_chunk(key, pack_kv(kv, tier.codec)).buffers
            parts.append(tier.folder.write(tier.folder.new_file_name(key), buffers))

        def open_cold() -> list[KVReader]:
            for part in parts:
                forget_pages(part.path)
            return [ChunkFile.open(part.path, key) for part in parts]

        yield open_cold
    finally:
        for part in parts:
            with suppress(OSError):
                part.remove()


def forget_pages(path: str | Path) -> None:
    """Have the system drop a file from its page cache, where it offers that (Linux does); it is synced first, or it could not."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
