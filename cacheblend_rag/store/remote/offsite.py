"""The remote tier as a store sees it: something that may fail at any time without anybody noticing more than a miss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import count
from logging import getLogger

from cacheblend_rag.codec import Codec, PackedKV, pack_kv
from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import ChunkFile, EncodedChunk, encode_chunk
from cacheblend_rag.store.locks import ForkSafeLock
from cacheblend_rag.store.remote.base import RemoteTier

__all__ = ["Offsite", "RemoteWriter", "UploadStats"]

_log = getLogger(__name__)


class Offsite:
    """Reads from a remote tier, and writes to it in the background, packed by `codec`.

    A remote tier that fails is a miss and one warning an outage. What could not be removed there is removed when it answers
    again, as long as this object lives.
    """

    def __init__(self, tier: RemoteTier, codec: Codec) -> None:
        self._tier = tier
        self._codec = codec
        self._writer = RemoteWriter(tier)
        self._lock = ForkSafeLock()
        self._undropped: set[str] = set()
        self._is_out = False

    def open(self, key: str) -> ChunkFile | None:
        """Return what is held under `key`, its head verified, or None."""
        if key in self._undropped:
            return None
        try:
            source = self._tier.open(key)
            file = None if source is None else ChunkFile(source, key)
        except RemoteUnavailableError as error:
            self._tell(error)
            return None
        except ChunkReadError as error:
            if isinstance(error.__cause__, RemoteUnavailableError):
                self._tell(error.__cause__)
            else:
                _log.warning("remote KV is dropped: %s", error)
                self.drop([key])
            return None
        self._recovered()
        return file

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether something is held under it; False where the tier does not answer."""
        if not keys:
            return []
        try:
            found = self._tier.holds(keys)
        except RemoteUnavailableError as error:
            self._tell(error)
            return [False] * len(keys)
        self._recovered()
        return [there and key not in self._undropped for key, there in zip(keys, found, strict=True)]

    def put(self, key: str, kv: ChunkKV | PackedKV) -> None:
        """Have KV uploaded in the background; it is kept in memory until then."""
        with self._lock:
            self._undropped.discard(key)
        self._writer.put(key, kv.nbytes, lambda: encode_chunk(key, pack_kv(kv, self._codec)))

    def drop(self, keys: Iterable[str]) -> None:
        """Remove what is held under the keys, for all machines."""
        with self._lock:
            self._undropped.update(keys)
            gone = sorted(self._undropped)
        if not gone:
            return
        for key in gone:
            self._writer.forget(key)
        try:
            self._tier.drop(gone)
        except RemoteUnavailableError as error:
            self._tell(error)
            return
        with self._lock:
            self._undropped.difference_update(gone)

    def flush(self) -> None:
        """Wait until nothing waits to be uploaded; what could not be was told as a warning."""
        self._writer.flush()

    def close(self) -> None:
        """Upload what waits, remove what is still to be removed, and release connections."""
        self._writer.close()
        self.drop(())
        if self._undropped:
            _log.warning(
                "%d deleted chunks are still held by %s, which does not answer; they expire there if it has a time to live",
                len(self._undropped),
                self._tier.location,
            )
        self._tier.close()

    def _tell(self, error: RemoteUnavailableError) -> None:
        if not self._is_out:
            self._is_out = True
            _log.warning("%s; its KV counts as not stored until it answers again", error)

    def _recovered(self) -> None:
        self._is_out = False
        if self._undropped:
            self.drop(())


@dataclass(frozen=True, slots=True)
class UploadStats:
    """How many chunks wait to be uploaded, and their bytes; how many were, failed to be, or found too much waiting."""

    waiting: int = 0
    waiting_bytes: int = 0
    written: int = 0
    failed: int = 0
    refused: int = 0


class RemoteWriter:
    """Writes chunks to a remote tier in the background; the tier stays the caller's to close.

    What waits is bounded in bytes; a chunk that does not fit is not taken, since its KV lies on disk and can be uploaded
    another time. A single chunk is taken whatever its size. An upload that fails is not tried again by itself, and the first
    failure of an outage is logged. A forked child begins with nothing waiting: its parent uploads what waited before.
    """

    def __init__(self, tier: RemoteTier, max_waiting_bytes: int = 256 * 1024 * 1024) -> None:
        self._tier = tier
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = ForkSafeLock()
        self._numbers = count()
        self._closed = False
        self._is_out = False
        self._figures = UploadStats()
        self._uploads: dict[int, tuple[str, int, Future[None]]] = {}
        self._pid, self._executor = os.getpid(), _executor()

    def put(self, key: str, nbytes: int, encode: Callable[[], EncodedChunk]) -> bool:
        """Have a chunk uploaded, in place of what waits under its key; return whether it was taken. Never waits.

        Until its bytes, made by `encode` in the background, are uploaded, it counts for `nbytes`.
        """
        with self._lock:
            self._after_fork()
            if self._closed:
                raise StoreError("the remote tier's writer is closed; open the store again")
            self._cancel(key)
            waiting_bytes = self._waiting_bytes()
            if waiting_bytes and waiting_bytes + nbytes > self._max_waiting_bytes:
                self._figures = replace(self._figures, refused=self._figures.refused + 1)
                return False
            number = next(self._numbers)
            self._uploads[number] = key, nbytes, self._executor.submit(self._upload, number, key, encode)
            return True

    def forget(self, key: str) -> None:
        """Do not upload what waits under a key; if it is on its way, wait until it has arrived or failed.

        To be called before the key is dropped in the remote tier, or the upload might put it back.
        """
        with self._lock:
            self._after_fork()
            running = self._cancel(key)
        wait(running)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits any more; return whether that is so, False if the time was not enough."""
        with self._lock:
            self._after_fork()
            uploads = [upload for _, _, upload in self._uploads.values()]
        return not wait(uploads, timeout_s).not_done

    def stats(self) -> UploadStats:
        """Return the figures of this process."""
        with self._lock:
            self._after_fork()
            return replace(self._figures, waiting=len(self._uploads), waiting_bytes=self._waiting_bytes())

    def close(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, and wait as `flush` does; what then still waits is not uploaded. Closing twice does nothing."""
        self._closed = True
        is_done = self.flush(timeout_s)
        with self._lock:
            self._cancel()
        self._executor.shutdown(wait=is_done)
        return is_done

    def _after_fork(self) -> None:
        """Leave to the parent what it uploads; the lock is held."""
        if self._pid != os.getpid():
            self._figures, self._uploads = UploadStats(), {}
            self._pid, self._executor = os.getpid(), _executor()

    def _waiting_bytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self._uploads.values())

    def _cancel(self, key: str | None = None) -> list[Future[None]]:
        """Give up what waits, or what waits under one key; return those that are under way already. The lock is held."""
        chosen = [(number, each[2]) for number, each in self._uploads.items() if key in (None, each[0])]
        running = [(number, upload) for number, upload in chosen if not upload.cancel()]
        for number, _ in set(chosen).difference(running):
            del self._uploads[number]
        return [upload for _, upload in running]

    def _upload(self, number: int, key: str, encode: Callable[[], EncodedChunk]) -> None:
        failure: Exception | None = None
        try:
            self._tier.put(key, encode())
        except StoreError as error:
            failure = error
        except Exception as error:
            _log.exception("the upload of chunk KV %s… failed in a way that is not foreseen", key[:12])
            failure = error
        with self._lock:
            del self._uploads[number]
            figures = self._figures
            self._figures = replace(
                figures, written=figures.written + (failure is None), failed=figures.failed + (failure is not None)
            )
        is_out = isinstance(failure, RemoteUnavailableError)
        if isinstance(failure, StoreError) and not (is_out and self._is_out):
            _log.warning("chunk KV %s… was not uploaded: %s", key[:12], failure)
        self._is_out = is_out


def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "cacheblend-remote-writer")
