"""The remote tier as a store sees it: something that may fail at any time without anybody noticing more than a miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from logging import getLogger

from cacheblend_rag.codec import Codec, PackedKV, pack_kv
from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from cacheblend_rag.store.locks import ForkSafeLock
from cacheblend_rag.store.remote.base import RemoteTier
from cacheblend_rag.store.waiting import WorkQueue

__all__ = ["Offsite"]

_log = getLogger(__name__)

_MOST_WAITING_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, eq=False, slots=True)
class _Upload:
    key: str
    kv: ChunkKV | PackedKV


class Offsite:
    """Reads from a remote tier, and writes to it in the background, packed by `codec`.

    A remote tier that fails is a miss and one warning an outage. What could not be removed there is removed when it answers
    again, as long as this object lives. At most `waiting_bytes` wait to be uploaded, or a single chunk of any size; what does not
    fit is not uploaded, nor is an upload that fails tried again, since the KV is held here.
    """

    def __init__(self, tier: RemoteTier, codec: Codec, waiting_bytes: int = _MOST_WAITING_BYTES) -> None:
        self._tier = tier
        self._codec = codec
        self._uploads = WorkQueue(self._upload, waiting_bytes, "cacheblend-upload")
        self._lock = ForkSafeLock()
        self._undropped: set[str] = set()
        self.is_out = False
        self._uploads_fail = False

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
            elif error.damaged:
                _log.warning("remote KV is dropped: %s", error)
                self.drop([key])
            else:
                _log.warning("remote KV is left alone: %s", error)
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
        """Have KV uploaded in the background, in place of what waits under its key; it is kept in memory until then."""
        with self._lock:
            self._undropped.discard(key)
        self._uploads.cancel(lambda upload: upload.key == key)
        self._uploads.offer(_Upload(key, kv), min(kv.nbytes, self._uploads.limit_bytes))

    def drop(self, keys: Iterable[str]) -> None:
        """Remove what is held under the keys, for all machines."""
        with self._lock:
            self._undropped.update(keys)
            gone = set(self._undropped)
        if not gone:
            return
        # What is on its way arrives first, or it would put back what is removed.
        wait(self._uploads.cancel(lambda upload: upload.key in gone))
        try:
            self._tier.drop(sorted(gone))
        except RemoteUnavailableError as error:
            self._tell(error)
            return
        with self._lock:
            self._undropped.difference_update(gone)

    def flush(self) -> None:
        """Wait until nothing waits to be uploaded; what could not be was told as a warning."""
        self._uploads.settle()

    def close(self) -> None:
        """Upload what waits, remove what is still to be removed, and release connections."""
        self._uploads.close()
        self.drop(())
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
        if not was_out:
            _log.warning("%s; its KV counts as not stored until it answers again", error)

    def _recovered(self) -> None:
        self.is_out = False
        if self._undropped:
            self.drop(())

    def _upload(self, upload: _Upload) -> None:
        fails = False
        try:
            self._tier.put(upload.key, encode_chunk(upload.key, pack_kv(upload.kv, self._codec)))
        except StoreError as error:
            fails = isinstance(error, RemoteUnavailableError)
            if not (fails and self._uploads_fail):
                _log.warning("chunk KV %s… was not uploaded: %s", upload.key[:12], error)
        except Exception:
            _log.exception("the upload of chunk KV %s… failed in a way that is not foreseen", upload.key[:12])
        self._uploads_fail = fails
