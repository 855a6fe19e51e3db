"""Remote tiers: KV under content keys in Redis, Valkey or any fsspec filesystem, shared by machines; what all of them have.

Names stay in each machine's own index. The bytes are those of a chunk file (`cacheblend_rag.store.chunkfile`), so that every
byte read from a remote tier is verified before it is used.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from cacheblend_rag.errors import ConfigError, RemoteUnavailableError, StoreError
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk

__all__ = [
    "ByteSource",
    "EncodedChunk",
    "Guard",
    "RemoteSettings",
    "RemoteSource",
    "RemoteTier",
    "cut",
    "missing_package",
    "redis_address",
    "secrets_in",
    "shown_url",
    "split_url",
]

# Valkey speaks the same protocol.
_REDIS = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
_REDIS_QUERY = {
    "db",
    "client_name",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
}
_SECRET_WORDS = ("secret", "token", "password", "credential", "key", "sas", "connection_string", "passphrase")


_MAX_PART_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How a remote tier is written and waited for."""

    # Seconds from its last `put` after which an entry expires; Redis and Valkey only.
    ttl_s: float | None = None
    # Most bytes sent at once, which is also what writing takes of memory; object stores take 5 MiB at least.
    part_bytes: int = 16 * 1024 * 1024
    connect_timeout_s: float = 1.0
    # How long to wait for an answer.
    read_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not field.name.endswith("_s") or (field.name == "ttl_s" and value is None):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"{field.name}={value!r} must be a number of seconds")
            # A millisecond is the least that Redis counts.
            if not math.isfinite(value) or not 0.001 <= value <= 10**10:
                raise ConfigError(f"{field.name}={value!r} must be from 0.001 to 10**10 seconds")
        if isinstance(self.part_bytes, bool) or not isinstance(self.part_bytes, int):
            raise ConfigError(f"part_bytes={self.part_bytes!r} must be a whole number of bytes")
        if not 1 <= self.part_bytes <= _MAX_PART_BYTES:
            raise ConfigError(f"part_bytes={self.part_bytes} must be from 1 to {_MAX_PART_BYTES}")


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


def cut(buffers: Iterable[memoryview], part_bytes: int) -> Iterator[memoryview]:
    """Yield the buffers' bytes in parts of `part_bytes`, the last one smaller; only what lies across buffers is copied."""
    pending = bytearray()
    for buffer in buffers:
        view = buffer.cast("B")
        begin = 0
        while begin < view.nbytes:
            piece = view[begin : begin + part_bytes - len(pending)]
            begin += piece.nbytes
            if piece.nbytes == part_bytes:
                yield piece
                continue
            pending += piece
            if len(pending) == part_bytes:
                yield memoryview(pending)
                pending = bytearray()
    if pending:
        yield memoryview(pending)


class Guard:
    """Runs the calls of a remote tier and turns what they raise into `RemoteUnavailableError`, which shows no `secrets`."""

    def __init__(self, location: str, secrets: list[str], caught: tuple[type[Exception], ...]) -> None:
        self.location = location
        # The longest first: one may be part of another.
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
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
            shown = " ".join(str(error).split())[:300] or "no reason given"
            for secret in self._secrets:
                shown = shown.replace(secret, "***")
            raise RemoteUnavailableError(
                f"remote tier {self.location} could not {what}: {type(error).__name__}: {shown}"
            ) from (None if self._tells_secrets(error) else error)

    def _tells_secrets(self, error: Exception) -> bool:
        """Return whether a secret is in what is printed of an error: its message, and those of its causes."""
        told: list[str] = []
        each: BaseException | None = error
        while each is not None and len(told) < 10:
            told.append(str(each))
            each = each.__cause__ or each.__context__
        return any(secret in text for text in told for secret in self._secrets)


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


def redis_address(url: str) -> tuple[str, str, list[str]] | None:
    """Return the address that redis-py takes, the one that may be shown, and the secrets in the first; None for no Redis."""
    parts, location = split_url(url), shown_url(url)
    if parts.scheme not in _REDIS:
        return None
    unknown = sorted({name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} - _REDIS_QUERY)
    if unknown:
        raise ConfigError(
            f"{location}: unknown parameters {', '.join(unknown)}; a Redis URL takes {', '.join(sorted(_REDIS_QUERY))}"
        )
    try:
        import redis  # noqa: F401
    except ImportError as error:
        raise missing_package("redis", location, error) from error
    return _REDIS[parts.scheme] + url[url.index(":") :], location, secrets_in(parts, {})


def secrets_in(parts: SplitResult, options: Mapping[str, Any]) -> list[str]:
    """Return the secrets in a URL, both as they are written there and as they are meant, and in the options beside it."""
    words = [
        word for part in (parts.password, parts.netloc.rpartition("@")[0]) if part for word in (part, unquote(part))
    ]
    words += [value for name, value in parse_qsl(parts.query) if _is_secret(name)]
    return [*words, *_secrets_of(options)]


def shown_url(url: str) -> str:
    """Return a URL without user, password and query."""
    parts = split_url(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL; ConfigError if it is none."""
    try:
        parts = urlsplit(url)
        # Looked at here, because it is only now that a bad port is found.
        _ = parts.port if parts.scheme in _REDIS else None
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    # A password with one of /?# in it ends the address too early, and its rest would be taken for a path and shown.
    is_redis = parts.scheme in _REDIS
    if (
        not parts.scheme
        or "://" not in url
        or (is_redis and (not parts.netloc or "@" in url.partition(parts.netloc)[2]))
    ):
        raise ConfigError(
            "the remote tier's address is not a URL; give one like redis://host:6379/0 or s3://bucket/prefix, "
            "with /, ?, #, @ and : in a password written as %2F, %3F, %23, %40 and %3A"
        )
    return parts


def _is_secret(name: str) -> bool:
    return any(word in name.lower() for word in _SECRET_WORDS)


def _secrets_of(options: Mapping[str, Any], all_of_it: bool = False) -> Iterator[str]:
    for name, value in options.items():
        secret = all_of_it or _is_secret(str(name))
        if isinstance(value, Mapping):
            yield from _secrets_of(value, secret)
        elif secret and isinstance(value, str):
            yield value


def missing_package(extra: str, location: str, error: ImportError) -> ConfigError:
    """Return the error that says which extra to install."""
    return ConfigError(
        f"{location} needs a package that is not installed ({error}): pip install 'cacheblend-rag[{extra}]'"
        + (" and the package that fsspec asks for" if extra == "fsspec" else "")
    )
