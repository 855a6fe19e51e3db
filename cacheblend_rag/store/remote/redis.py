"""KV in Redis or Valkey.

Under the prefix ``cacheblend-rag:`` lie::

    chunk:KEY        the bytes of a chunk file
    staged:RANDOM    bytes on their way in; they expire if their writer dies
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.remote import Guard, RemoteSettings, RemoteSource, cut

__all__ = ["RedisTier", "connected"]

_PREFIX = "cacheblend-rag:"
_HEAD_BYTES = 16 * 1024
_STAGED_MS = 3_600_000
_MOST_BYTES = 512 * 1024**2
_KEYS_AT_ONCE = 1000


def connected(url: str, settings: RemoteSettings) -> redis.Redis:
    """Return a client of a server, which connects when it is first used."""
    # A connection that the server closed while it was idle is replaced at once. What timed out is not tried twice.
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(
        url, socket_connect_timeout=settings.connect_timeout_s, socket_timeout=settings.read_timeout_s, retry=retry
    )


class RedisTier:
    """A `RemoteTier` in one Redis or Valkey server."""

    def __init__(self, url: str, location: str, secret_words: list[str], settings: RemoteSettings) -> None:
        self.location = location
        self._part_bytes = settings.part_bytes
        self._ttl_ms = int(settings.ttl_s * 1000) if settings.ttl_s else 0
        self._client: Any = connected(url, settings)
        self._guard = Guard(location, secret_words, (redis.RedisError, OSError))

    def put(self, key: str, chunk: EncodedChunk) -> None:
        name = _name(key)
        if chunk.nbytes > _MOST_BYTES:
            raise StoreError(f"a chunk of {chunk.nbytes} bytes exceeds the {_MOST_BYTES} that Redis keeps in one value")
        with self._guard.calling("store a chunk"):
            if self._head(name, len(chunk.head)) != (chunk.head, chunk.nbytes):
                self._send(name, chunk)
            elif self._ttl_ms:
                self._client.pexpire(name, self._ttl_ms)

    def open(self, key: str) -> ByteSource | None:
        name = _name(key)
        with self._guard.calling("look a chunk up"):
            head, size = self._head(name, _HEAD_BYTES)

        def read(begin: int, end: int) -> Any:
            return self._client.getrange(name, begin, end - 1)

        return RemoteSource(self._guard, "redis", size, read, head) if size else None

    def holds(self, keys: Sequence[str]) -> list[bool]:
        names = [_name(key) for key in keys]
        with self._guard.calling("look chunks up"):
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(name)
            return [bool(count) for count in pipeline.execute()] if names else []

    def drop(self, keys: Iterable[str]) -> None:
        names = [_name(key) for key in keys]
        with self._guard.calling("remove chunks"):
            for start in range(0, len(names), _KEYS_AT_ONCE):
                self._client.unlink(*names[start : start + _KEYS_AT_ONCE])

    def close(self) -> None:
        self._guard.closed = True
        with suppress(redis.RedisError, OSError):
            self._client.close()

    def _head(self, name: str, nbytes: int) -> tuple[bytes, int]:
        pipeline = self._client.pipeline(transaction=False)
        pipeline.getrange(name, 0, nbytes - 1)
        pipeline.strlen(name)
        head, size = pipeline.execute()
        return head, size

    def _send(self, name: str, chunk: EncodedChunk) -> None:
        """Write a chunk in parts under another name, so that each is sent within the time limit, and give it its own then."""
        staged, sent = f"{_PREFIX}staged:{secrets.token_hex(8)}", 0
        try:
            for part in cut(chunk.buffers, self._part_bytes):
                sent += len(part)
                pipeline = self._client.pipeline(transaction=False)
                pipeline.append(staged, part)
                pipeline.pexpire(staged, _STAGED_MS)
                if pipeline.execute()[0] != sent:
                    raise redis.ResponseError("it evicted a chunk while that was written")
            pipeline = self._client.pipeline(transaction=True)
            pipeline.rename(staged, name)
            if self._ttl_ms:
                pipeline.pexpire(name, self._ttl_ms)
            else:
                pipeline.persist(name)
            pipeline.execute()
        except BaseException:
            with suppress(redis.RedisError, OSError):
                self._client.unlink(staged)
            raise


def _name(key: str) -> str:
    return f"{_PREFIX}chunk:{valid_key(key)}"
