"""The names by which chunks are looked up."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cacheblend_rag.errors import StoreError
from cacheblend_rag.reading import Member
from cacheblend_rag.store.base import Later, ListedName, NameChanges, NamedTarget, NodeRecord
from cacheblend_rag.store.chunkfile import pack_tokens, unpack_tokens
from cacheblend_rag.store.documents import Drafts, document_of, with_later
from cacheblend_rag.store.index import Index, drop_entries

__all__ = [
    "Names",
    "NamesSource",
    "drop_nameless",
    "has_name",
    "keys_of",
    "kv_of",
    "look_up",
    "remove_names",
    "write_names",
]

Result = TypeVar("Result")

# That many names are asked for in one query; SQLite takes 999 values in one.
_AT_ONCE = 200
# Behind all characters that names are written with.
_LAST = "\U0010ffff"


class Names:
    """The names in an index; each method is one transaction, and says which KV is to be dropped with what it changes."""

    is_shared = False
    """Whether machines share them, so that the index has a copy; such a subclass has these three methods, and `_publish`."""

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
        """Return the ids of a namespace as they were first recorded: all, or those in documents whose names begin so."""
        if within is None:
            return [id for (id,) in self._rows("SELECT id FROM nodes WHERE namespace = ? ORDER BY seq", namespace)]
        query = (
            "SELECT nodes.id FROM documents JOIN members ON number = document JOIN nodes USING (seq) "
            "WHERE documents.namespace = ? AND name >= ? AND name < ? ORDER BY seq"
        )
        return [id for (id,) in self._rows(query, namespace, within, within + _LAST)]

    def beginning(self, namespace: str, prefix: str) -> list[str]:
        """Return the ids that begin with a prefix."""
        query = "SELECT id FROM nodes WHERE namespace = ? AND id >= ? AND id < ? ORDER BY seq"
        return [id for (id,) in self._rows(query, namespace, prefix, prefix + _LAST)]

    def page(self, namespace: str, after: str, limit: int, passed_over: str) -> list[ListedName]:
        """Return the first names behind `after` in the order of their ids, without those that begin with `passed_over`."""
        query = (
            "SELECT nodes.id, documents.name FROM nodes LEFT JOIN members USING (seq) LEFT JOIN documents "
            "ON number = document WHERE nodes.namespace = ? AND nodes.id > ? AND substr(nodes.id, 1, ?) != ? "
            "ORDER BY nodes.id LIMIT ?"
        )
        return [ListedName(*row) for row in self._rows(query, namespace, after, len(passed_over), passed_over, limit)]

    def document_names(self, namespace: str, after: str, limit: int) -> list[str]:
        """Return the first documents behind `after`, in the order of their names."""
        query = "SELECT name FROM documents WHERE namespace = ? AND name > ? ORDER BY name LIMIT ?"
        return [name for (name,) in self._rows(query, namespace, after, limit)]

    def namespaces(self, tenant: str | None = None) -> list[str]:
        """Return all namespaces that have ids, or those of one tenant."""
        query = (
            "SELECT DISTINCT namespace FROM nodes LEFT JOIN namespaces USING (namespace) "
            "WHERE ?1 IS NULL OR ifnull(tenant, '') = ?1"
        )
        return [namespace for (namespace,) in self._rows(query, tenant)]

    def revision(self) -> int:
        """Return a number that every change to a name raises, by any process; equal numbers mean that no name changed."""
        return int(self._rows("SELECT ifnull(max(seq), 0) FROM changes")[0][0])

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
        query = "SELECT ifnull(tenant, '') FROM nodes LEFT JOIN namespaces USING (namespace) WHERE key = ?1 OR later = ?1 LIMIT 1"
        found = self._rows(query, key)
        return str(found[0][0]) if found else None

    def record(
        self,
        namespace: str,
        records: Sequence[NodeRecord],
        tenant: str = "",
        whole: bool = False,
    ) -> tuple[set[str], list[str]]:
        """Record names, those with a place in their documents, of which they are all if `whole`.

        Return the ids that are recorded or removed for that, and what KV was dropped.
        """
        ids = {record.id for record in records}
        with self._drafting(namespace, self._database.write) as (connection, drafts):
            others = drafts.others(records) if whole else {}
            replaced = kv_of(connection, namespace, [*ids, *others], drafts)
            alone = [id for id in ids if self.is_shared and drafts.document_of(id) is None]
            remove_names(connection, namespace, others, drafts)
            drafts.put(records)
            # What has moved to another document has not been there for those that have seen it.
            seers = "SELECT seen.seq FROM seen JOIN nodes ON nodes.seq = other WHERE namespace = ? AND id = ?"
            connection.executemany(
                f"UPDATE nodes SET later = NULL, behind = NULL WHERE seq IN ({seers})",
                ((namespace, id) for id in drafts.left),
            )
            write_names(connection, namespace, tenant, records, drafts.targets())
            drafts.save()
            alone += [record.id for record in records if record.place is None]
            self._publish(connection, namespace, drafts, alone)
            return ids.union(others), drop_nameless(connection, replaced)

    def note(
        self, namespace: str, tenant: str, key: str, chunks: Mapping[str, Later | None], head: NodeRecord | None = None
    ) -> bool:
        """Note how later KV of named chunks was computed, or name a head; return whether any name leads to `key`."""
        with self._database.write(wait=False, durable=False) as connection:
            if head is not None and not keys_of(connection, namespace, [head.id]):
                write_names(connection, namespace, tenant, [head], {})
            for id, later in chunks.items():
                [record] = look_up(connection, namespace, [id])
                if record is not None and record.later is None and later is not None and later.key == key:
                    query = "SELECT seq FROM nodes WHERE namespace = ? AND id = ?"
                    [(number,)] = connection.execute(query, (namespace, id)).fetchall()
                    _write_later(connection, namespace, number, later)
            return has_name(key, connection)

    def remove(self, namespace: str, ids: Sequence[str]) -> tuple[set[str], list[str]]:
        """Remove names; return those that there were, and what KV was dropped."""
        with self._drafting(namespace, self._database.write) as (connection, drafts):
            # Others may know what is not known here.
            alone = [id for id in ids if self.is_shared and drafts.document_of(id) is None]
            found = set(keys_of(connection, namespace, ids))
            keys = kv_of(connection, namespace, found, drafts)
            remove_names(connection, namespace, found, drafts)
            drafts.save()
            self._publish(connection, namespace, drafts, alone)
            return found, drop_nameless(connection, keys)

    def rehearse(
        self, namespace: str, records: Sequence[NodeRecord], whole: bool = False
    ) -> tuple[list[NamedTarget], dict[str, list[Member]]]:
        """Return what recording these would lead to, and the chunks of their documents in reading order."""
        ids = [record.id for record in records]
        with self._drafting(namespace) as (connection, drafts):
            known = look_up(connection, namespace, ids)
            others = drafts.others(records) if whole else {}
            drafts.remove(others)
            records = records if whole else drafts.apart(records)
            drafts.put(records)
            targets = drafts.targets()
            documents = {name: drafts.members(name) for name in drafts.names()}
        found = []
        gone = {old.id for record, old in zip(records, known, strict=True) if old is not None and old.key != record.key}
        gone |= others.keys() | drafts.left
        for record, old in zip(records, known, strict=True):
            is_moved = record.id in drafts.left
            is_changed = bool(record.id) and (old != record or is_moved)
            there = targets.get(record.id) if record.place is not None else None
            later = old.later if old is not None and old == record and not is_moved else None
            if later is not None and any(id in gone for id, _ in later.seen):
                later = None
            target = NamedTarget(record) if there is None else there
            kept = replace(target.record, place=record.place, later=later)
            found.append(replace(target, record=kept, is_changed=is_changed or target.is_changed))
        for document in set(others.values()) - {target.document for target in found if target.is_changed}:
            number = next(number for number, target in enumerate(found) if target.document == document)
            found[number] = replace(found[number], is_changed=True)
        return found, documents

    def targets(self, namespace: str, ids: Sequence[str]) -> list[NamedTarget | None]:
        """Return each named chunk and its document; None where the name is unknown."""
        with self._drafting(namespace) as (connection, drafts):
            known = look_up(connection, namespace, ids)
            for record in known:
                if record is not None:
                    drafts.document_of(record.id)
            targets = drafts.targets()
        return [None if record is None else targets.get(record.id) or NamedTarget(record) for record in known]

    def around(self, namespace: str, id: str) -> list[Member]:
        """Return the chunks of the document that a chunk is of, in reading order; none where it is of none."""
        with self._drafting(namespace) as (_, drafts):
            document = drafts.document_of(id)
            return [] if document is None else drafts.members(document)

    def documents(self, namespace: str, ids: Sequence[str]) -> list[str | None]:
        with self._database.read() as connection:
            return [document_of(connection, namespace, node) for node in ids]

    def document(self, namespace: str, document: str) -> list[str]:
        with self._drafting(namespace) as (_, drafts):
            return drafts.ids(document)

    def _publish(self, connection: sqlite3.Connection, namespace: str, drafts: Drafts, alone: Sequence[str]) -> None:
        """Tell other machines, as a transaction ends, of the documents it drafted and of chunks that are, or were, of none."""

    @contextmanager
    def _drafting(self, namespace: str, transaction: Any = None) -> Iterator[tuple[sqlite3.Connection, Drafts]]:
        """Give the documents of a namespace in a transaction, by default a snapshot."""
        with (transaction or self._database.read)() as connection:
            yield connection, Drafts(connection, namespace)


NamesSource = Callable[[Index, Path | None, Callable[[list[str]], None]], Names]
"""Opens shared names over a store: its index and folder, and what has its tiers follow dropped names.

A package registers it as an entry point of the group ``cacheblend_rag.names``, by the scheme of its URL.
"""


# In a transaction that has begun


def has_name(key: str, connection: sqlite3.Connection) -> bool:
    """Return whether any name leads to a key."""
    query = "SELECT 1 FROM nodes WHERE key = ?1 OR later = ?1 LIMIT 1"
    return connection.execute(query, (key,)).fetchone() is not None


def drop_nameless(connection: sqlite3.Connection, keys: Iterable[str]) -> list[str]:
    """Drop the KV under those of the keys that no name leads to, and return these."""
    nameless = [key for key in dict.fromkeys(keys) if not has_name(key, connection)]
    drop_entries(connection, nameless)
    # KV may be in RAM alone, without an entry.
    return nameless


def write_names(
    connection: sqlite3.Connection,
    namespace: str,
    tenant: str,
    records: Iterable[NodeRecord],
    targets: Mapping[str, NamedTarget],
) -> None:
    """Write records, those of documents as they are among the `targets`."""
    written = [given if given.place is None else targets[given.id].record for given in records]
    _own(connection, namespace, tenant)
    numbers = []
    for record in written:
        tokens, separator = pack_tokens(record.token_ids), pack_tokens(record.separator)
        numbers += connection.execute(
            "INSERT INTO nodes (namespace, id, key, text_hash, token_ids, separator) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (namespace, id) DO UPDATE SET key = excluded.key, text_hash = excluded.text_hash, "
            "token_ids = excluded.token_ids, separator = excluded.separator RETURNING seq",
            (namespace, record.id, record.key, record.text_hash, tokens, separator),
        ).fetchall()
    for (number,), record in zip(numbers, written, strict=True):
        _write_later(connection, namespace, number, record.later)


def _write_later(connection: sqlite3.Connection, namespace: str, number: int, later: Later | None) -> None:
    """Note what a chunk's KV behind another one is, unless what that has seen is gone."""
    query = "SELECT seq FROM nodes WHERE namespace = ? AND id = ? AND key = ?"
    seen = () if later is None else later.seen
    others = [connection.execute(query, (namespace, *each)).fetchone() for each in seen]
    row = (None, None) if later is None or None in others else (later.key, pack_tokens(later.behind))
    # Has what it had seen before forgotten.
    connection.execute("UPDATE nodes SET later = ?, behind = ? WHERE seq = ?", (*row, number))
    if row[0] is not None:
        connection.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", ((number, other) for (other,) in others))


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


def remove_names(connection: sqlite3.Connection, namespace: str, ids: Iterable[str], drafts: Drafts) -> None:
    """Remove names, which leave their documents."""
    ids = list(ids)
    drafts.remove(ids)
    connection.executemany("DELETE FROM nodes WHERE namespace = ? AND id = ?", ((namespace, node) for node in ids))


def look_up(connection: sqlite3.Connection, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
    """Return the record of each name, or None where it is unknown."""
    found: dict[str, NodeRecord] = {}
    for start in range(0, len(ids), _AT_ONCE):
        some = ids[start : start + _AT_ONCE]
        query = (
            "SELECT seq, id, key, text_hash, token_ids, separator, later, behind FROM nodes "
            f"WHERE namespace = ? AND id IN ({', '.join('?' * len(some))})"
        )
        for row in connection.execute(query, (namespace, *some)).fetchall():
            seq, id, key, text_hash, tokens, separator, later, behind = row
            packed = unpack_tokens(tokens), unpack_tokens(separator) if separator else ()
            record = NodeRecord(id, key, text_hash, *packed)
            found[id] = with_later(connection, namespace, seq, later, behind, record)
    return list(map(found.get, ids))


def keys_of(connection: sqlite3.Connection, namespace: str, ids: Iterable[str]) -> dict[str, str]:
    """Return the keys that those of the names that are known lead to."""
    query = "SELECT id, key FROM nodes WHERE namespace = ? AND id = ?"
    return dict(row for node in dict.fromkeys(ids) for row in connection.execute(query, (namespace, node)).fetchall())


def kv_of(connection: sqlite3.Connection, namespace: str, ids: Iterable[str], drafts: Drafts) -> list[str]:
    """Return the keys of the KV of names, and of all KV that has seen their text; whose that is, is noted in the drafts."""
    own = "SELECT seq, key, later FROM nodes WHERE namespace = ? AND id = ?"
    others = "SELECT id, later FROM seen JOIN nodes USING (seq) WHERE other = ? AND later IS NOT NULL"
    found: list[str] = []
    for id in dict.fromkeys(ids):
        for seq, key, later in connection.execute(own, (namespace, id)).fetchall():
            found += [key, *([] if later is None else [later])]
            for reader, each in connection.execute(others, (seq,)):
                drafts.readers.add(reader)
                found.append(each)
    return found
