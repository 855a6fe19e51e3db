"""KV in Redis or Valkey: the bytes of chunk files under ``cacheblend-rag:chunk:KEY``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.chunkfile import ByteSource, EncodedChunk
from cacheblend_rag.store.index import valid_key
from cacheblend_rag.store.remote import Guard, RemoteSource

__all__ = ["RedisTier"]

_HEAD_BYTES = 16 * 1024
_MOST_BYTES = 512 * 1024**2
_KEYS_AT_ONCE = 1000


class RedisTier:
    """A `RemoteTier` in one Redis or Valkey server."""

    def __init__(
        self, url: str, location: str, connect_timeout_s: float, read_timeout_s: float, ttl_s: float | None
    ) -> None:
        self.location = location
        self._ttl_ms = None if ttl_s is None else max(1, int(ttl_s * 1000))
        # A connection that the server closed while it was idle is replaced at once. What timed out is not tried twice.
        retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
        self._client: Any = redis.Redis.from_url(
            url, socket_connect_timeout=connect_timeout_s, socket_timeout=read_timeout_s, retry=retry
        )
        self._guard = Guard(location, (redis.RedisError, OSError))

    def put(self, key: str, chunk: EncodedChunk) -> None:
        name = _name(key)
        if chunk.nbytes > _MOST_BYTES:
            raise StoreError(f"a chunk of {chunk.nbytes} bytes exceeds the {_MOST_BYTES} that Redis keeps in one value")
        with self._guard.calling("store a chunk"):
            if self._head(name, len(chunk.head)) != (chunk.head, chunk.nbytes):
                self._client.set(name, b"".join(chunk.buffers), px=self._ttl_ms)
            elif self._ttl_ms is not None:
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


def _name(key: str) -> str:
    return f"cacheblend-rag:chunk:{valid_key(key)}"
