"""Work in the background: a queue with a thread, and the remote tier, which may fail at any time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Generic, TypeVar

from cacheblend_rag.codec import Codec, PackedKV, pack_kv
from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from cacheblend_rag.store.remote import RemoteTier

__all__ = ["Offsite", "WorkQueue"]

_log = getLogger(__name__)

Item = TypeVar("Item")

_MOST_WAITING_BYTES = 256 * 1024 * 1024
# What a tier that does not answer is asked for, and how often: first, and at least.
_NO_KEY = "0" * 32
_FIRST_PROBE_S, _LAST_PROBE_S = 0.1, 2.0


@dataclass(eq=False, slots=True)
class _Entry(Generic[Item]):
    """An item that waits, or is worked on, and whether it is wanted no more."""

    key: str
    item: Item
    nbytes: int
    future: Future[None] | None = None
    is_cancelled: bool = False


class WorkQueue(Generic[Item]):
    """Items under keys, at most `limit_bytes`, and a thread that does `work` on all of them in order; that may not raise."""

    def __init__(self, work: Callable[[str, Item], None], limit_bytes: int, thread_name: str) -> None:
        self.limit_bytes = limit_bytes
        self._work = work
        self._lock = threading.Lock()
        self._entries: list[_Entry[Item]] = []
        self._executor = ThreadPoolExecutor(1, thread_name)

    def put(self, key: str, item: Item, nbytes: int) -> bool:
        """Have an item worked on; return False if too much is waiting, what is being worked on included."""
        with self._lock:
            if sum(each.nbytes for each in self._entries) + nbytes > self.limit_bytes:
                return False
            entry = _Entry(key, item, nbytes)
            self._entries.append(entry)
            entry.future = self._executor.submit(self._run, entry)
            return True

    def get(self, key: str) -> Item | None:
        if not self._entries:
            return None
        with self._lock:
            return next((each.item for each in self._entries if each.key == key and not each.is_cancelled), None)

    def items(self) -> list[tuple[str, Item, int]]:
        """Return what waits, and what is being worked on: keys, items and bytes."""
        with self._lock:
            return [(each.key, each.item, each.nbytes) for each in self._entries if not each.is_cancelled]

    def cancel(self, keys: Collection[str]) -> list[Future[None]]:
        """Take items out; return the work on them that has begun."""
        running = []
        with self._lock:
            for entry in [each for each in self._entries if each.key in keys]:
                entry.is_cancelled = True
                assert entry.future is not None
                if entry.future.cancel():
                    self._entries.remove(entry)
                else:
                    running.append(entry.future)
        return running

    def settle(self) -> None:
        """Wait until everything that waits now is worked on."""
        with self._lock:
            waiting = [each.future for each in self._entries if each.future is not None]
        wait(waiting)

    def close(self) -> None:
        """Wait as `settle` does, and end the thread; nothing is put any more."""
        self._executor.shutdown()

    def _run(self, entry: _Entry[Item]) -> None:
        try:
            self._work(entry.key, entry.item)
        finally:
            with self._lock:
                self._entries.remove(entry)


class Offsite:
    """Reads from a remote tier, and writes to it in the background, packed by `codec`."""

    def __init__(self, tier: RemoteTier, codec: Codec, waiting_bytes: int = _MOST_WAITING_BYTES) -> None:
        self._tier, self._codec = tier, codec
        # What is uploaded, and whether what is held there is dropped first.
        self._uploads: WorkQueue[tuple[ChunkKV | PackedKV, bool]] = WorkQueue(
            self._upload, waiting_bytes, "cacheblend-upload"
        )
        self._lock = threading.Lock()
        self._undropped: set[str] = set()
        self.is_out = self._uploads_fail = self._closed = False
        self._mender: threading.Thread | None = None

    def open(self, key: str) -> ChunkFile | None:
        """Return what is held under `key`, its head verified, or None."""
        if key in self._undropped or self.is_out:
            return None
        try:
            source = self._tier.open(key)
            return None if source is None else ChunkFile(source, key)
        except RemoteUnavailableError as error:
            self._tell(error)
        except ChunkReadError as error:
            if isinstance(error.__cause__, RemoteUnavailableError):
                self._tell(error.__cause__)
            elif error.damaged:
                _log.warning("remote KV is dropped: %s", error)
                self.drop_later([key])
            else:
                _log.warning("remote KV is left alone: %s", error)
        return None

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether something is held under it; False where the tier does not answer."""
        if not keys or self.is_out:
            return [False] * len(keys)
        try:
            found = self._tier.holds(keys)
        except RemoteUnavailableError as error:
            self._tell(error)
            return [False] * len(keys)
        return [there and key not in self._undropped for key, there in zip(keys, found, strict=True)]

    def put(self, key: str, kv: ChunkKV | PackedKV) -> None:
        """Have KV uploaded in the background, in place of what waits under its key; it is kept in memory until then."""
        with self._lock:
            # Damaged bytes would be taken for what is put: whether that is there already is judged by its size.
            drops_first = key in self._undropped
            self._undropped.discard(key)
        self._uploads.cancel([key])
        self._uploads.put(key, (kv, drops_first), min(kv.nbytes, self._uploads.limit_bytes))

    def drop(self, keys: Iterable[str]) -> None:
        """Remove what is held under the keys, for all machines; where the tier does not answer, as soon as it does."""
        with self._lock:
            self._undropped.update(keys)
            gone = set(self._undropped)
        if not gone or self.is_out:
            return
        try:
            self._remove(gone)
        except RemoteUnavailableError as error:
            self._tell(error)

    def drop_later(self, keys: Iterable[str]) -> None:
        """Drop KV in the background, see `drop`; until then nothing is read from there under these keys."""
        with self._lock:
            self._undropped.update(keys)
        self._mend_later()

    def flush(self) -> None:
        self._uploads.settle()

    def close(self) -> None:
        """Upload what waits, remove what is still to be removed, and release connections."""
        self._uploads.close()
        self._closed = True
        if self._undropped:
            with suppress(RemoteUnavailableError):
                self._remove(set(self._undropped))
        if self._undropped:
            _log.warning(
                "%d deleted chunks are still held by %s, which does not answer; they expire there if it has a time to live",
                len(self._undropped),
                self._tier.location,
            )
        self._tier.close()

    def _tell(self, error: RemoteUnavailableError) -> None:
        with self._lock:
            was_out, self.is_out = self.is_out, True
        if not was_out and not self._closed:
            _log.warning("%s; its KV counts as not stored, and nothing is uploaded, until it answers again", error)
        self._mend_later()

    def _mend_later(self) -> None:
        with self._lock:
            if not self._closed and (self._mender is None or not self._mender.is_alive()):
                self._mender = threading.Thread(target=self._mend, name="cacheblend-remote", daemon=True)
                self._mender.start()

    def _mend(self) -> None:
        """Ask the tier until it answers, and remove what is to be removed."""
        wait_s = _FIRST_PROBE_S if self.is_out else 0.0
        while not self._closed:
            time.sleep(wait_s)
            with self._lock:
                gone = set(self._undropped)
                if not gone and not self.is_out:
                    self._mender = None
                    return
            try:
                if gone:
                    self._remove(gone)
                else:
                    self._tier.holds([_NO_KEY])
            except RemoteUnavailableError as error:
                self._tell(error)
                wait_s = min(max(2 * wait_s, _FIRST_PROBE_S), _LAST_PROBE_S)
            else:
                self.is_out, wait_s = False, 0.0

    def _remove(self, keys: Collection[str]) -> None:
        # What is on its way arrives first, or it would put back what is removed.
        wait(self._uploads.cancel(keys))
        self._tier.drop(sorted(keys))
        with self._lock:
            self._undropped.difference_update(keys)

    def _upload(self, key: str, upload: tuple[ChunkKV | PackedKV, bool]) -> None:
        if self.is_out:
            return
        fails, (kv, drops_first) = False, upload
        try:
            if drops_first:
                self._tier.drop([key])
            self._tier.put(key, encode_chunk(key, pack_kv(kv, self._codec)))
        except StoreError as error:
            fails = isinstance(error, RemoteUnavailableError)
            # One that refuses to be written is still read.
            self.holds([_NO_KEY])
            if not self.is_out and not (fails and self._uploads_fail):
                _log.warning("chunk KV %s… was not uploaded: %s", key[:12], error)
        except Exception:
            _log.exception("the upload of chunk KV %s… failed unexpectedly", key[:12])
        self._uploads_fail = fails
