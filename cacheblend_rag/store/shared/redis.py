"""The names of all machines in Redis or Valkey.

Under the prefix ``cacheblend-rag:{names}:`` lie::

    birth      random digits, made with the first change: another value is another log
    position   how many changes there were
    units      a hash: the state of each unit, by its name
    log        a stream: for each change the names of the units that it changed, and random digits of its own: others at the same
               position are what came after an end that was lost; the oldest are dropped

What a document says stands in its unit alone, and goes with it. Scripts on the server make each change one step.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import redis

from cacheblend_rag.errors import RemoteUnavailableError
from cacheblend_rag.store.remote.base import Guard, RemoteSettings
from cacheblend_rag.store.remote.redis import connected, is_refusal
from cacheblend_rag.store.shared.log import Behind, Page

__all__ = ["RedisNameLog"]

_PREFIX = "cacheblend-rag:{names}:"
# Who has missed more changes than this reads all units anew.
_KEPT = 10_000
_UNITS_A_PAGE = 500

# What both scripts begin with: the log's birth and position, and the digits of the change at one.
_STATE = """
local birth = redis.call('GET', KEYS[1]) or ''
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local function digits(at)
    local entry = redis.call('XRANGE', KEYS[4], at .. '-0', at .. '-0')[1]
    return entry and entry[2][4] or ''
end
"""
# KEYS: birth, position, units, log. ARGV: the reader's birth, the digits of the change at its position, and the position.
_SINCE = f"""{_STATE}
local at = tonumber(ARGV[3])
local now = digits(last)
if birth ~= ARGV[1] or at > last then return {{birth, now, last, 1, 0}} end
local there = digits(at)
if there ~= '' and ARGV[2] ~= '' and there ~= ARGV[2] then return {{birth, now, last, 1, 0}} end
if at == last then return {{birth, now, last, 0, 1}} end
local entries = redis.call('XRANGE', KEYS[4], (at + 1) .. '-0', '+')
if #entries ~= last - at then return {{birth, now, last, 1, 1}} end
local seen, names, states = {{}}, {{}}, {{}}
for _, entry in ipairs(entries) do
    for _, name in ipairs(cjson.decode(entry[2][2])) do
        if not seen[name] then
            seen[name] = true
            names[#names + 1] = name
            states[#states + 1] = redis.call('HGET', KEYS[3], name)
        end
    end
end
return {{birth, now, last, 0, 1, names, states}}
"""
# KEYS: birth, position, units, log. ARGV: the writer's birth, the digits of the change at its position, the position, digits for
# this change and, where it is the first, for the birth, the changed names as JSON, how many changes are kept, how many units
# follow, then name and state of each, an empty state for none.
_CHANGE = f"""{_STATE}
if birth ~= ARGV[1] or last ~= tonumber(ARGV[3]) or digits(last) ~= ARGV[2] then return {{'behind', last, birth}} end
if birth == '' then
    birth = ARGV[4]
    redis.call('SET', KEYS[1], birth)
end
last = redis.call('INCR', KEYS[2])
for i = 1, tonumber(ARGV[7]) do
    local name, state = ARGV[6 + 2 * i], ARGV[7 + 2 * i]
    if state == '' then redis.call('HDEL', KEYS[3], name) else redis.call('HSET', KEYS[3], name, state) end
end
redis.call('XADD', KEYS[4], 'MAXLEN', '~', ARGV[6], last .. '-0', 'units', ARGV[5], 'digits', ARGV[4])
return {{'done', last, birth}}
"""


class RedisNameLog:
    """A `NameLog` in one Redis or Valkey server."""

    def __init__(self, url: str, location: str, secret_words: list[str], settings: RemoteSettings) -> None:
        self.location = location
        self._client: Any = connected(url, settings)
        self._guard = Guard(location, secret_words, settings, (redis.RedisError, OSError), is_refusal)
        self._keys = [_PREFIX + name for name in ("birth", "position", "units", "log")]

    def since(self, birth: str, position: int) -> Page:
        with self._guard.calling("say which names have changed"):
            found = self._client.eval(_SINCE, 4, *self._keys, *_parts(birth), position)
        now, digits, last, is_whole, continues, *units = found
        names, states = units or ([], [])
        changed = {name.decode(): state for name, state in zip(names, states, strict=True)}
        return Page(_whole(now, digits), last, changed, bool(is_whole), bool(continues))

    def units(self) -> Iterator[Mapping[str, bytes]]:
        cursor = 0
        while True:
            with self._guard.calling("list names"):
                cursor, found = self._client.hscan(self._keys[2], cursor, count=_UNITS_A_PAGE)
            if found:
                yield {name.decode(): state for name, state in found.items()}
            if not cursor:
                return

    def change(self, birth: str, position: int, units: Mapping[str, bytes | None]) -> tuple[str, int]:
        names = json.dumps(list(units), ensure_ascii=False)
        states = [part for name, state in units.items() for part in (name, state or b"")]
        digits = secrets.token_hex(8)
        arguments = [*_parts(birth), position, digits, names, _KEPT, len(units), *states]
        # Not by the guard, which takes a lock: this is called within a transaction, and right after `since`, which went by it.
        try:
            outcome, last, now = self._client.eval(_CHANGE, 4, *self._keys, *arguments)
        except (redis.RedisError, OSError) as error:
            raise RemoteUnavailableError(
                f"names at {self.location} could not be changed ({type(error).__name__}); whether they were is seen at the next "
                "look-up, so try again"
            ) from None
        if outcome != b"done":
            raise Behind
        return _whole(now, digits.encode()), int(last)

    def close(self) -> None:
        self._guard.closed = True
        with suppress(redis.RedisError, OSError):
            self._client.close()


def _whole(birth: bytes, digits: bytes) -> str:
    """Return the birth of a log, and the digits of its last change, as one word; the empty one where there is none."""
    return f"{birth.decode()}.{digits.decode()}" if birth else ""


def _parts(birth: str) -> tuple[str, str]:
    born, _, digits = birth.partition(".")
    return born, digits
