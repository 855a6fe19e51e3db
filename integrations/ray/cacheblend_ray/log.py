"""The names of all machines in Redis or Valkey: the state of each document, and the order in which they changed.

Under the prefix ``cacheblend-rag:{names}:`` lie::

    birth      random digits, made with the first change: another value is another log
    position   how many changes there were
    units      a hash: the state of each unit, by its name
    log        a stream: for each change the names of the units that it changed, and random digits of its own: others at the same
               position are what came after an end that was lost; the oldest are dropped

What a chunk says stands in its unit, and in those of chunks that were read behind it; with the chunk it goes from all of these.
Scripts on the server make each change one step.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import redis

from cacheblend_rag.errors import ConfigError, StoreError, StoreFormatError
from cacheblend_rag.reading import Place
from cacheblend_rag.store.base import Later, NodeRecord
from cacheblend_rag.store.documents import NamedPiece
from cacheblend_rag.store.folder import valid_key
from cacheblend_rag.store.remote import Guard, redis_url, shown_url

__all__ = ["Behind", "NameLog", "Page", "Unit", "UnitName"]

_PREFIX = "cacheblend-rag:{names}:"
# Of a unit's state, which begins with it.
_VERSION = 2
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


@dataclass(frozen=True, slots=True)
class UnitName:
    """Name of a unit.

    Attributes
    ----------
    namespace : str
        Where its names are.
    document : str or None
        The document.
    id : str or None
        The chunk, where it is of no document.
    """

    namespace: str
    document: str | None = None
    id: str | None = None

    def packed(self) -> str:
        """Return it as a text."""
        return json.dumps([self.namespace, self.document, self.id], ensure_ascii=False)

    @classmethod
    def unpacked(cls, text: str) -> UnitName:
        """Return what `packed` made a text of."""
        try:
            namespace, document, id = json.loads(text)
        except ValueError as error:
            raise StoreError(f"the shared ids contain {text[:80]!r}, which cacheblend-rag did not write") from error
        return cls(namespace, document, id)


@dataclass(frozen=True, slots=True)
class Unit:
    """A document, or a chunk of none, as it is now.

    Attributes
    ----------
    name : UnitName
        Which.
    tenant : str
        Whose it is.
    pieces : sequence of NamedPiece
        Its chunks, in the order in which they came; none where it is no more.
    """

    name: UnitName
    tenant: str = ""
    pieces: Sequence[NamedPiece] = ()

    @property
    def reaches_out(self) -> bool:
        """Whether a chunk of it was read behind one that is not."""
        own = {piece.record.id for piece in self.pieces}
        laters = (piece.record.later for piece in self.pieces)
        return any(id not in own for later in laters if later is not None for id, _ in later.seen)

    def without(self, ids: Set[str]) -> Unit:
        """Return it with nothing that was read behind these chunks."""
        pieces = [
            piece._replace(record=replace(piece.record, later=None))
            if piece.record.later is not None and not ids.isdisjoint(id for id, _ in piece.record.later.seen)
            else piece
            for piece in self.pieces
        ]
        return replace(self, pieces=pieces)

    def packed(self) -> bytes | None:
        """Return it as bytes, None where it has no chunks."""
        if not self.pieces:
            return None
        state = [_VERSION, self.tenant, [_row(piece) for piece in self.pieces]]
        return json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def unpacked(cls, name: UnitName, state: bytes | None) -> Unit:
        """Return what `packed` made bytes of.

        Raises
        ------
        StoreFormatError
            If another version of cacheblend-rag made them.
        StoreError
            If these are other bytes.
        """
        if state is None:
            return cls(name)
        what = name.document or name.id
        try:
            version, *rest = json.loads(state)
            if version != _VERSION:
                raise StoreFormatError(
                    f"the shared entry of {what!r:.80} is not in format version {_VERSION}, which this cacheblend-rag reads; "
                    f"delete the server's keys that begin with {_PREFIX}, and warm a new folder, or use the version that wrote it"
                )
            tenant, rows = rest
            return cls(name, tenant, [_piece(*row) for row in rows])
        except (ValueError, TypeError) as error:
            raise StoreError(
                f"the shared entry of {what!r:.80} cannot be read ({error}); add it again, or delete it"
            ) from error


class Behind(Exception):
    """Others have changed names since the position that a change was made at: it is to be made again on what they left."""


@dataclass(frozen=True, slots=True)
class Page:
    """Changes since a position.

    Attributes
    ----------
    birth : str
        Which log it is, and which change is at `position`: one that was lost and begun anew, or has lost its end and grown again,
        has another.
    position : int
        Up to where the page goes; 0 before the first change.
    changed : Mapping
        What each unit that has changed is now, by its name; None where it is no more.
    is_whole : bool
        Whether the position asked for was of another log or too long ago: what is not among `changed` may be no more.
    continues : bool
        Whether nothing that the log had at the position asked for is lost, as far as it still knows.
    """

    birth: str
    position: int
    changed: Mapping[str, bytes | None] = field(default_factory=dict)
    is_whole: bool = True
    continues: bool = False


class NameLog:
    """Units (documents, and chunks of none), each of which changes as a whole; a change of several is one step for all readers.

    Nothing is connected to before it is used. Every method raises `RemoteUnavailableError` where the server is out of reach.

    Parameters
    ----------
    url : str
        As of a remote tier: ``redis://user:password@host:6379/0``. The server should keep what it acknowledges (``appendonly
        yes``, ``appendfsync always``) and evict nothing (``maxmemory-policy noeviction``), so it is best another than the one
        that has the KV.

    Raises
    ------
    ConfigError
        If it is no URL of Redis.
    """

    def __init__(self, url: str) -> None:
        server, self.location = redis_url(url), shown_url(url)
        if server is None:
            raise ConfigError(
                f"ids are shared through Redis or Valkey, but {self.location} is neither; give redis://host:port/db"
            )
        self._client: Any = redis.Redis.from_url(server, socket_connect_timeout=1.0, socket_timeout=5.0)
        self._guard = Guard(self.location, (redis.RedisError, OSError))
        self._keys = [_PREFIX + name for name in ("birth", "position", "units", "log")]

    def since(self, birth: str, position: int) -> Page:
        """Return what changed since a position, with the states of one moment; a page that is not whole has no units."""
        with self._guard.calling("say which names have changed"):
            found = self._client.eval(_SINCE, 4, *self._keys, *_parts(birth), position)
        now, digits, last, is_whole, continues, *units = found
        names, states = units or ([], [])
        changed = {name.decode(): state for name, state in zip(names, states, strict=True)}
        return Page(_whole(now, digits), last, changed, bool(is_whole), bool(continues))

    def units(self) -> Iterator[Mapping[str, bytes]]:
        """Yield all units, some at a time; what changes meanwhile may be found in either state, or not at all."""
        cursor = 0
        while True:
            with self._guard.calling("list names"):
                cursor, found = self._client.hscan(self._keys[2], cursor, count=_UNITS_A_PAGE)
            if found:
                yield {name.decode(): state for name, state in found.items()}
            if not cursor:
                return

    def has(self, units: Sequence[str]) -> list[bool]:
        """Return of each of some names whether there is such a unit."""
        with self._guard.calling("look for names"):
            return [state is not None for state in self._client.hmget(self._keys[2], units)] if units else []

    def change(self, birth: str, position: int, units: Mapping[str, bytes | None]) -> tuple[str, int]:
        """Give units their states, None for none, and return the log's birth and the position after that.

        Raises
        ------
        Behind
            If something has changed since `position`.
        """
        names = json.dumps(list(units), ensure_ascii=False)
        states = [part for name, state in units.items() for part in (name, state or b"")]
        digits = secrets.token_hex(8)
        arguments = [*_parts(birth), position, digits, names, _KEPT, len(units), *states]
        # Whether a change whose answer is lost was made is seen at the next look-up.
        with self._guard.calling("change names"):
            outcome, last, now = self._client.eval(_CHANGE, 4, *self._keys, *arguments)
        if outcome != b"done":
            raise Behind
        return _whole(now, digits.encode()), int(last)

    def close(self) -> None:
        """Release connections."""
        self._guard.closed = True
        with suppress(redis.RedisError, OSError):
            self._client.close()


def _row(piece: NamedPiece) -> list[Any]:
    record, expires_at = piece
    place = None if record.place is None else astuple(record.place)
    tokens = record.token_ids, record.separator
    later = None if record.later is None else astuple(record.later)
    return [record.id, record.key, record.text_hash, *tokens, place, record.source, record.indexed, later, expires_at]


def _piece(
    id: str,
    key: str,
    text_hash: str,
    token_ids: list[int],
    separator: list[int],
    place: list[Any] | None,
    source: str | None,
    indexed: bool,
    later: tuple[str, list[int], list[tuple[str, str]]] | None,
    expires_at: float | None,
) -> NamedPiece:
    """Return the chunk that `_row` made a row of; its keys are such, since files are called by them."""
    stands = None if place is None else Place(*(*place[:-1], tuple(place[-1])))
    tokens, origin = (tuple(token_ids), tuple(separator)), (source, indexed)
    return NamedPiece(NodeRecord(id, valid_key(key), text_hash, *tokens, stands, *origin, _later(later)), expires_at)


def _later(row: tuple[str, list[int], list[tuple[str, str]]] | None) -> Later | None:
    if row is None:
        return None
    key, behind, seen = row
    return Later(valid_key(key), tuple(behind), tuple((str(id), str(its)) for id, its in seen))


def _whole(birth: bytes, digits: bytes) -> str:
    """Return the birth of a log, and the digits of its last change, as one word; the empty one where there is none."""
    return f"{birth.decode()}.{digits.decode()}" if birth else ""


def _parts(birth: str) -> tuple[str, str]:
    born, _, digits = birth.partition(".")
    return born, digits
