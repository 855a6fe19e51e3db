"""The remote tier as a store sees it: something that may fail at any time without anybody noticing more than a miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from logging import getLogger

from cacheblend_rag.codec import Codec, PackedKV, pack_kv
from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import ChunkFile
from cacheblend_rag.store.encoded import encode_chunk
from cacheblend_rag.store.locks import ForkSafeLock
from cacheblend_rag.store.remote import RemoteTier, RemoteWriter

__all__ = ["Offsite"]

_log = getLogger(__name__)


class Offsite:
    """Reads from a remote tier, and writes to it in the background.

    A remote tier that fails is a miss and one warning an outage. What could not be removed there is removed when it answers
    again, as long as this object lives.

    Parameters
    ----------
    tier : RemoteTier
        The tier; it is closed with this object.
    codec : Codec
        How KV is packed on the way there.
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
