"""KV in any filesystem that fsspec knows: S3, Google Cloud Storage, Azure, a folder on a network share, memory.

::

    ROOT/ab/KEY.safetensors    the chunk file
    ROOT/tmp/                  files on their way in, where a file can be seen before it is complete
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk, FileSource
from cacheblend_rag.store.folder import owner_only, valid_key
from cacheblend_rag.store.remote import Guard, RemoteSettings, RemoteSource, cut

__all__ = ["FsspecTier"]

# Where a file appears only when it is complete; a renaming would copy it.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}
# The least that object stores take as a part, all but the last.
_LEAST_PART_BYTES = 5 * 1024 * 1024
_PARALLEL = 16
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
    """A `RemoteTier` in a filesystem of fsspec, which expires no files; ConfigError if the settings do not fit it."""

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
        self._guard = Guard(location, secret_words, (Exception,))

    def put(self, key: str, chunk: EncodedChunk) -> None:
        file = self._file(key)
        with self._guard.calling("store a chunk"):
            if self._size(file) != chunk.nbytes or self._read(file, 0, len(chunk.head)) != chunk.head:
                self._sweep()
                self._send(file, chunk)

    def open(self, key: str) -> ByteSource | None:
        file, scheme = self._file(key), self.location.partition(":")[0]
        with self._guard.calling("look a chunk up"):
            if self._is_local:
                with suppress(FileNotFoundError):
                    return FileSource(file, scheme)
                return None
            size = self._size(file)
        # Its scheme, so that no two filesystems are taken to be equally fast.
        return None if size is None else RemoteSource(self._guard, scheme, size, partial(self._read, file))

    def holds(self, keys: Sequence[str]) -> list[bool]:
        files = [self._file(key) for key in keys]
        with self._guard.calling("look chunks up"):
            return self._each(files, lambda file: self._size(file) is not None)

    def drop(self, keys: Iterable[str]) -> None:
        files = [self._file(key) for key in keys]
        with self._guard.calling("remove chunks"):
            self._each(files, self._remove)

    def close(self) -> None:
        self._guard.closed = True

    def _file(self, key: str) -> str:
        return f"{self._root}/{valid_key(key)[:2]}/{key}.safetensors"

    def _size(self, file: str) -> int | None:
        try:
            return int(self._filesystem.info(file, **self._limits())["size"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _read(self, file: str, start: int, end: int) -> bytes | None:
        try:
            data: bytes = self._filesystem.cat_file(file, start=start, end=end, **self._limits())
        except FileNotFoundError:
            return None
        return data

    def _remove(self, file: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            self._filesystem.rm_file(file)

    def _send(self, file: str, chunk: EncodedChunk) -> None:
        if self._is_object_store:
            self._write(file, chunk)
            return
        part = f"{self._root}/tmp/{secrets.token_hex(8)}.part"
        try:
            for path in (part, file):
                self._make_folder(path.rpartition("/")[0])
            self._write(part, chunk)
            if self._is_local:
                os.replace(part, file)
            else:
                self._remove(file)
                self._filesystem.mv(part, file)
        except BaseException:
            with suppress(Exception):
                self._filesystem.rm_file(part)
            raise

    def _write(self, path: str, chunk: EncodedChunk) -> None:
        if self._is_local:
            with open(path, "xb", opener=owner_only) as local:
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

    def _each(self, files: list[str], work: Callable[[str], Result]) -> list[Result]:
        if len(files) < 2 or self._is_local:
            return [work(file) for file in files]
        with ThreadPoolExecutor(min(_PARALLEL, len(files))) as pool:
            return list(pool.map(work, files))

    def _limits(self) -> dict[str, float]:
        # Asynchronous filesystems take a time limit for each call; the others wait as long as their client does.
        is_asynchronous = isinstance(self._filesystem, AsyncFileSystem) and self._filesystem.async_impl
        return {"timeout": self._settings.read_timeout_s} if is_asynchronous else {}
