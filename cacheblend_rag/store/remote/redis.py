"""KV in Redis or Valkey.

Under the prefix ``cacheblend-rag:`` lie, for each store key::

    kv:KEY                   the manifest: format, version, size in bytes, size of the parts
    kv:KEY:VERSION:NUMBER    the chunk file's bytes, cut into parts
    staged:RANDOM:NUMBER     parts on their way in; they expire if their writer dies

The version is the chunk file's own digest, so that different bytes never share a name. A script on the server puts staged
parts in their place and writes the manifest, all at once; the parts of the version before expire a little later, for those
who still read.
"""

from __future__ import annotations

import errno
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError
from cacheblend_rag.store.chunkfile import EncodedChunk
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.remote.base import MAX_CHUNK_BYTES, Guard, RemoteSettings, cut, part_sizes

__all__ = ["RedisTier", "connected", "is_refusal"]

_PREFIX = "cacheblend-rag:"
_MANIFEST = re.compile(rb"cacheblend-rag remote 1 ([0-9a-f]{32}) ([0-9]{1,15}) ([0-9]{1,9})")
_HEAD_BYTES = 16 * 1024
_STAGED_S = 3600
# How long the parts of a version that was replaced can still be read.
_GRACE_MS = 60_000
_ATTEMPTS = 8
_MAX_PARTS = 10_000

# KEYS: the manifest, the staged parts, their places, the parts of the version before.
# ARGV: the manifest that was seen, the new one, milliseconds to live or 0, of grace, the number of parts, their sizes.
_COMMIT = """
local ttl, grace, count = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 'changed' end
for i = 1, count do
    if redis.call('STRLEN', KEYS[1 + i]) ~= tonumber(ARGV[5 + i]) then return 'lost' end
end
redis.call('SET', KEYS[1], ARGV[2])
for i = 2 + 2 * count, #KEYS do redis.call('PEXPIRE', KEYS[i], grace) end
for i = 1, count do
    redis.call('RENAME', KEYS[1 + i], KEYS[1 + count + i])
    if ttl > 0 then redis.call('PEXPIRE', KEYS[1 + count + i], ttl) else redis.call('PERSIST', KEYS[1 + count + i]) end
end
if ttl > 0 then redis.call('PEXPIRE', KEYS[1], ttl) end
return 'done'
"""
# KEYS: the manifest and its parts. ARGV: the manifest that was seen.
_DROP = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'changed' end
for i = 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 'done'
"""


class _Manifest(NamedTuple):
    digest: str
    nbytes: int
    part_bytes: int

    def packed(self) -> bytes:
        return f"cacheblend-rag remote 1 {self.digest} {self.nbytes} {self.part_bytes}".encode("ascii")

    def sizes(self) -> list[int]:
        return part_sizes(self.nbytes, self.part_bytes)

    def parts(self, key: str) -> list[str]:
        # The same bytes in parts of another size are another version.
        version = f"{self.digest}-{self.part_bytes}"
        return [f"{_PREFIX}kv:{key}:{version}:{number}" for number in range(len(self.sizes()))]


def connected(url: str, settings: RemoteSettings) -> redis.Redis:
    """Return a client of a server, which connects when it is first used."""
    # A connection that the server closed while it was idle is replaced at once. What timed out is not tried twice.
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    return redis.Redis.from_url(
        url, socket_connect_timeout=settings.connect_timeout_s, socket_timeout=settings.read_timeout_s, retry=retry
    )


def is_refusal(error: Exception) -> bool:
    """Return whether a server answered that it will not do what was asked."""
    # That it is still loading, or wants another password, counts as a failure to connect.
    return isinstance(error, (redis.ResponseError, redis.DataError))


class RedisTier:
    """A `RemoteTier` in one Redis or Valkey server."""

    def __init__(self, url: str, location: str, secret_words: list[str], settings: RemoteSettings) -> None:
        self.location = location
        self._settings = settings
        self._ttl_ms = int(settings.ttl_s * 1000) if settings.ttl_s else 0
        self._client: Any = connected(url, settings)
        self._guard = Guard(location, secret_words, settings, (redis.RedisError, OSError), is_refusal)

    def put(self, key: str, chunk: EncodedChunk) -> None:
        manifest = _Manifest(chunk.digest.hex(), chunk.nbytes, self._settings.part_bytes)
        name = _manifest_name(key)
        if _count(manifest) > _MAX_PARTS:
            raise StoreError(
                f"a chunk of {chunk.nbytes} bytes has more than {_MAX_PARTS} parts of {manifest.part_bytes} bytes; "
                "raise part_bytes"
            )
        with self._guard.calling("store a chunk"):
            if not self._renew(name, key, manifest):
                self._send(name, key, manifest, chunk)

    def open(self, key: str) -> _RedisSource | None:
        name = _manifest_name(key)
        with self._guard.calling("look a chunk up"):
            packed = self._client.get(name)
            if packed is None:
                return None
            manifest = _parse(key, packed)
            parts = manifest.parts(key)
            pipeline = self._client.pipeline(transaction=False)
            pipeline.getrange(parts[0], 0, _HEAD_BYTES - 1)
            for part in parts:
                pipeline.strlen(part)
            head, *sizes = pipeline.execute()
        if sizes != manifest.sizes():
            raise ChunkReadError(key, f"of its parts in {self.location} some were removed")
        return _RedisSource(self, parts, manifest, head)

    def holds(self, keys: Sequence[str]) -> list[bool]:
        names = [_manifest_name(key) for key in keys]
        with self._guard.calling("look chunks up"):
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(name)
            return [bool(count) for count in pipeline.execute()] if names else []

    def drop(self, keys: Iterable[str]) -> None:
        left = {key: _manifest_name(key) for key in keys}
        with self._guard.calling("remove chunks"):
            for _ in range(_ATTEMPTS):
                if not left:
                    return
                seen = self._client.mget(list(left.values()))
                pipeline = self._client.pipeline(transaction=False)
                held = [(key, packed) for key, packed in zip(left, seen, strict=True) if packed is not None]
                for key, packed in held:
                    pipeline.eval(_DROP, 1 + len(names := _parts_of(key, packed)), left[key], *names, packed)
                results = pipeline.execute()
                left = {key: left[key] for (key, _), result in zip(held, results, strict=True) if result == b"changed"}
            if left:
                raise RemoteUnavailableError(
                    f"remote tier {self.location}: a chunk is replaced as often as it is removed"
                )

    def close(self) -> None:
        self._guard.closed = True
        with suppress(redis.RedisError, OSError):
            self._client.close()

    def read_part(self, name: str, view: memoryview, begin: int) -> int:
        """Fill `view` with the bytes of one part from `begin` on; return how many there were."""
        with self._guard.calling("read a layer"):
            data = self._client.getrange(name, begin, begin + len(view) - 1)
        if not data:
            raise FileNotFoundError(errno.ENOENT, "they were removed, replaced or have expired")
        view[: len(data)] = data
        return len(data)

    def _renew(self, name: str, key: str, manifest: _Manifest) -> bool:
        """Return whether these very bytes are held whole; they then live as long as if they were written now."""
        if self._client.get(name) != manifest.packed():
            return False
        parts = manifest.parts(key)
        pipeline = self._client.pipeline(transaction=False)
        for part in parts:
            pipeline.strlen(part)
        if pipeline.execute() != manifest.sizes():
            return False
        if self._ttl_ms:
            pipeline = self._client.pipeline(transaction=True)
            for each in (*parts, name):
                pipeline.pexpire(each, self._ttl_ms)
            return all(pipeline.execute())
        return True

    def _send(self, name: str, key: str, manifest: _Manifest, chunk: EncodedChunk) -> None:
        sizes, parts = manifest.sizes(), manifest.parts(key)
        upload = f"{_PREFIX}staged:{secrets.token_hex(8)}"
        staged = [f"{upload}:{number}" for number in range(len(parts))]
        try:
            for each, part in zip(staged, cut(chunk.buffers, manifest.part_bytes), strict=True):
                self._client.set(each, part, ex=_STAGED_S)
            for _ in range(_ATTEMPTS):
                seen = self._client.get(name)
                before = _parts_of(key, seen or b"")
                names = [name, *staged, *parts, *(part for part in before if part not in parts)]
                arguments = [seen or b"", manifest.packed(), self._ttl_ms, _GRACE_MS, len(parts), *sizes]
                result = self._client.eval(_COMMIT, len(names), *names, *arguments)
                if result == b"done":
                    return
                # Another machine was faster, or the answer to this very commit was lost on its way.
                if self._renew(name, key, manifest):
                    self._client.unlink(*staged)
                    return
                if result == b"lost":
                    raise redis.exceptions.OutOfMemoryError("it evicted parts while they were written")
            raise redis.ResponseError("others replace the chunk all the time")
        except BaseException:
            with suppress(redis.RedisError, OSError):
                self._client.unlink(*staged)
            raise


class _RedisSource:
    """The bytes of one chunk in Redis."""

    tier = "redis"

    def __init__(self, tier: RedisTier, parts: list[str], manifest: _Manifest, head: bytes) -> None:
        self._tier = tier
        self._parts = parts
        self._part_bytes = manifest.part_bytes
        self._head = head
        self.size = manifest.nbytes

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` with the bytes from `offset` on; return how many there were, fewer only where the bytes end."""
        wanted = max(0, min(len(view), self.size - offset))
        if offset + wanted <= len(self._head):
            view[:wanted] = self._head[offset : offset + wanted]
            return wanted
        done = 0
        while done < wanted:
            number, begin = divmod(offset + done, self._part_bytes)
            count = min(wanted - done, self._part_bytes - begin)
            got = self._tier.read_part(self._parts[number], view[done : done + count], begin)
            done += got
            if got < count:
                break
        return done


def _manifest_name(key: str) -> str:
    return f"{_PREFIX}kv:{valid_key(key)}"


def _parse(key: str, packed: bytes) -> _Manifest:
    match = _MANIFEST.fullmatch(packed)
    if match:
        manifest = _Manifest(match[1].decode("ascii"), int(match[2]), int(match[3]))
        # The number of parts is bounded too: there is a name, and a question to the server, for each.
        if 0 < manifest.nbytes <= MAX_CHUNK_BYTES and manifest.part_bytes > 0 and _count(manifest) <= _MAX_PARTS:
            return manifest
    raise ChunkReadError(key, "its manifest in the remote tier is damaged or of another format")


def _count(manifest: _Manifest) -> int:
    return -(-manifest.nbytes // manifest.part_bytes)


def _parts_of(key: str, packed: bytes) -> list[str]:
    try:
        return _parse(key, packed).parts(key)
    except ChunkReadError:
        return []
