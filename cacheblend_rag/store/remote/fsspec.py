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
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk, FileSource
from cacheblend_rag.store.index import valid_key
from cacheblend_rag.store.remote import Guard, RemoteSource
from cacheblend_rag.store.tiers import owner_only

__all__ = ["FsspecTier"]

# Where a file appears only when it is complete; a renaming would copy it.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}
_PARALLEL = 16

Result = TypeVar("Result")


class FsspecTier:
    """A `RemoteTier` in a filesystem of fsspec, which expires no files."""

    def __init__(
        self, url: str, location: str, connect_timeout_s: float, read_timeout_s: float, options: Mapping[str, Any]
    ) -> None:
        options = {"use_listings_cache": False, **options}
        if url.startswith(("s3:", "s3a:")):
            limits = {
                "connect_timeout": connect_timeout_s,
                "read_timeout": read_timeout_s,
                "retries": {"max_attempts": 1},
            }
            options["config_kwargs"] = {**limits, **options.get("config_kwargs", {})}
        self.location = location
        self._filesystem: Any
        self._filesystem, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
        if hasattr(self._filesystem, "retries"):
            self._filesystem.retries = 1
        self._root = root.rstrip("/")
        self._is_local = isinstance(self._filesystem, LocalFileSystem)
        protocols = self._filesystem.protocol
        self._is_object_store = not _OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols)
        # Asynchronous filesystems take a time limit for each call; the others wait as long as their client does.
        is_asynchronous = isinstance(self._filesystem, AsyncFileSystem) and self._filesystem.async_impl
        self._limits = {"timeout": read_timeout_s} if is_asynchronous else {}
        self._guard = Guard(location, (Exception,))

    def put(self, key: str, chunk: EncodedChunk) -> None:
        file = self._file(key)
        with self._guard.calling("store a chunk"):
            if self._size(file) != chunk.nbytes or self._read(file, 0, len(chunk.head)) != chunk.head:
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
            return int(self._filesystem.info(file, **self._limits)["size"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _read(self, file: str, start: int, end: int) -> bytes | None:
        try:
            data: bytes = self._filesystem.cat_file(file, start=start, end=end, **self._limits)
        except FileNotFoundError:
            return None
        return data

    def _remove(self, file: str) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            self._filesystem.rm_file(file)

    def _send(self, file: str, chunk: EncodedChunk) -> None:
        if self._is_object_store:
            self._filesystem.pipe_file(file, b"".join(chunk.buffers))
            return
        part = f"{self._root}/tmp/{secrets.token_hex(8)}.part"
        try:
            for path in (part, file):
                self._make_folder(path.rpartition("/")[0])
            if self._is_local:
                with open(part, "xb", opener=owner_only) as local:
                    local.writelines(chunk.buffers)
                os.replace(part, file)
            else:
                self._filesystem.pipe_file(part, b"".join(chunk.buffers))
                self._remove(file)
                self._filesystem.mv(part, file)
        except BaseException:
            with suppress(Exception):
                self._filesystem.rm_file(part)
            raise

    def _make_folder(self, path: str) -> None:
        if not self._is_local:
            self._filesystem.makedirs(path, exist_ok=True)
            return
        # Parent by parent, because makedirs gives its mode to the last folder only.
        for folder in (*reversed(Path(path).parents), Path(path)):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)

    def _each(self, files: list[str], work: Callable[[str], Result]) -> list[Result]:
        if len(files) < 2 or self._is_local:
            return [work(file) for file in files]
        with ThreadPoolExecutor(min(_PARALLEL, len(files))) as pool:
            return list(pool.map(work, files))
