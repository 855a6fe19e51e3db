"""The remote tier as a store has it: it may fail at any time, and is written to in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from logging import getLogger

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from cacheblend_rag.store.remote import RemoteTier

__all__ = ["Offsite"]

_log = getLogger(__name__)

# What a tier that does not answer is asked for, and how often: first, and at least.
_NO_KEY = "0" * 32
_FIRST_PROBE_S, _LAST_PROBE_S = 0.1, 2.0


class Offsite:
    """Reads from a remote tier, and has what `local` returns of a key uploaded; None is for what is not held any more."""

    def __init__(self, tier: RemoteTier, local: Callable[[str], PackedKV | None]) -> None:
        self._tier, self._local = tier, local
        self._uploads = ThreadPoolExecutor(1, "cacheblend-upload")
        self._changed = threading.Condition()
        self._uploading: str | None = None
        self._undropped: set[str] = set()
        self._is_out = self._has_failed = self._closed = False
        self._mender: threading.Thread | None = None

    def open(self, key: str) -> ChunkFile | None:
        """Return what is held under `key`, its head verified, or None."""
        if key in self._undropped or self._is_out:
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
                self.drop([key], wait=False)
            else:
                _log.warning("remote KV is left alone: %s", error)
        return None

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether something is held under it; False where the tier does not answer."""
        try:
            found = self._tier.holds(keys) if keys and not self._is_out else [False] * len(keys)
        except RemoteUnavailableError as error:
            self._tell(error)
            return [False] * len(keys)
        return [there and key not in self._undropped for key, there in zip(keys, found, strict=True)]

    def put(self, key: str) -> None:
        """Have KV uploaded in the background; until then it may be evicted here, and is not uploaded."""
        with suppress(RuntimeError):  # Python ends, or the store is closed
            self._uploads.submit(self._upload, key)

    def drop(self, keys: Iterable[str], wait: bool = True) -> None:
        """Remove what is held under the keys, for all machines; nothing is read from there under these keys from now on.

        Without `wait`, or where the tier does not answer, that is done in the background, as soon as it can.
        """
        with self._changed:
            self._undropped.update(keys)
        if not wait:
            self._mend_later()
        elif not self._is_out:
            try:
                self._remove()
            except RemoteUnavailableError as error:
                self._tell(error)

    def flush(self) -> None:
        """Wait until everything that waits is uploaded."""
        with suppress(RuntimeError):
            self._uploads.submit(int).result()

    def close(self) -> None:
        """Upload what waits, remove what is still to be removed, and release connections."""
        self._uploads.shutdown()
        self._closed = True
        with suppress(RemoteUnavailableError):
            self._remove()
        if self._undropped:
            _log.warning(
                "%d deleted chunks are still held by %s, which does not answer; they expire there if it has a time to live",
                len(self._undropped),
                self._tier.location,
            )
        self._tier.close()

    def _tell(self, error: RemoteUnavailableError) -> None:
        with self._changed:
            was_out, self._is_out = self._is_out, True
        if not was_out and not self._closed:
            _log.warning("%s; its KV counts as not stored, and nothing is uploaded, until it answers again", error)
        self._mend_later()

    def _mend_later(self) -> None:
        with self._changed:
            if not self._closed and (self._mender is None or not self._mender.is_alive()):
                self._mender = threading.Thread(target=self._mend, name="cacheblend-remote", daemon=True)
                self._mender.start()

    def _mend(self) -> None:
        """Ask the tier until it answers, and remove what is to be removed."""
        wait_s = _FIRST_PROBE_S if self._is_out else 0.0
        while not self._closed:
            time.sleep(wait_s)
            with self._changed:
                if not self._undropped and not self._is_out:
                    self._mender = None
                    return
            try:
                self._remove()
                self._tier.holds([_NO_KEY])
            except RemoteUnavailableError as error:
                self._tell(error)
                wait_s = min(max(2 * wait_s, _FIRST_PROBE_S), _LAST_PROBE_S)
            else:
                self._is_out, wait_s = False, 0.0

    def _remove(self) -> None:
        """Remove what is to be removed."""
        with self._changed:
            # What is on its way arrives first, or it would put back what is removed.
            self._changed.wait_for(lambda: self._uploading not in self._undropped)
            keys: Collection[str] = set(self._undropped)
        if keys:
            self._tier.drop(sorted(keys))
            with self._changed:
                self._undropped.difference_update(keys)

    def _upload(self, key: str) -> None:
        with self._changed:
            self._uploading, is_undropped = key, key in self._undropped
        try:
            kv = None if self._is_out else self._local(key)
            if kv is not None:
                if is_undropped:
                    # Damaged bytes would be taken for what is put: whether that is there already is judged by its size.
                    self._tier.drop([key])
                self._tier.put(key, encode_chunk(key, kv))
                if is_undropped and self._local(key) is not None:
                    with self._changed:
                        self._undropped.discard(key)
            self._has_failed = False
        except Exception as error:
            # One that refuses to be written is still read.
            self.holds([_NO_KEY])
            if not self._is_out and not self._has_failed:
                _log.warning("chunk KV %s… was not uploaded: %s", key[:12], error)
            self._has_failed = True
        with self._changed:
            self._uploading = None
            self._changed.notify_all()
