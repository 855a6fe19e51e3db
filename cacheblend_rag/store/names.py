"""The names by which chunks are looked up, and the documents that they are pieces of."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from cacheblend_rag.chunk import chunk_key, context_digest
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store.chunkfile import pack_tokens, unpack_tokens
from cacheblend_rag.store.index import Index, drop_entries, owner_of

__all__ = [
    "MOST_UNPLACED",
    "Later",
    "NameChanges",
    "Names",
    "NamesSource",
    "NodeRecord",
    "drop_nameless",
    "kv_of",
    "look_up",
    "members_of",
    "remove_names",
    "write_laters",
    "write_names",
]

Result = TypeVar("Result")

MOST_UNPLACED = 1000
"""Of more chunks of one document, none of which says where it begins, none is read behind another: they are a table's rows."""
# That many names are asked for in one query; SQLite takes 999 values in one.
_AT_ONCE = 200
# Behind all characters that names are written with.
_LAST = "\U0010ffff"
_COLUMNS = "seq, id, key, text_hash, token_ids, separator, document, start, length, ends, later, behind"
_READING_ORDER = "ORDER BY start IS NULL, start, seq"


@dataclass(frozen=True, slots=True)
class Later:
    """The KV of a chunk that stands behind another one in a prompt: its key, and what it is read behind, beside the preamble."""

    key: str
    behind: tuple[int, ...]
    # The ids and keys of the chunks whose text is among that: with any of them the KV goes.
    seen: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the store knows of a named chunk, whether or not its KV is held at the moment."""

    id: str
    # Of its KV right behind the preamble, which serves the first chunk of a prompt.
    key: str
    # `cacheblend_rag.chunk.text_hash` of its text.
    text_hash: str
    token_ids: tuple[int, ...]
    # Tokens after them of which there is KV too.
    separator: tuple[int, ...] = ()
    # The document that it is a piece of, and where its body begins there, in characters; None where that is not known.
    document: str | None = None
    start: int | None = None
    # Characters of its body, and for each of its tokens how many of them have ended with it; only with a `start`.
    length: int = 0
    ends: tuple[int, ...] = field(default=(), compare=False)
    # Of its KV behind another chunk; None where that is still to be chosen, or is the same.
    later: Later | None = field(default=None, compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all of its KV."""
        return (self.key,) if self.later is None else (self.key, self.later.key)


@dataclass(frozen=True, slots=True)
class NameChanges:
    """What became of the names of a namespace since an earlier call; `mark` is what to ask with the next time."""

    mark: int
    # Whether these are all names, rather than those that changed.
    whole: bool
    # The number of each, which it keeps, its id, and the digest of its text; the number alone where it is gone.
    names: list[tuple[int, str | None, str | None]]


class Names:
    """The names in an index; each method is one transaction, and says which KV is to be dropped with what it changes."""

    is_shared = False
    """Whether machines share them, so that the index has a copy; such a subclass has these three methods, and `_telling`."""

    def __init__(self, index: Index) -> None:
        self._database, self._rows = index, index.rows

    def catch_up(self) -> None:
        """Bring the index up to date, or raise `RemoteUnavailableError`; called before each look-up."""

    def change(self, deed: Callable[[], Result]) -> Result:
        """Return what `deed` returns, which records or removes names in a transaction; again if others were quicker."""
        return deed()

    def close(self) -> None:
        """Release connections."""

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        with self._database.read() as connection:
            return look_up(connection, namespace, ids)

    def ids(self, namespace: str, within: str | None = None) -> list[str]:
        """Return the ids of a namespace as they were recorded: all, or those in documents whose names begin so."""
        query, values = "SELECT id FROM nodes WHERE namespace = ?", [namespace]
        if within is not None:
            query, values = f"{query} AND document >= ? AND document < ?", [namespace, within, within + _LAST]
        return [id for (id,) in self._rows(f"{query} ORDER BY seq", *values)]

    def beginning(self, namespace: str, prefix: str) -> list[str]:
        """Return the ids that begin with a prefix."""
        query = "SELECT id FROM nodes WHERE namespace = ? AND id >= ? AND id < ? ORDER BY seq"
        return [id for (id,) in self._rows(query, namespace, prefix, prefix + _LAST)]

    def page(self, namespace: str, after: str, limit: int, passed_over: str) -> list[tuple[str, str | None]]:
        """Return the first ids behind `after` without those that begin with `passed_over`, and the document of each."""
        query = "SELECT id, document FROM nodes WHERE namespace = ? AND id > ? AND substr(id, 1, ?) != ? ORDER BY id LIMIT ?"
        return self._rows(query, namespace, after, len(passed_over), passed_over, limit)

    def documents(self, namespace: str, after: str, limit: int) -> list[str]:
        """Return the first documents behind `after`, in the order of their names."""
        query = "SELECT DISTINCT document FROM nodes WHERE namespace = ? AND document > ? ORDER BY document LIMIT ?"
        return [name for (name,) in self._rows(query, namespace, after, limit)]

    def document(self, namespace: str, document: str) -> list[str]:
        """Return the ids of a document in reading order."""
        query = f"SELECT id FROM nodes WHERE namespace = ? AND document = ? {_READING_ORDER}"
        return [id for (id,) in self._rows(query, namespace, document)]

    def members(self, namespace: str, document: str) -> list[NodeRecord]:
        """Return the chunks of a document in reading order; none of a table's rows (`MOST_UNPLACED`)."""
        query = "SELECT count(*), count(start) FROM nodes WHERE namespace = ? AND document = ?"
        [(count, placed)] = self._rows(query, namespace, document)
        if count > MOST_UNPLACED and not placed:
            return []
        with self._database.read() as connection:
            return members_of(connection, namespace, document)

    def namespaces(self, tenant: str | None = None) -> list[str]:
        """Return all namespaces that have ids, or those of one tenant."""
        query = (
            "SELECT DISTINCT namespace FROM nodes LEFT JOIN namespaces USING (namespace) "
            "WHERE ?1 IS NULL OR ifnull(tenant, '') = ?1"
        )
        return [namespace for (namespace,) in self._rows(query, tenant)]

    def changes(self, namespace: str, since: int | None = None) -> NameChanges:
        """Return the names that changed since the call whose `mark` is given; by default, and if that was long ago, all names."""
        with self._database.read() as connection:
            first, last = connection.execute("SELECT min(seq), max(seq) FROM changes").fetchone()
            mark = last or 0
            if since is not None and (since == mark or (first is not None and first <= since + 1 <= mark)):
                query = (
                    "SELECT DISTINCT node, id, text_hash FROM changes LEFT JOIN nodes ON nodes.seq = node AND namespace = ? "
                    "WHERE changes.seq > ?"
                )
                names = connection.execute(query, (namespace, since)).fetchall()
                return NameChanges(mark, False, names)
            query = "SELECT seq, id, text_hash FROM nodes WHERE namespace = ? ORDER BY seq"
            return NameChanges(mark, True, connection.execute(query, (namespace,)).fetchall())

    def leading_to(self, key: str) -> str | None:
        """Return the tenant whose names lead to `key`, empty for none's; None if no name does."""
        with self._database.read() as connection:
            return owner_of(connection, key)

    def record(
        self, namespace: str, records: Sequence[NodeRecord], tenant: str = "", whole: bool = False
    ) -> tuple[list[NodeRecord], set[str], set[str], list[str]]:
        """Record names, all that their documents have if `whole`.

        Return the records as they are by now, the ids that were not recorded so, those that are removed, and what KV was dropped.
        """
        by_id = {record.id: record for record in records}
        with self._database.read() as connection:
            known, new, others = _changes(connection, namespace, by_id, whole)
        if not new and not others:
            # A store that can only be read may have all of it.
            return list(known.values()), set(), set(), []
        with self._database.write() as connection:
            known, new, others = _changes(connection, namespace, by_id, whole)
            with self._telling(connection, namespace, [*by_id, *others]):
                keys, _ = kv_of(connection, namespace, [*(each.id for each in new), *others])
                # What has moved has not been there for those that have seen it, and comes last where it comes.
                places = {id: (each.document, each.start) for id, each in known.items()}
                moved = [each.id for each in new if places.get(each.id) not in (None, (each.document, each.start))]
                remove_names(connection, namespace, [*others, *moved])
                write_names(connection, namespace, tenant, new)
                write_laters(connection, namespace, {each.id: each.later for each in records if each.later is not None})
            found = [each for each in look_up(connection, namespace, list(by_id)) if each is not None]
            return found, {each.id for each in new}, others, drop_nameless(connection, keys)

    def choose(self, namespace: str, laters: Mapping[str, Later]) -> None:
        """Note what the KV of chunks behind others is read behind, of those that still have the same text and none noted yet."""
        with self._database.write() as connection, self._telling(connection, namespace, list(laters)):
            write_laters(connection, namespace, laters)

    def note(
        self, namespace: str, tenant: str, key: str, chunks: Mapping[str, Later | None], head: NodeRecord | None = None
    ) -> bool:
        """Note how later KV of named chunks was computed, or name a head; return whether any name leads to `key`."""
        with self._database.write(wait=False, durable=False) as connection:
            if head is not None and look_up(connection, namespace, [head.id]) == [None]:
                write_names(connection, namespace, tenant, [head])
            laters = {id: later for id, later in chunks.items() if later is not None and later.key == key}
            write_laters(connection, namespace, laters)
            return owner_of(connection, key) is not None

    def remove(self, namespace: str, ids: Sequence[str]) -> tuple[set[str], list[str]]:
        """Remove names; return those that there were, and what KV was dropped."""
        with self._database.write() as connection:
            found = {each.id for each in look_up(connection, namespace, ids) if each is not None}
            with self._telling(connection, namespace, list(found)):
                keys, _ = kv_of(connection, namespace, found)
                remove_names(connection, namespace, found)
            return found, drop_nameless(connection, keys)

    @contextmanager
    def _telling(self, connection: sqlite3.Connection, namespace: str, ids: Sequence[str]) -> Iterator[None]:
        """Tell other machines what becomes of some ids in a transaction, as it ends."""
        yield


NamesSource = Callable[[Index, Path | None, Callable[[list[str]], None]], Names]
"""Opens shared names over a store: its index and folder, and what has its tiers follow dropped names.

A package registers it as an entry point of the group ``cacheblend_rag.names``, by the scheme of its URL.
"""


# In a transaction that has begun


def _changes(
    connection: sqlite3.Connection, namespace: str, by_id: Mapping[str, NodeRecord], whole: bool
) -> tuple[dict[str, NodeRecord], list[NodeRecord], set[str]]:
    """Return what is known of records, those that are not known so, and the others of their documents if these are `whole`."""
    known = {old.id: old for old in look_up(connection, namespace, list(by_id)) if old is not None}
    new = [each for id, each in by_id.items() if known.get(id) != each or known[id].ends != each.ends]
    query = "SELECT id FROM nodes WHERE namespace = ? AND document = ?"
    documents = {each.document for each in by_id.values()} if whole else ()
    there = {id for each in documents for (id,) in connection.execute(query, (namespace, each)).fetchall()}
    return known, new, there - by_id.keys()


def drop_nameless(connection: sqlite3.Connection, keys: Iterable[str]) -> list[str]:
    """Drop the KV under those of the keys that no name leads to, and return these."""
    nameless = [key for key in dict.fromkeys(keys) if owner_of(connection, key) is None]
    drop_entries(connection, nameless)
    # KV may be in RAM alone, without an entry.
    return nameless


def write_names(connection: sqlite3.Connection, namespace: str, tenant: str, records: Iterable[NodeRecord]) -> None:
    """Write records; what a chunk's KV behind others is stays where its tokens do."""
    records = list(records)
    _own(connection, namespace, tenant)
    connection.executemany(
        "UPDATE nodes SET later = NULL, behind = NULL WHERE namespace = ? AND id = ? AND key != ?",
        [(namespace, record.id, record.key) for record in records],
    )
    columns = _COLUMNS.split(", ")[1:-2]
    connection.executemany(
        f"INSERT INTO nodes (namespace, {', '.join(columns)}) VALUES ({', '.join('?' * (len(columns) + 1))}) "
        f"ON CONFLICT (namespace, id) DO UPDATE SET {', '.join(f'{each} = excluded.{each}' for each in columns)}",
        [
            (
                *(namespace, record.id, record.key, record.text_hash),
                *(pack_tokens(record.token_ids), pack_tokens(record.separator)),
                *(record.document, record.start, record.length, np.asarray(record.ends, dtype="<u4").tobytes()),
            )
            for record in records
        ],
    )


def write_laters(connection: sqlite3.Connection, namespace: str, laters: Mapping[str, Later]) -> None:
    """Note what the KV of chunks behind others is, unless they have one or another text by now, or what that has seen is gone."""
    query = "SELECT seq FROM nodes WHERE namespace = ? AND id = ? AND key = ?"
    for record in look_up(connection, namespace, list(laters)):
        later = None if record is None or record.later is not None else laters[record.id]
        if record is None or later is None or later.key != _later_key(namespace, record, later.behind):
            continue
        others = [connection.execute(query, (namespace, *each)).fetchone() for each in later.seen]
        if None not in others:
            [(seq,)] = connection.execute(query, (namespace, record.id, record.key))
            row = (later.key, pack_tokens(later.behind), seq)
            connection.execute("UPDATE nodes SET later = ?, behind = ? WHERE seq = ?", row)
            connection.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", [(seq, other) for (other,) in others])


def _own(connection: sqlite3.Connection, namespace: str, tenant: str) -> None:
    """Note whose a namespace is."""
    row = connection.execute("SELECT tenant FROM namespaces WHERE namespace = ?", (namespace,)).fetchone()
    owner = "" if row is None else row[0]
    named = "SELECT 1 FROM nodes WHERE namespace = ? LIMIT 1"
    if row is None and tenant and connection.execute(named, (namespace,)).fetchone() is None:
        connection.execute("INSERT INTO namespaces VALUES (?, ?)", (namespace, tenant))
        owner = tenant
    if owner != tenant:
        # Whose they are is not for this tenant to know.
        raise StoreError(f"the ids of {namespace[:40]!r} do not belong to tenant {tenant!r}; give its own namespace")


def remove_names(connection: sqlite3.Connection, namespace: str, ids: Iterable[str]) -> None:
    """Remove names, and what is known of KV that has seen them."""
    connection.executemany("DELETE FROM nodes WHERE namespace = ? AND id = ?", [(namespace, id) for id in ids])


def look_up(connection: sqlite3.Connection, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
    """Return the record of each name, or None where it is unknown."""
    found: dict[str, NodeRecord] = {}
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        query = f"SELECT {_COLUMNS} FROM nodes WHERE namespace = ? AND id IN ({', '.join('?' * len(some))})"
        rows = connection.execute(query, (namespace, *some)).fetchall()
        found |= {row[1]: _record(connection, namespace, row) for row in rows}
    return list(map(found.get, ids))


def members_of(connection: sqlite3.Connection, namespace: str, document: str) -> list[NodeRecord]:
    """Return the chunks of a document in reading order."""
    query = f"SELECT {_COLUMNS} FROM nodes WHERE namespace = ? AND document = ? {_READING_ORDER}"
    return [_record(connection, namespace, row) for row in connection.execute(query, (namespace, document)).fetchall()]


def kv_of(connection: sqlite3.Connection, namespace: str, ids: Iterable[str]) -> tuple[list[str], set[str]]:
    """Return the keys of the KV of names, and of all KV that has seen their text, and the ids of those whose that is."""
    own = "SELECT seq, key, later FROM nodes WHERE namespace = ? AND id = ?"
    others = "SELECT id, later FROM seen JOIN nodes USING (seq) WHERE other = ? AND later IS NOT NULL"
    found: list[str] = []
    readers: set[str] = set()
    for id in dict.fromkeys(ids):
        for seq, key, later in connection.execute(own, (namespace, id)).fetchall():
            found += [key, *([] if later is None else [later])]
            for reader, each in connection.execute(others, (seq,)):
                readers.add(reader)
                found.append(each)
    return found, readers


def _record(connection: sqlite3.Connection, namespace: str, row: Sequence[Any]) -> NodeRecord:
    """Return the record of a row, with what that says of the KV behind other chunks, as far as that can be."""
    seq, id, key, text_hash, tokens, separator, document, start, length, ends, later, behind = row
    packed = unpack_tokens(tokens), unpack_tokens(separator) if separator else ()
    stops = tuple(np.frombuffer(ends, dtype="<u4").tolist()) if ends else ()
    record = NodeRecord(id, key, text_hash, *packed, document, start, length, stops)
    if later is None or behind is None:
        return record
    read = unpack_tokens(behind)
    if later != _later_key(namespace, record, read):
        # The index is damaged.
        return record
    query = "SELECT id, key FROM seen JOIN nodes ON nodes.seq = other WHERE seen.seq = ? ORDER BY id"
    return replace(record, later=Later(later, read, tuple(connection.execute(query, (seq,)))))


def _later_key(namespace: str, record: NodeRecord, behind: Sequence[int]) -> str:
    return chunk_key(namespace, record.token_ids + record.separator, None, context_digest(behind))
