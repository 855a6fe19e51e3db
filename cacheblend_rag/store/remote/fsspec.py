"""KV in any filesystem that fsspec knows: S3, Google Cloud Storage, Azure, a folder on a network share, memory.

::

    ROOT/ab/KEY/VERSION.safetensors    the chunk file; the version is its own digest
    ROOT/tmp/                          files on their way in, where a file can be seen before it is complete

Different bytes never share a name, so that a reader never sees two versions mixed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from cacheblend_rag.errors import ChunkReadError, ConfigError
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk, FileSource
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.remote.base import MAX_CHUNK_BYTES, Guard, RemoteSettings, cut

__all__ = ["FsspecTier"]

_FILE = re.compile(r"[0-9a-f]{32}\.safetensors")
# Where a file appears only when it is complete; a renaming would copy it.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}
# The least that object stores take as a part, all but the last.
_LEAST_PART_BYTES = 5 * 1024 * 1024
_REFUSED = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_PARALLEL = 16
_ATTEMPTS = 4
_ABANDONED = timedelta(days=1)

Result = TypeVar("Result")


def _connect(url: str, settings: RemoteSettings, options: dict[str, Any]) -> tuple[Any, str]:
    if url.startswith(("s3:", "s3a:")):
        limits = {
            "connect_timeout": settings.connect_timeout_s,
            "read_timeout": settings.read_timeout_s,
            "retries": {"max_attempts": 1},
        }
        options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
    filesystem, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    if hasattr(filesystem, "retries"):
        filesystem.retries = 1
    return filesystem, root.rstrip("/")


class FsspecTier:
    """A `RemoteTier` in a filesystem of fsspec; ConfigError if the settings or the options do not fit it.

    Filesystems do not expire files: `ttl_s` is an error.
    """

    def __init__(
        self, url: str, location: str, secret_words: list[str], settings: RemoteSettings, options: Mapping[str, Any]
    ) -> None:
        if settings.ttl_s is not None:
            raise ConfigError(
                f"ttl_s={settings.ttl_s}: files in {location} do not expire by themselves; give the bucket a lifecycle rule"
            )
        self.location = location
        self._settings = settings
        self._filesystem, self._root = _connect(url, settings, {"use_listings_cache": False, **options})
        self._is_local = isinstance(self._filesystem, LocalFileSystem)
        protocols = self._filesystem.protocol
        self._is_object_store = not _OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols)
        self._is_swept = False
        self._guard = Guard(location, secret_words, settings, (Exception,), _is_refusal)

    def put(self, key: str, chunk: EncodedChunk) -> None:
        folder = self._folder(key)
        file = f"{folder}/{chunk.digest.hex()}.safetensors"
        with self._guard.calling("store a chunk"):
            held = self._list(folder)
            if held.get(file) != chunk.nbytes:
                self._sweep()
                self._send(file, chunk)
            for other in held.keys() - {file}:
                with suppress(FileNotFoundError):
                    self._filesystem.rm_file(other)

    def open(self, key: str) -> ByteSource | None:
        folder = self._folder(key)
        with self._guard.calling("look a chunk up"):
            held = self._list(folder)
            if not held:
                return None
            # Several only while one takes the other's place, or where that was cut short. Each is right if it is sound.
            file, size = max(held.items())
            if self._is_local:
                try:
                    return FileSource(file, self.location.partition(":")[0])
                except FileNotFoundError:
                    return None
        if not 0 <= size <= MAX_CHUNK_BYTES:
            raise ChunkReadError(key, f"a file of {size} bytes is not a chunk's")
        return _FileRange(self, file, size)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        folders = [self._folder(key) for key in keys]
        with self._guard.calling("look chunks up"):
            return self._each(folders, lambda folder: bool(self._list(folder)))

    def drop(self, keys: Iterable[str]) -> None:
        folders = [self._folder(key) for key in keys]

        def remove(folder: str) -> None:
            for file in self._list(folder):
                with suppress(FileNotFoundError):
                    self._filesystem.rm_file(file)
            if not self._is_object_store:
                # Another writer may have put something there in the meantime.
                with suppress(OSError):
                    self._filesystem.rmdir(folder)

        with self._guard.calling("remove chunks"):
            self._each(folders, remove)

    def close(self) -> None:
        self._guard.closed = True

    def read_range(self, file: str, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes of a file from `offset` on; return how many there were."""
        with self._guard.calling("read a layer"):
            try:
                data = self._filesystem.cat_file(file, start=offset, end=offset + len(view), **self._limits())
            except FileNotFoundError:
                data = None
        if data is None:
            raise FileNotFoundError(errno.ENOENT, "they were removed or replaced")
        if len(data) > len(view):
            raise OSError(errno.EIO, "more bytes came than were asked for")
        view[: len(data)] = data
        return len(data)

    def _folder(self, key: str) -> str:
        return f"{self._root}/{valid_key(key)[:2]}/{key}"

    def _list(self, folder: str) -> dict[str, int]:
        """Return the chunk files in a folder, and their sizes."""
        try:
            entries = self._filesystem.ls(folder, detail=True, **self._limits())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        names = {f"{folder}/{PurePosixPath(entry['name']).name}": entry for entry in entries}
        return {name: int(entry["size"]) for name, entry in names.items() if _FILE.fullmatch(PurePosixPath(name).name)}

    def _send(self, file: str, chunk: EncodedChunk) -> None:
        if self._is_object_store:
            self._write(file, chunk)
            return
        part = f"{self._root}/tmp/{secrets.token_hex(8)}.part"
        try:
            self._make_folder(f"{self._root}/tmp")
            self._write(part, chunk)
            for attempt in range(_ATTEMPTS):
                self._make_folder(file.rpartition("/")[0])
                try:
                    if self._is_local:
                        os.replace(part, file)
                    else:
                        self._filesystem.mv(part, file)
                    return
                except FileNotFoundError:
                    # Another machine removed the folder again, being empty.
                    if attempt == _ATTEMPTS - 1:
                        raise
        except BaseException:
            with suppress(Exception):
                self._filesystem.rm_file(part)
            raise

    def _write(self, path: str, chunk: EncodedChunk) -> None:
        if self._is_local:
            with open(path, "xb", opener=_private) as local:
                local.writelines(chunk.buffers)
            return
        part_bytes = max(self._settings.part_bytes, _LEAST_PART_BYTES)
        file = self._filesystem.open(path, "wb", block_size=part_bytes)
        try:
            for piece in cut(chunk.buffers, part_bytes):
                file.write(piece)
        except BaseException:
            # Closing would make what was written so far a file.
            with suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    def _make_folder(self, path: str) -> None:
        if self._is_local:
            # Parent by parent, because makedirs gives its mode to the last folder only.
            for folder in (*reversed(PurePosixPath(path).parents), PurePosixPath(path)):
                with suppress(FileExistsError):
                    os.mkdir(folder, mode=0o700)
        else:
            self._filesystem.makedirs(path, exist_ok=True)

    def _sweep(self) -> None:
        """Remove, once, what writers that died long ago have left."""
        if self._is_swept or self._is_object_store:
            return
        self._is_swept = True
        with suppress(FileNotFoundError, NotImplementedError):
            for file in self._filesystem.ls(f"{self._root}/tmp", detail=False):
                with suppress(FileNotFoundError):
                    if datetime.now(timezone.utc) - self._filesystem.modified(file) > _ABANDONED:
                        self._filesystem.rm_file(file)

    def _each(self, folders: list[str], work: Callable[[str], Result]) -> list[Result]:
        if len(folders) < 2 or self._is_local:
            return [work(folder) for folder in folders]
        with ThreadPoolExecutor(min(_PARALLEL, len(folders))) as pool:
            return list(pool.map(work, folders))

    def _limits(self) -> dict[str, float]:
        # Asynchronous filesystems take a time limit for each call; the others wait as long as their client does.
        is_asynchronous = isinstance(self._filesystem, AsyncFileSystem) and self._filesystem.async_impl
        return {"timeout": self._settings.read_timeout_s} if is_asynchronous else {}


class _FileRange:
    """The bytes of one chunk's file."""

    def __init__(self, tier: FsspecTier, file: str, size: int) -> None:
        self._tier = tier
        self._file = file
        self.size = size
        # Named by its URL's scheme, so that local and remote filesystems are not taken to be equally fast.
        self.tier = tier.location.partition(":")[0]

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` on; return how many there were, fewer only where the bytes end."""
        wanted = max(0, min(len(view), self.size - offset))
        return self._tier.read_range(self._file, view[:wanted], offset) if wanted else 0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in _REFUSED
