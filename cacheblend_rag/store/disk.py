"""The disk tier: one file a chunk and an index of them."""

from __future__ import annotations

import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import Codec, PackedKV, make_codec, pack_kv
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.encoded import encode_chunk
from cacheblend_rag.store.entries import Dropped, Entry
from cacheblend_rag.store.folder import StoreFolder, valid_key
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.locks import ForkSafeLock

__all__ = ["DiskTier"]

_log = getLogger(__name__)

Result = TypeVar("Result")

# Recency is written when this many uses have gathered and the last time is this long ago, or on the next write.
_TOUCHES_KEPT = 256
_TOUCH_S = 1.0
_CLOCK_SAVED_S = 60.0


class DiskTier:
    """Chunk KV in a folder, at most so many bytes of it, least recently used dropped first.

    A file is written under a temporary name, synced, renamed, and only then given its entry; its name is never used again. A
    file that is dropped loses its entry first. In between, the index holds it as pending, and whoever opens the store next
    finishes what a killed process had begun.

    Parameters
    ----------
    path : Path
        The folder.
    limit_bytes : int, optional
        Most bytes of files.
    codec : Codec, optional
        How KV is written; by default as it is. Files are read whatever their codec.
    clock : StoreClock, optional
        What tells when KV expires.
    """

    def __init__(
        self, path: Path, limit_bytes: int | None, codec: Codec | None = None, clock: StoreClock | None = None
    ) -> None:
        self.codec = make_codec("native") if codec is None else codec
        self._folder = StoreFolder(path)
        self.limit_bytes = limit_bytes
        self.clock = StoreClock() if clock is None else clock
        self._clock_saved_at = 0.0
        self._lock = ForkSafeLock()
        self._touched: OrderedDict[str, None] = OrderedDict()
        self._touched_at = time.monotonic()
        # Keys that were discarded where they could not be removed.
        self._discarded: set[str] = set()
        self.evictions = 0
        if self._folder.read_only:
            self.database = Database(self._folder.index_path, read_only=True)
            self.index = Index(self.database)
        else:
            with self._folder.opening():
                self.database = self.deleting(lambda: Database(self._folder.index_path))
                self.index = Index(self.database)
                self._recover()
        self.clock.load(self.database)

    @property
    def read_only(self) -> bool:
        """Whether the folder may not be written."""
        return self._folder.read_only

    @property
    def folder(self) -> StoreFolder:
        """The folder."""
        return self._folder

    def open(self, key: str) -> ChunkFile | None:
        """Return the file of `key`, its head verified, or None if it is not held, has expired or is not readable."""
        found = self.find(key)
        return None if found is None else found[0]

    def find(self, key: str) -> tuple[ChunkFile, Entry] | None:
        """Return what `open` does together with its entry."""
        if key in self._discarded:
            return None
        entry = self.index.entry(key)
        while entry is not None and entry.is_live(self.clock.now()):
            try:
                file = self._verified(key, entry)
            except FileNotFoundError:
                # Another process may have dropped it since, or put it anew.
                now = self.index.entry(key)
                if now is not None and now.file == entry.file:
                    self._lose(key, entry, f"file {entry.file} is missing")
                    return None
                entry = now
            except ChunkReadError as error:
                self._lose(key, entry, str(error))
                return None
            else:
                self.touch(key)
                return file, entry
        return None

    def put(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        tenant: str = "",
        expires_at: float | None = None,
        wanted: Callable[[sqlite3.Connection], bool] | None = None,
    ) -> list[str]:
        """Write `kv` under `key`, unless it is held and its head is sound; return the keys whose copies are out of date.

        Parameters
        ----------
        key : str
            The key.
        kv : ChunkKV
            The KV.
        tenant : str
            Whose it is.
        expires_at : float, optional
            From when on it counts as a miss, by the store's time. What is held lives that long at least.
        wanted : callable, optional
            Called in the transaction that adds the entry; if it returns False, nothing is added.

        Raises
        ------
        StoreFullError
            If there is no room.
        StoreReadOnlyError
            If the folder may not be written.
        """
        now = self.clock.now()
        held = self.index.entry(valid_key(key))
        if held is not None and key not in self._discarded and held.is_live(now):
            there = self._look(key, held)
            if isinstance(there, ChunkFile):
                if wanted is None or self.index.transact(wanted):
                    self.index.prolong([key], expires_at)
                    self.touch(key)
                return []
            if self.index.has_file(held.file, key):
                # Otherwise another process or thread has just dropped it.
                _log.warning("stored KV %s… is damaged and replaced: %s", key[:12], there)
        encoded = encode_chunk(key, pack_kv(kv, self.codec))
        if self.limit_bytes is not None and encoded.nbytes > self.limit_bytes:
            raise StoreFullError(
                f"a chunk of {encoded.nbytes} bytes exceeds the store's budget of {self.limit_bytes} bytes (disk_bytes)"
            )
        self.flush()
        self._save_clock()
        name = self._folder.new_file_name(key)
        writer = self._folder.writers.own()
        self.index.expect(name, writer)
        entry = Entry(name, encoded.nbytes, encoded.digest, tenant, now, expires_at)
        try:
            self._folder.write(name, encoded.buffers)
            dropped = self.index.add(key, entry, held, self.limit_bytes, writer, now, wanted)
        except BaseException:
            self._remove(Dropped(files=[name]), forgiving=True)
            raise
        self._discarded.discard(key)
        self.evictions += len(dropped.keys)
        self._remove(dropped)
        return dropped.keys

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it is held and has not expired."""
        there = self.index.holds(keys, self.clock.now())
        return [held and key not in self._discarded for key, held in zip(keys, there, strict=True)]

    def discard(self, key: str) -> None:
        """Drop the KV under `key`; in a folder that may not be written, never open it again."""
        if self.read_only:
            self._discarded.add(key)
        else:
            self.remove(self.deleting(lambda: self.index.drop([key], self._folder.writers.own())))

    def deleting(self, delete: Callable[[], Result]) -> Result:
        """Run what a full disk must not prevent, deleting above all; it may take the room set aside for that."""
        try:
            return delete()
        except StoreFullError:
            if not self._folder.give_up_reserve():
                raise
            return delete()

    def remove(self, dropped: Dropped) -> None:
        """Remove the files that a transaction of the index dropped."""
        self._remove(dropped)
        self._folder.keep_reserve()

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
        """Write the recency of what was used; losing it costs nothing but a worse choice of what to evict.

        Parameters
        ----------
        wait : bool
            Whether to wait while another process writes, rather than try again another time.
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
            try:
                self.clock.save(self.database)
            except StoreError as error:
                _log.debug("the store's time was not written: %s", error)
        self.database.close()
        self._folder.writers.close()

    def _save_clock(self) -> None:
        # Seldom, since only while nobody has the store open does its time hang on what was written down.
        if time.monotonic() - self._clock_saved_at > _CLOCK_SAVED_S:
            self._clock_saved_at = time.monotonic()
            self.clock.save(self.database)

    def _verified(self, key: str, entry: Entry) -> ChunkFile:
        try:
            path = self._folder.file_path(entry.file)
        except StoreError as error:
            raise ChunkReadError(key, str(error)) from error
        file = ChunkFile.open(path, key)
        if file.digest != entry.digest:
            raise ChunkReadError(key, f"file {entry.file} is not the one that was written")
        return file

    def _look(self, key: str, entry: Entry) -> ChunkFile | str:
        """Return an entry's file, or what is wrong with it."""
        try:
            return self._verified(key, entry)
        except FileNotFoundError:
            return f"file {entry.file} is missing"
        except ChunkReadError as error:
            return str(error)
        return None

    def _lose(self, key: str, entry: Entry, reason: str) -> None:
        _log.warning("stored KV %s… is dropped: %s", key[:12], reason)
        try:
            self.remove(self.deleting(lambda: self.index.drop([key], self._folder.writers.own(), file=entry.file)))
        except StoreError:
            # Most likely a folder that may not be written: it must not be met again.
            self._discarded.add(key)

    def _remove(self, dropped: Dropped, forgiving: bool = False) -> None:
        if not dropped.files:
            return
        try:
            for name in dropped.files:
                self._folder.unlink(name)
            self.index.settle(dropped.files)
        except StoreError as error:
            if not forgiving:
                raise
            _log.debug("files left for the next opening of the store: %s", error)

    def _recover(self) -> None:
        """Finish what killed processes had begun; nobody else opens the store meanwhile."""
        for path in self._folder.writers.leftovers():
            path.unlink(missing_ok=True)
        pending = self.index.pending()
        dead = {writer for writer in {writer for _, writer in pending} if not self._folder.writers.is_alive(writer)}
        files = [
            name for name, writer in pending if writer in dead and not self.index.has_file(name, name.partition(".")[0])
        ]
        if files:
            _log.info("removing %d files that a killed process left in %s", len(files), self._folder.path)
            self._remove(Dropped(files=files), forgiving=True)
