"""Uploads in the background, so that nobody waits for a remote tier to be written."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger

from cacheblend_rag.errors import RemoteUnavailableError, StoreError
from cacheblend_rag.store.encoded import EncodedChunk
from cacheblend_rag.store.locks import ForkSafeLock
from cacheblend_rag.store.remote.base import RemoteTier

__all__ = ["RemoteWriter", "UploadStats"]

_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UploadStats:
    """What became of the chunks that were given to a `RemoteWriter` of this process.

    Attributes
    ----------
    waiting, waiting_bytes : int
        Chunks that are not yet uploaded, and their bytes.
    written : int
        Chunks that the remote tier holds.
    failed : int
        Chunks that could not be uploaded, for whatever reason.
    refused : int
        Chunks that were not taken because too much was waiting.
    """

    waiting: int
    waiting_bytes: int
    written: int
    failed: int
    refused: int


class RemoteWriter:
    """Writes chunks to a remote tier from a thread of its own.

    What waits is bounded in bytes; a chunk that does not fit is not taken, since its KV lies on disk and can be uploaded another
    time. An upload that fails is not tried again by itself, and the first failure of an outage is logged. A forked child begins
    with nothing waiting: its parent uploads what waited before.

    Parameters
    ----------
    tier : RemoteTier
        Where to write; it stays the caller's to close.
    max_waiting_bytes : int
        Most bytes that wait; a single chunk is taken whatever its size when nothing waits.
    """

    def __init__(self, tier: RemoteTier, max_waiting_bytes: int = 256 * 1024 * 1024) -> None:
        self._tier = tier
        self._max_waiting_bytes = max_waiting_bytes
        self._lock = ForkSafeLock()
        self._pid = os.getpid()
        self._uploads = _Uploads(tier, max_waiting_bytes)

    def put(self, key: str, nbytes: int, encode: Callable[[], EncodedChunk]) -> bool:
        """Have a chunk uploaded; never waits for the remote tier.

        Parameters
        ----------
        key : str
            The store key. What waits under it already is replaced.
        nbytes : int
            About how many bytes the chunk has: what it counts for while it waits.
        encode : callable
            Makes its bytes, in the writer's thread. A StoreError of it counts as a failed upload.

        Returns
        -------
        bool
            Whether it was taken.

        Raises
        ------
        StoreError
            If the writer is closed.
        """
        return self._own().put(key, nbytes, encode)

    def forget(self, key: str) -> None:
        """Do not upload what waits under a key; if it is on its way, wait until it has arrived or failed.

        To be called before the key is dropped in the remote tier, or the upload might put it back.
        """
        self._own().forget(key)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing waits any more; return whether that is so, False if the time was not enough."""
        return self._own().flush(timeout_s)

    def stats(self) -> UploadStats:
        """Return the figures of this process."""
        return self._own().stats()

    def close(self, timeout_s: float | None = None) -> bool:
        """Take nothing more, and wait as `flush` does; what then still waits is not uploaded. Closing twice does nothing."""
        return self._own().close(timeout_s)

    def _own(self) -> _Uploads:
        with self._lock:
            if self._pid != os.getpid():
                # The thread did not come along, and a lock in there may be held for ever.
                is_closed = self._uploads.closed
                self._uploads = _Uploads(self._tier, self._max_waiting_bytes)
                self._uploads.closed = is_closed
                self._pid = os.getpid()
            return self._uploads


class _Uploads:
    """The queue and the thread of one process."""

    def __init__(self, tier: RemoteTier, max_waiting_bytes: int) -> None:
        self._tier = tier
        self._max_waiting_bytes = max_waiting_bytes
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, tuple[int, Callable[[], EncodedChunk]]] = OrderedDict()
        self._waiting_bytes = 0
        self._current: str | None = None
        self._thread: threading.Thread | None = None
        self._written = self._failed = self._refused = 0
        self._is_out = False
        self.closed = False

    def put(self, key: str, nbytes: int, encode: Callable[[], EncodedChunk]) -> bool:
        with self._changed:
            if self.closed:
                raise StoreError("the remote tier's writer is closed; open the store again")
            self._take(key)
            if self._waiting_bytes and self._waiting_bytes + nbytes > self._max_waiting_bytes:
                self._refused += 1
                return False
            self._waiting[key] = nbytes, encode
            self._waiting_bytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="cacheblend-remote-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def forget(self, key: str) -> None:
        with self._changed:
            self._take(key)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._current != key)

    def flush(self, timeout_s: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def stats(self) -> UploadStats:
        with self._changed:
            waiting = len(self._waiting) + (self._current is not None)
            return UploadStats(waiting, self._waiting_bytes, self._written, self._failed, self._refused)

    def close(self, timeout_s: float | None) -> bool:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self.closed = True
            self._changed.notify_all()
            done = self._changed.wait_for(self._is_idle, timeout_s)
            for key in list(self._waiting):
                self._take(key)
            thread = self._thread
        if thread:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return done

    def _is_idle(self) -> bool:
        return not self._waiting and self._current is None

    def _take(self, key: str) -> None:
        nbytes, _ = self._waiting.pop(key, (0, None))
        self._waiting_bytes -= nbytes

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self.closed)
                if not self._waiting:
                    return
                key, (nbytes, encode) = self._waiting.popitem(last=False)
                # Its bytes go on counting until they are written.
                self._current = key
            failure = self._upload(key, encode)
            del encode
            with self._changed:
                self._current = None
                self._waiting_bytes -= nbytes
                self._failed += failure is not None
                self._written += failure is None
                self._changed.notify_all()
            self._tell(key, failure)

    def _upload(self, key: str, encode: Callable[[], EncodedChunk]) -> Exception | None:
        try:
            self._tier.put(key, encode())
        except StoreError as error:
            return error
        except Exception as error:
            # The thread must go on, or nothing would ever be uploaded again.
            _log.exception("the upload of chunk KV %s… failed in a way that is not foreseen", key[:12])
            return error
        return None

    def _tell(self, key: str, failure: Exception | None) -> None:
        is_out = isinstance(failure, RemoteUnavailableError)
        if isinstance(failure, StoreError) and not (is_out and self._is_out):
            _log.warning("chunk KV %s… was not uploaded: %s", key[:12], failure)
        self._is_out = is_out
