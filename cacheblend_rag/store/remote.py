"""Remote tiers: KV under content keys in Redis, Valkey or any fsspec filesystem, shared by machines; what all of them have.

Names stay in each machine's own index. The bytes are those of a chunk file (`cacheblend_rag.store.chunkfile`), so that every
byte read from a remote tier is verified before it is used::

    ROOT/ab/KEY.safetensors    in a filesystem
    ROOT/tmp/                  files on their way in, where a file can be seen before it is complete
    cacheblend-rag:chunk:KEY   in Redis and Valkey
"""

from __future__ import annotations

import errno
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from cacheblend_rag.errors import ConfigError, RemoteUnavailableError, StoreError, needs_extra
from cacheblend_rag.files import owner_only
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk, FileSource
from cacheblend_rag.store.index import valid_key

__all__ = ["ByteSource", "EncodedChunk", "Guard", "RemoteSource", "RemoteTier", "open_remote"]

# Filesystems where a file appears only when it is complete; a renaming would copy it.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss"}
_PARALLEL = 16
_HEAD_BYTES = 16 * 1024
# What Redis keeps in one value, and what it is asked at once.
_MOST_BYTES = 512 * 1024**2
_KEYS_AT_ONCE = 1000
# Valkey speaks the same protocol.
_REDIS = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}

Result = TypeVar("Result")


class RemoteTier(Protocol):
    """KV under content keys, held outside this machine. All methods may be called from any thread.

    Every method raises `RemoteUnavailableError` where the remote tier is down, slow, full or closed, and StoreError for a key
    that is none. What is found to be damaged is to be dropped before it is put again: `put` looks at the head and the size alone.
    """

    @property
    def location(self) -> str:
        """Where it is, without credentials."""

    def put(self, key: str, chunk: EncodedChunk) -> None:
        """Keep a chunk under `key`: others see all of it or nothing. Bytes that are held whole already are not sent again."""

    def open(self, key: str) -> ByteSource | None:
        """Return the bytes under `key` for `ChunkFile` to read and verify, or None if they are not held."""

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether something is held under it; it may still turn out damaged when it is read."""

    def drop(self, keys: Iterable[str]) -> None:
        """Remove what is held under the keys, for all machines."""

    def close(self) -> None:
        """Release connections; sources fail from now on. Closing twice does nothing."""


class Guard:
    """Runs the calls of a remote tier; what they raise becomes a `RemoteUnavailableError` that quotes nothing of it."""

    def __init__(self, location: str, caught: tuple[type[Exception], ...]) -> None:
        self.location = location
        self._caught = caught
        self.closed = False

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Run calls to the remote tier; `what` they do is for the message."""
        if self.closed:
            raise RemoteUnavailableError(f"remote tier {self.location} is closed; open it again")
        try:
            yield
        except StoreError:
            raise
        except self._caught as error:
            # Its message may hold credentials, and so may those of its causes.
            raise RemoteUnavailableError(
                f"remote tier {self.location} could not {what}: {type(error).__name__}; see whether it runs, has room, and takes "
                "these credentials"
            ) from None


class RemoteSource:
    """The bytes of one chunk: the first of them, where they are known, and what reads others, None where they are gone."""

    def __init__(
        self, guard: Guard, tier: str, size: int, read: Callable[[int, int], bytes | None], head: bytes = b""
    ) -> None:
        self._guard, self.tier, self.size, self._read, self._head = guard, tier, size, read, head

    def read_into(self, view: memoryview, offset: int) -> int:
        end = min(offset + len(view), self.size)
        data = self._head[offset:end]
        if end > max(len(self._head), offset):
            with self._guard.calling("read a layer"):
                data = self._read(offset, end) or b""
            if not data:
                raise FileNotFoundError(errno.ENOENT, "they were removed or have expired")
        if len(data) > len(view):
            raise OSError(errno.EIO, "it returned more bytes than requested")
        view[: len(data)] = data
        return len(data)


class FsspecTier:
    """A `RemoteTier` in a filesystem of fsspec, which expires no files."""

    def __init__(
        self, url: str, location: str, connect_timeout_s: float, read_timeout_s: float, options: Mapping[str, Any]
    ) -> None:
        import fsspec
        from fsspec.asyn import AsyncFileSystem
        from fsspec.implementations.local import LocalFileSystem

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


class RedisTier:
    """A `RemoteTier` in one Redis or Valkey server."""

    def __init__(
        self, url: str, location: str, connect_timeout_s: float, read_timeout_s: float, ttl_s: float | None
    ) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self.location = location
        self._ttl_ms = None if ttl_s is None else max(1, int(ttl_s * 1000))
        # A connection that the server closed while it was idle is replaced at once. What timed out is not tried twice.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        self._client: Any = redis.Redis.from_url(
            url, socket_connect_timeout=connect_timeout_s, socket_timeout=read_timeout_s, retry=retry
        )
        self._errors = (redis.RedisError, OSError)
        self._guard = Guard(location, self._errors)

    def put(self, key: str, chunk: EncodedChunk) -> None:
        name = self._name(key)
        if chunk.nbytes > _MOST_BYTES:
            raise StoreError(f"a chunk of {chunk.nbytes} bytes exceeds the {_MOST_BYTES} that Redis keeps in one value")
        with self._guard.calling("store a chunk"):
            if self._head(name, len(chunk.head)) != (chunk.head, chunk.nbytes):
                self._client.set(name, b"".join(chunk.buffers), px=self._ttl_ms)
            elif self._ttl_ms is not None:
                self._client.pexpire(name, self._ttl_ms)

    def open(self, key: str) -> ByteSource | None:
        name = self._name(key)
        with self._guard.calling("look a chunk up"):
            head, size = self._head(name, _HEAD_BYTES)

        def read(begin: int, end: int) -> Any:
            return self._client.getrange(name, begin, end - 1)

        return RemoteSource(self._guard, "redis", size, read, head) if size else None

    def holds(self, keys: Sequence[str]) -> list[bool]:
        names = [self._name(key) for key in keys]
        with self._guard.calling("look chunks up"):
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(name)
            return [bool(count) for count in pipeline.execute()] if names else []

    def drop(self, keys: Iterable[str]) -> None:
        names = [self._name(key) for key in keys]
        with self._guard.calling("remove chunks"):
            for start in range(0, len(names), _KEYS_AT_ONCE):
                self._client.unlink(*names[start : start + _KEYS_AT_ONCE])

    def close(self) -> None:
        self._guard.closed = True
        with suppress(*self._errors):
            self._client.close()

    @staticmethod
    def _name(key: str) -> str:
        return f"cacheblend-rag:chunk:{valid_key(key)}"

    def _head(self, name: str, nbytes: int) -> tuple[bytes, int]:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.getrange(name, 0, nbytes - 1)
        pipeline.strlen(name)
        head, size = pipeline.execute()
        return head, size


def shown_url(url: str) -> str:
    """Return a URL without user, password and query; ConfigError if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port if parts.scheme in _REDIS else None
    except ValueError:
        parts = urlsplit("")
    # A password with one of /?# in it ends the address too early, and its rest would be taken for a path and shown.
    is_cut = parts.scheme in _REDIS and (not parts.netloc or "@" in url.partition(parts.netloc)[2])
    if not parts.scheme or "://" not in url or is_cut:
        raise ConfigError(
            "the remote tier's address is not a URL; give one like redis://host:6379/0 or s3://bucket/prefix, "
            "with /, ?, #, @ and : in a password written as %2F, %3F, %23, %40 and %3A"
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def open_remote(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    connect_timeout_s: float = 1.0,
    read_timeout_s: float = 5.0,
    ttl_s: float | None = None,
) -> RemoteTier:
    """Make the remote tier that a URL names. Nothing is connected to until it is used.

    Parameters
    ----------
    url : str
        ``redis://user:password@host:6379/0``, ``valkey://…``, with TLS ``rediss://…`` or ``valkeys://…`` (extra ``redis``); or
        the folder of any fsspec filesystem (extra ``fsspec``): ``s3://bucket/prefix`` (extra ``s3``),
        ``file:///mnt/share/kv``, ``memory://name``; or one whose scheme a package has registered as an entry point of the group
        ``cacheblend_rag.remotes``, called with the URL, what may be shown of it, both timeouts and `storage_options`.
    storage_options : mapping, optional
        What the fsspec filesystem is made with: credentials, ``endpoint_url``.
    connect_timeout_s, read_timeout_s : float
        How long to wait for a connection, and for an answer.
    ttl_s : float, optional
        Seconds after which an entry expires from when it was put last; Redis and Valkey only.

    Returns
    -------
    RemoteTier
        The tier.

    Raises
    ------
    ConfigError
        If the URL or a setting has no meaning, or a package is missing; the message names the extra to install.
    """
    location = shown_url(url)
    for name, value in (
        ("connect_timeout_s", connect_timeout_s),
        ("read_timeout_s", read_timeout_s),
        ("ttl_s", 1 if ttl_s is None else ttl_s),
    ):
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{name}={value!r} must be a positive number of seconds")
    scheme = url.partition(":")[0]
    limits, options = (connect_timeout_s, read_timeout_s), dict(storage_options or {})
    for entry in entry_points(group="cacheblend_rag.remotes", name=scheme):
        if ttl_s is not None:
            raise ConfigError(
                f"ttl_s={ttl_s}: the tier of {location} is another package's; leave it out, and set it there"
            )
        tier: RemoteTier = entry.load()(url, location, *limits, options)
        return tier
    if scheme in _REDIS:
        if options:
            raise ConfigError(f"storage_options are for fsspec filesystems; {location} is not one")
        with needs_extra("redis", location):
            try:
                return RedisTier(url.replace(scheme, _REDIS[scheme], 1), location, *limits, ttl_s)
            except (ValueError, TypeError):
                raise ConfigError(
                    f"{location} is not a Redis URL; give one like redis://user:password@host:6379/0"
                ) from None
    if ttl_s is not None:
        raise ConfigError(f"ttl_s={ttl_s}: files in {location} do not expire; give the bucket a lifecycle rule")
    with needs_extra("s3" if scheme.startswith("s3") else "fsspec", location):
        try:
            return FsspecTier(url, location, *limits, options)
        except ImportError:
            raise
        except Exception as error:
            # What a filesystem says of its options may quote them.
            raise ConfigError(
                f"fsspec cannot open {location} with the options {sorted(options)} ({type(error).__name__}); "
                "fsspec.available_protocols() lists what may come before ://"
            ) from None
