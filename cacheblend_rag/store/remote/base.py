"""What a remote tier does, its settings, and what stands between it and its failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Protocol

from cacheblend_rag.errors import ConfigError, RemoteUnavailableError, StoreError
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk

__all__ = ["MAX_CHUNK_BYTES", "Guard", "RemoteSettings", "RemoteTier", "cut", "part_sizes"]

# What is read from a shared server is not trusted before its checksums are: more than this is never allocated for it.
MAX_CHUNK_BYTES = 2**40
# Redis keeps at most 512 MB in one value.
_MAX_PART_BYTES = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """How a remote tier is written and waited for.

    Attributes
    ----------
    ttl_s : float, optional
        After how many seconds from its last `put` an entry expires; never by default. Redis and Valkey only.
    part_bytes : int
        Most bytes written at once, which is also what writing takes of memory: Redis keeps a chunk in values of this size, object
        stores are sent it in parts of this size (5 MiB at least).
    connect_timeout_s : float
        How long to wait for a connection.
    read_timeout_s : float
        How long to wait for an answer.
    back_off_s, max_back_off_s : float
        How long a remote tier that failed is left alone: first, and at most; the wait doubles with every failure in a row. Calls
        in that time fail at once.

    Raises
    ------
    ConfigError
        If a value has no meaning.
    """

    ttl_s: float | None = None
    part_bytes: int = 16 * 1024 * 1024
    connect_timeout_s: float = 1.0
    read_timeout_s: float = 5.0
    back_off_s: float = 1.0
    max_back_off_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (field.name == "ttl_s" and value is None):
                _check_seconds(field.name, value)
        if isinstance(self.part_bytes, bool) or not isinstance(self.part_bytes, int):
            raise ConfigError(f"part_bytes={self.part_bytes!r} must be a whole number of bytes")
        if not 1 <= self.part_bytes <= _MAX_PART_BYTES:
            raise ConfigError(f"part_bytes={self.part_bytes} must be from 1 to {_MAX_PART_BYTES}")
        if self.max_back_off_s < self.back_off_s:
            raise ConfigError(f"max_back_off_s={self.max_back_off_s} must not be below back_off_s={self.back_off_s}")


class RemoteTier(Protocol):
    """KV under content keys, held outside this machine. All methods may be called from any thread.

    Every method raises `RemoteUnavailableError` where the remote tier is down, slow, full or closed, and StoreError for a key
    that is none. After a failure the tier is left alone for a while, and calls fail at once. What is found to be damaged is to be
    dropped before it is put again: whether it is whole is judged by its size.
    """

    @property
    def location(self) -> str:
        """Where it is, without credentials."""

    def put(self, key: str, chunk: EncodedChunk) -> None:
        """Keep a chunk under `key`: others see all of it or nothing. Bytes that are held whole already are not sent again."""

    def open(self, key: str) -> ByteSource | None:
        """Return the bytes under `key` for `ChunkFile` to read and verify, or None if they are not held.

        Other bytes put under `key` later do not mix with those of the source: it reads the old ones, or fails.

        Raises
        ------
        ChunkReadError
            If it can be seen already that bytes are missing.
        """

    def holds(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether something is held under it; it may still turn out damaged when it is read."""

    def drop(self, keys: Iterable[str]) -> None:
        """Remove what is held under the keys, for all machines."""

    def close(self) -> None:
        """Release connections; sources fail from now on. Closing twice does nothing."""


def part_sizes(nbytes: int, part_bytes: int) -> list[int]:
    """Return the sizes of the parts that `nbytes` bytes are cut into: all of `part_bytes` but the last."""
    return [min(part_bytes, nbytes - begin) for begin in range(0, nbytes, part_bytes)]


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


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} must be a number of seconds")
    # A millisecond is the least that Redis counts.
    if not math.isfinite(value) or not 0.001 <= value <= 10**10:
        raise ConfigError(f"{name}={value!r} must be from 0.001 to 10**10 seconds")


class Guard:
    """Runs the calls of a remote tier and turns what they raise into `RemoteUnavailableError`, which shows no `secrets`.

    What fails is left alone for a while, twice as long after every failure in a row: calls fail at once until then. One that is
    refused (no room, no permission) was answered, and keeps no other waiting.
    """

    def __init__(
        self,
        location: str,
        secrets: list[str],
        settings: RemoteSettings,
        caught: tuple[type[Exception], ...],
        is_refusal: Callable[[Exception], bool],
    ) -> None:
        self.location = location
        # The longest first: one may be part of another.
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self._caught = caught
        self._is_refusal = is_refusal
        self._settings = settings
        self._wait_s = self._retry_at = 0.0
        self._reason = ""
        self.closed = False

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """Run calls to the remote tier; `what` they do is for the message."""
        if self.closed:
            raise RemoteUnavailableError(f"remote tier {self.location} is closed; open it again")
        left_s = self._retry_at - time.monotonic()
        if left_s > 0:
            raise RemoteUnavailableError(f"{self._reason}; it is left alone for {left_s:.1f} s more")
        try:
            yield
        except StoreError:
            self._wait_s = 0.0
            raise
        except self._caught as error:
            reason, cause = self._told(what, error)
            if self._is_refusal(error):
                self._wait_s = 0.0
            else:
                self._wait_s = min(self._wait_s * 2 or self._settings.back_off_s, self._settings.max_back_off_s)
                self._reason, self._retry_at = reason, time.monotonic() + self._wait_s
            raise RemoteUnavailableError(reason) from cause
        self._wait_s = 0.0

    def _told(self, what: str, error: Exception) -> tuple[str, Exception | None]:
        text = " ".join(str(error).split())[:300] or "no reason given"
        shown = text
        for secret in self._secrets:
            shown = shown.replace(secret, "***")
        # A cause is printed with its own message, and with that of its own cause; it is left out where they may tell a secret.
        causes: list[str] = []
        each = error.__cause__ or error.__context__
        while each is not None and len(causes) < 10:
            causes.append(str(each))
            each = each.__cause__ or each.__context__
        silent = any(secret in told for told in [str(error), *causes] for secret in self._secrets)
        return (
            f"remote tier {self.location} could not {what}: {type(error).__name__}: {shown}",
            None if silent else error,
        )
