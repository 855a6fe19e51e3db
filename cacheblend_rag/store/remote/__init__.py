"""Remote tiers: KV under content keys in Redis, Valkey or any fsspec filesystem, shared by machines; what all of them have.

Names stay in each machine's own index. The bytes are those of a chunk file (`cacheblend_rag.store.chunkfile`), so that every
byte read from a remote tier is verified before it is used.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Protocol
from urllib.parse import urlsplit

from cacheblend_rag.errors import ConfigError, RemoteUnavailableError, StoreError, needs_extra
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk

__all__ = ["ByteSource", "EncodedChunk", "Guard", "RemoteSource", "RemoteTier", "open_remote"]

# Valkey speaks the same protocol.
_REDIS = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}


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
        tier: RemoteTier = entry.load()(url, location, *limits, options)
        return tier
    if scheme in _REDIS:
        if options:
            raise ConfigError(f"storage_options are for fsspec filesystems; {location} is not one")
        with needs_extra("redis", location):
            from cacheblend_rag.store.remote.redis import RedisTier
        try:
            return RedisTier(url.replace(scheme, _REDIS[scheme], 1), location, *limits, ttl_s)
        except (ValueError, TypeError):
            raise ConfigError(
                f"{location} is not a Redis URL; give one like redis://user:password@host:6379/0"
            ) from None
    if ttl_s is not None:
        raise ConfigError(f"ttl_s={ttl_s}: files in {location} do not expire; give the bucket a lifecycle rule")
    with needs_extra("s3" if scheme.startswith("s3") else "fsspec", location):
        from cacheblend_rag.store.remote.fsspec import FsspecTier

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
