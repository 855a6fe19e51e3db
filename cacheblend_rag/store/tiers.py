"""The tiers of this machine: RAM, and a folder of chunk files with the index of them."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

import torch

from cacheblend_rag.codec import Codec, PackedKV, PackedLayer, make_codec, pack_kv
from cacheblend_rag.errors import ChunkReadError, StoreError, StoreFullError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from cacheblend_rag.store.index import KEY, Index, drop_entries, storing, valid_key

__all__ = ["DiskTier", "Entry", "RamTier", "owner_only"]

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


def owner_only(path: str, flags: int) -> int:
    """Open a file that is made for its owner alone; an `opener` of `open`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV of one chunk in RAM, and whose it is."""

    kv: PackedKV
    tenant: str = ""
    # Whether it is good only as long as the disk holds it too.
    is_copy: bool = False
    # Whether it is still to be written: it stays as it is, and is not dropped for room.
    waits: bool = False
    # What KV without a name goes with: a namespace, and ids there.
    tied: tuple[str, frozenset[str]] | None = None


class RamTier:
    """Chunk KV in RAM by key, at most `limit_bytes` packed by `codec`, the least recently used dropped first.

    It is page-locked, for CUDA to copy without the processor, if that is wanted and possible. Any thread may call any method.
    """

    def __init__(self, limit_bytes: int, codec: Codec, page_locked: bool = False) -> None:
        self.limit_bytes, self.codec = limit_bytes, codec
        self.evicted: Counter[str] = Counter()
        self._page_locked = page_locked
        self._lock = threading.RLock()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._used_bytes = 0

    def get(self, key: str) -> Entry | None:
        """Return what is held under `key` and mark it as recently used."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def peek(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def keep(self, key: str, kv: ChunkKV | PackedKV, tenant: str = "", **role: Any) -> bool:
        """Keep KV, dropping the least recently used for room; return whether there was any. `role` is as in `Entry`."""
        if role.get("waits"):
            packed = kv if isinstance(kv, PackedKV) else pack_kv(kv, make_codec("native"))
        else:
            packed = pack_kv(kv, self.codec)
            packed = self._settled(packed) if packed.nbytes <= self.limit_bytes else packed
        nbytes = packed.nbytes
        with self._lock:
            self.drop([key])
            if nbytes > self.limit_bytes:
                return False
            while self._used_bytes + nbytes > self.limit_bytes:
                oldest = next((each for each, entry in self._entries.items() if not entry.waits), None)
                if oldest is None:
                    return False
                self.evicted[self._entries[oldest].tenant] += 1
                self.drop([oldest])
            self._entries[key] = Entry(packed, tenant, **role)
            self._used_bytes += nbytes
            return True

    def drop(self, keys: Iterable[str]) -> None:
        with self._lock:
            for entry in filter(None, [self._entries.pop(key, None) for key in keys]):
                self._used_bytes -= entry.kv.nbytes

    def keys(self, tenant: str | None = None, copies: bool = False) -> list[str]:
        """Return all keys, or those of a tenant, or of what is a copy."""
        with self._lock:
            entries = [each for each in self._entries.items() if tenant in (None, each[1].tenant)]
        return [key for key, entry in entries if entry.is_copy or not copies]

    def tied(self, namespace: str, ids: Collection[str]) -> list[str]:
        """Return the keys of what is tied to one of the ids."""
        with self._lock:
            ties = [(key, entry.tied) for key, entry in self._entries.items() if entry.tied is not None]
        return [key for key, (space, own) in ties if space == namespace and not own.isdisjoint(ids)]

    def nbytes(self, tenant: str | None = None) -> int:
        with self._lock:
            return sum(entry.kv.nbytes for entry in self._entries.values() if tenant in (None, entry.tenant))

    def _settled(self, kv: PackedKV) -> PackedKV:
        """Return KV in memory of its own, page-locked if that is wanted and possible."""

        def settled(part: torch.Tensor, layer: PackedLayer) -> torch.Tensor:
            try:
                if self._page_locked:
                    return part.pin_memory()
            except RuntimeError as error:
                self._page_locked = False
                _log.warning(
                    "KV is kept in ordinary memory, since page-locked memory is unavailable: %s (set page_locked=False, or a "
                    "smaller ram_bytes; this warning is not repeated)",
                    str(error).partition("\n")[0],
                )
            # What is a view into something larger, but not of its layer alone, as read from a file, would keep that uncounted.
            return part.clone() if part.untyped_storage().nbytes() > layer.nbytes else part

        layers = [
            replace(layer, parts={name: settled(part, layer) for name, part in layer.parts.items()})
            for layer in kv.layers
        ]
        return PackedKV(kv.token_ids, kv.start, layers, kv.context)


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
