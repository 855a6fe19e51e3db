"""The tiers below RAM: a folder of chunk files with the index of them, and a remote tier, which may fail at any time."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.codec import Codec, PackedKV, make_codec
from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError, StoreFullError
from cacheblend_rag.files import owner_only
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from cacheblend_rag.store.index import KEY, Index, drop_entries, storing, valid_key
from cacheblend_rag.store.remote import RemoteTier

__all__ = ["DiskTier", "Offsite"]

_log = getLogger(__name__)

Result = TypeVar("Result")

_SUFFIX = ".safetensors"
# No file takes longer to be written.
_LEFT_S = 3600.0
_RESERVE_BYTES = 128 * 1024
# Recency is written when this many uses have gathered, or on the next write.
_TOUCHES_KEPT = 1024
# How often room is made for one write: what another program fills is not worth the whole store.
_ROOM_MADE = 4

_DAMAGED = (
    "KV in %s is damaged and computed again: %s (this warning is not repeated; `cacheblend-rag store check` finds all)"
)
# What a tier that does not answer is asked for, and how often: first, and at least.
_NO_KEY = "0" * 32
_FIRST_PROBE_S, _LAST_PROBE_S = 0.1, 2.0


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
        self.path, self.limit_bytes = path, limit_bytes
        self.evicted: Counter[str] = Counter()
        self._told: set[str] = set()
        # Uses that are not written yet, in their order.
        self._touched: dict[str, None] = {}
        # Whether room is set aside, or need not be.
        self._has_reserve = True
        # Keys that were discarded where they could not be removed.
        self._discarded: set[str] = set()
        self.index = Index(path, self.remove_file, lock_timeout_s)
        self.with_room(self.index.share)
        with storing(path):
            # What killed processes have left outside its place.
            for part in (path / "tmp").glob("*"):
                with suppress(FileNotFoundError):
                    if time.time() - part.stat().st_mtime > _LEFT_S:
                        shutil.rmtree(part) if part.is_dir() else part.unlink()
        self._has_reserve = self._keep_reserve()

    def find(self, key: str) -> tuple[ChunkFile, str] | None:
        """Return the file of `key`, its head verified, and whose it is; None if it is not held, or not readable."""
        tenant = self.index.tenant_of(key)
        if tenant is None or key in self._discarded:
            return None
        try:
            file = ChunkFile.open(self.file_path(key), key)
        except ChunkReadError as error:
            if error.damaged:
                self._lose(key, str(error))
            else:
                _log.warning("%s", error)
            return None
        self.touch(key)
        return file, tenant

    def put(self, key: str, kv: PackedKV, tenant: str) -> list[str]:
        """Write KV under `key` unless that is held and sound, or no name leads to it; return the keys dropped for room."""
        if self.holds([valid_key(key)])[0]:
            flaw = self.flaw(key)
            if flaw is None:
                self.touch(key)
                return []
            self._warn_once(_DAMAGED, self.path, flaw)
        encoded = encode_chunk(key, kv)
        limit_bytes = self._share_bytes(encoded.nbytes) if self.limit_bytes is None else self.limit_bytes
        if encoded.nbytes > limit_bytes:
            raise StoreFullError(
                f"a chunk of {encoded.nbytes} bytes exceeds the store's budget of {limit_bytes} bytes (disk_bytes)"
            )
        self.flush()

        def write() -> dict[str, str]:
            with self.written(key, encoded.buffers) as place:
                return self.index.add(key, encoded.nbytes, tenant, limit_bytes, place)

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
                self.path,
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
            path = self.file_path(key)
            if connection.execute("SELECT 1 FROM entries WHERE key = ?", (key,)).fetchone() or not path.exists():
                return None
            nbytes = path.stat().st_size
            self.remove_file(key)
        return nbytes

    def with_room(self, write: Callable[[], Result], nbytes: int = 0) -> Result:
        """Run what writes that many bytes, and where the disk is full drop the KV least recently used first."""
        for _ in range(_ROOM_MADE):
            try:
                done = write()
                if not self._has_reserve:
                    self._has_reserve = self._keep_reserve()
                return done
            except StoreFullError as error:
                # Not a byte budget, nor a file as large as it may be.
                if error.__cause__ is None or getattr(error.__cause__, "errno", None) == errno.EFBIG:
                    raise
                self._has_reserve = False
                if not self._give_up_reserve():
                    victims = self.index.oldest(nbytes + _RESERVE_BYTES)
                    if not victims:
                        raise
                    # Their files go first: to note in the index that they are gone takes room, too.
                    for victim in victims:
                        self.remove_file(victim)
                    self.index.drop(victims)
                    self.evicted.update(victims.values())
                    self._warn_once(
                        "the disk of %s is full, so the KV least recently used is dropped for room; free some, or give the store "
                        "a smaller byte budget (disk_bytes) (this warning is not repeated; the store's figures count it)",
                        self.path,
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
            file = ChunkFile.open(self.file_path(key), key)
            if every_byte:
                file.verify()
        except ChunkReadError as error:
            return str(error)
        return None

    def file_path(self, key: str) -> Path:
        return self.path / "kv" / key[:2] / f"{valid_key(key)}{_SUFFIX}"

    def files(self) -> Iterator[tuple[Path, str | None]]:
        """Yield what lies among the chunks' files, and the key where it is one."""
        for shard in sorted((self.path / "kv").glob("*")):
            for path in sorted(shard.iterdir()) if shard.is_dir() else [shard]:
                key = path.name.removesuffix(_SUFFIX)
                yield path, key if KEY.fullmatch(key) and path == self.file_path(key) else None

    @contextmanager
    def written(self, key: str, buffers: Iterable[memoryview]) -> Iterator[Callable[[], None]]:
        """Write and sync a file outside its place; give what brings it to that of a key's, instead of one that is there."""
        part, final = self.path / "tmp" / f"{secrets.token_hex(8)}.part", self.file_path(key)

        def place() -> None:
            with storing(self.path):
                final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                part.replace(final)

        try:
            with storing(self.path):
                part.parent.mkdir(mode=0o700, exist_ok=True)
                with open(part, "xb", opener=owner_only) as file:
                    file.writelines(buffers)
                    file.flush()
                    os.fsync(file.fileno())
            yield place
        finally:
            part.unlink(missing_ok=True)

    def remove_file(self, key: str) -> None:
        """Remove the file of a key; where that fails, it is there without an entry."""
        with suppress(OSError, StoreError):
            self.file_path(key).unlink()

    def _keep_reserve(self) -> bool:
        """Set room aside on the disk, given up so that things can be deleted when it is full; return whether there is any."""
        reserve = self.path / "reserve"
        try:
            if not reserve.exists():
                with open(reserve, "wb", opener=owner_only) as file:
                    file.write(bytes(_RESERVE_BYTES))
            return True
        except OSError:
            reserve.unlink(missing_ok=True)
            return False

    def _give_up_reserve(self) -> bool:
        """Free the room set aside; return whether there was any."""
        try:
            (self.path / "reserve").unlink()
        except OSError:
            return False
        return True

    def _share_bytes(self, nbytes: int) -> int:
        """Return the budget where none was given: what is held, half of what is free beside it, and room for this."""
        held_bytes = self.index.share()[1]
        with storing(self.path):
            free_bytes = shutil.disk_usage(self.path).free
        return max((free_bytes + held_bytes) // 2, held_bytes, nbytes)

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._told:
            self._told.add(message)
            _log.warning(message, *values)

    def _lose(self, key: str, reason: str) -> None:
        """Drop damaged KV, and say so once."""
        self._warn_once(_DAMAGED, self.path, reason)
        with suppress(StoreError):
            self.drop_damaged(key, wait=False)


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
