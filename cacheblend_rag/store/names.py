"""The names by which chunks are asked for."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from logging import getLogger

from cacheblend_rag.errors import StoreError, StoreFullError, UnknownChunkError
from cacheblend_rag.reading import ReadingRules
from cacheblend_rag.store.base import NamedTarget, NodeRecord
from cacheblend_rag.store.chunkformat import pack_tokens, unpack_tokens
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.documents import Drafts, document_of, record_checksum
from cacheblend_rag.store.entries import Dropped, claim, counter, drop_entries

__all__ = ["Names", "check_known", "name_waiting"]

_log = getLogger(__name__)


class Names:
    """The names in a database; each method is one transaction.

    Parameters
    ----------
    database : Database
        Where they are kept, beside the entries that they keep alive.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return the record of each id, or None."""
        query = "SELECT key, text_hash, token_ids, separator, checksum FROM nodes WHERE namespace = ? AND id = ?"
        with self._database.read() as connection:
            rows = [connection.execute(query, (namespace, node)).fetchone() for node in ids]
        return [None if row is None else _record(namespace, node, *row) for node, row in zip(ids, rows, strict=True)]

    def ids(self, namespace: str) -> list[str]:
        """Return the ids of a namespace in the order they were first recorded."""
        with self._database.read() as connection:
            return [
                row[0]
                for row in connection.execute("SELECT id FROM nodes WHERE namespace = ? ORDER BY seq", (namespace,))
            ]

    def revision(self) -> int:
        """Return a number that every change to a name raises, by whatever process."""
        with self._database.read() as connection:
            return counter(connection, "revision")

    def changes(self, namespace: str, since: int | None) -> tuple[int, bool, list[tuple[int, str | None, str | None]]]:
        """Return a mark, whether all names follow, and the number, id and text digest of those that changed since `since`."""
        with self._database.read() as connection:
            # An index of an older version that may not be written has no such table.
            if connection.execute("SELECT 1 FROM main.sqlite_master WHERE name = 'changes'").fetchone() is None:
                mark, known = 0, False
            else:
                first, last = connection.execute("SELECT min(seq), max(seq) FROM changes").fetchone()
                mark = last or 0
                known = since is not None and (since == mark or (first is not None and first <= since + 1 <= mark))
            if known:
                query = (
                    "SELECT DISTINCT node, id, text_hash FROM changes LEFT JOIN nodes ON nodes.seq = node AND namespace = ? "
                    "WHERE changes.seq > ?"
                )
                return mark, False, connection.execute(query, (namespace, since)).fetchall()
            query = "SELECT seq, id, text_hash FROM nodes WHERE namespace = ? ORDER BY seq"
            return mark, True, connection.execute(query, (namespace,)).fetchall()

    def leading_to(self, key: str) -> tuple[str, str, list[str]] | None:
        """Return a namespace whose names lead to `key`, its tenant and those names; None if no name does."""
        query = (
            "SELECT namespace, ifnull(tenant, ''), id FROM nodes LEFT JOIN namespaces USING (namespace) WHERE key = ?"
        )
        with self._database.read() as connection:
            rows = connection.execute(query, (key,)).fetchall()
        if not rows:
            return None
        namespace, tenant, _ = rows[0]
        return namespace, tenant, [node for each, _, node in rows if each == namespace]

    def count(self) -> int:
        """Return how many names there are in all namespaces."""
        with self._database.read() as connection:
            return int(connection.execute("SELECT sum(names) FROM tenants").fetchone()[0])

    def record(
        self,
        namespace: str,
        records: Sequence[NodeRecord],
        writer: str,
        tenant: str = "",
        *,
        rules: ReadingRules | None = None,
        expires_at: float | None = None,
        now: float = 0.0,
    ) -> Dropped:
        """Record names, those with a place in their documents; entries that lose their last name are dropped.

        Parameters
        ----------
        namespace, tenant : str
            Where the names are, and whose.
        records : sequence of NodeRecord
            The names.
        writer : str
            Who removes the dropped files.
        rules : ReadingRules, optional
            How their documents are read from now on.
        expires_at : float, optional
            When their time to live is over, by the store's time.
        now : float
            The store's time.
        """
        if not records:
            return Dropped()
        with self._database.write() as connection:
            replaced = _keys_of(connection, namespace, [record.id for record in records])
            drafts = Drafts(connection, namespace)
            drafts.put(records, rules or ReadingRules(), expires_at)
            targets = drafts.targets(now)
            rows = [
                _row(namespace, record if record.place is None else targets[record.id].record) for record in records
            ]
            _own(connection, namespace, tenant, [row[2] for row in rows])
            connection.executemany(
                f"{_INSERT} ON CONFLICT (namespace, id) DO UPDATE SET key = excluded.key, text_hash = excluded.text_hash, "
                "token_ids = excluded.token_ids, separator = excluded.separator, checksum = excluded.checksum",
                rows,
            )
            replaced += drafts.save(targets, {record.id for record in records})
            return _drop_nameless(connection, replaced, writer)

    def remove(self, namespace: str, ids: Sequence[str], writer: str, now: float = 0.0) -> tuple[set[str], Dropped]:
        """Remove names, and entries that lose their last name; return which names there were.

        What stands behind them in their documents is read without them: it has other keys from now on.
        """
        query = "SELECT 1 FROM nodes WHERE namespace = ? AND id = ?"
        with self._database.write() as connection:
            found = {node for node in set(ids) if connection.execute(query, (namespace, node)).fetchone()}
            keys = _keys_of(connection, namespace, sorted(found))
            drafts = Drafts(connection, namespace)
            drafts.remove(sorted(found))
            connection.executemany(
                "DELETE FROM nodes WHERE namespace = ? AND id = ?", ((namespace, node) for node in found)
            )
            keys += drafts.save(drafts.targets(now))
            return found, _drop_nameless(connection, keys, writer)

    def rehearse(
        self,
        namespace: str,
        records: Sequence[NodeRecord],
        rules: ReadingRules | None = None,
        expires_at: float | None = None,
        now: float = 0.0,
    ) -> list[NamedTarget]:
        """Return what `record` would lead to; see `KVStore.rehearse`."""
        known = self.lookup(namespace, [record.id for record in records])
        with self._database.read() as connection:
            drafts = Drafts(connection, namespace)
            drafts.put(records, rules or ReadingRules(), expires_at)
            left = drafts.left
            targets = drafts.targets(now)
        found = []
        for record, old in zip(records, known, strict=True):
            target = None if record.place is None else targets.pop(record.id, None)
            is_changed = bool(record.id) and (old != record or record.id in left)
            lives_s = None if expires_at is None else expires_at - now
            found.append(target or NamedTarget(record, lives_s=lives_s, is_changed=is_changed))
        return found + [target for target in targets.values() if target.is_changed]

    def targets(self, namespace: str, ids: Sequence[str], now: float = 0.0) -> list[NamedTarget | None]:
        """Return how the KV of each name is computed; None where the name is unknown."""
        known = self.lookup(namespace, ids)
        with self._database.read() as connection:
            drafts = Drafts(connection, namespace)
            drafts.look_at(record.id for record in known if record is not None)
            targets = drafts.targets(now)
        return [None if record is None else targets.get(record.id) or NamedTarget(record) for record in known]

    def documents(self, namespace: str, ids: Sequence[str]) -> list[str | None]:
        """Return the document that each name is a piece of; None where it is one of none, or unknown."""
        with self._database.read() as connection:
            return [document_of(connection, namespace, node) for node in ids]

    def document(self, namespace: str, document: str) -> list[str]:
        """Return the ids of a document's chunks in reading order."""
        with self._database.read() as connection:
            return Drafts(connection, namespace).ids(document)

    def document_tokens(self, namespace: str, document: str) -> tuple[int, ...]:
        """Return the tokens of a whole document; what overlaps stands there once."""
        with self._database.read() as connection:
            return Drafts(connection, namespace).text(document)

    def pin(self, namespace: str, ids: Iterable[str], pinned: bool, limit_bytes: int | None) -> list[str]:
        """Pin names, or unpin them; return the keys that they lead to.

        Raises
        ------
        UnknownChunkError
            If a name is unknown.
        StoreFullError
            If more would be pinned than `limit_bytes`.
        """
        nodes = list(dict.fromkeys(ids))
        query = "SELECT key FROM nodes WHERE namespace = ? AND id = ?"
        with self._database.write() as connection:
            rows = [connection.execute(query, (namespace, node)).fetchone() for node in nodes]
            check_known(nodes, [node for node, row in zip(nodes, rows, strict=True) if row is not None])
            keys = [row[0] for row in rows]
            connection.executemany(
                "UPDATE nodes SET pinned = ? WHERE namespace = ? AND id = ? AND pinned != ?",
                ((pinned, namespace, node, pinned) for node in nodes),
            )
            taken = counter(connection, "pinned_bytes")
            if pinned and limit_bytes is not None and taken > limit_bytes:
                raise StoreFullError(
                    f"pinned KV would take {taken} bytes, more than the store's budget of {limit_bytes} (disk_bytes); "
                    "pin fewer chunks, or raise the budget"
                )
        return keys

    def spaces_of(self, ids: Iterable[str], tenant: str | None = None) -> dict[str, list[str]]:
        """Return which of the ids each namespace knows, of those that know any; looks through all names.

        Parameters
        ----------
        ids : iterable of str
            The ids.
        tenant : str, optional
            Only namespaces of this tenant; "" is for those of none.
        """
        query = (
            "SELECT namespace, id FROM nodes LEFT JOIN namespaces USING (namespace) "
            "WHERE (? IS NULL OR ifnull(namespaces.tenant, '') = ?)"
        )
        wanted = set(ids)
        spaces: dict[str, list[str]] = {}
        with self._database.read() as connection:
            for namespace, node in connection.execute(query, (tenant, tenant)):
                if node in wanted:
                    spaces.setdefault(namespace, []).append(node)
        return spaces

    def pinned(self, keys: Iterable[str]) -> list[str]:
        """Return those keys that a pinned name leads to."""
        query = "SELECT 1 FROM nodes WHERE key = ? AND pinned"
        with self._database.read() as connection:
            return [key for key in keys if connection.execute(query, (key,)).fetchone()]

    def all(self) -> Iterator[tuple[str, str, NodeRecord]]:
        """Yield the namespace, tenant and record of every name, in the order they were first recorded; not the damaged ones."""
        query = (
            "SELECT seq, namespace, ifnull(tenant, ''), id, key, text_hash, token_ids, nodes.separator, checksum FROM nodes "
            "LEFT JOIN namespaces USING (namespace) WHERE seq > ? ORDER BY seq LIMIT 1000"
        )
        after = 0
        while True:
            with self._database.read() as connection:
                rows = connection.execute(query, (after,)).fetchall()
            for _, namespace, tenant, *row in rows:
                record = _record(namespace, *row)
                if record is not None:
                    yield namespace, tenant, record
            if not rows:
                return
            after = rows[-1][0]

    def release(self, keys: Sequence[str], writer: str) -> Dropped:
        """Drop the entries under those of the keys that no name maps to."""
        with self._database.write() as connection:
            return _drop_nameless(connection, keys, writer)

    def damaged(self) -> list[tuple[str, str]]:
        """Return the namespace and id of each name whose record does not match its checksum."""
        query = "SELECT namespace, id, key, text_hash, token_ids, separator, checksum FROM nodes"
        with self._database.read() as connection:
            return [tuple(row[:2]) for row in connection.execute(query) if not _is_sound(*row)]


def check_known(ids: Sequence[str], known: Collection[str]) -> None:
    """Raise `UnknownChunkError` unless all ids are known."""
    unknown = [repr(node) for node in ids if node not in known]
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise UnknownChunkError(
            f"no chunk has the id {shown}: it was never added for this model and tenant, or was deleted; nothing was changed"
        )


def name_waiting(
    connection: sqlite3.Connection,
    namespace: str,
    tenant: str,
    records: Sequence[NodeRecord],
    known: Sequence[tuple[str, str]],
) -> bool:
    """Name KV that waited to be written, in a transaction that has begun; return whether any name leads to it now.

    Parameters
    ----------
    connection : sqlite3.Connection
        Where the transaction has begun.
    namespace, tenant : str
        Where the names are.
    records : sequence of NodeRecord
        Names that were unknown when the KV was computed. One that is known by now keeps its text.
    known : sequence of (str, str)
        Id and key of names that were known; they may have been removed since.
    """
    wanted = False
    query = "SELECT key FROM nodes WHERE namespace = ? AND id = ?"
    for record in records:
        row = connection.execute(query, (namespace, record.id)).fetchone()
        if row is None:
            _own(connection, namespace, tenant, [record.key])
            connection.execute(_INSERT, _row(namespace, record))
        wanted |= row is None or row[0] == record.key
    for node, key in known:
        row = connection.execute(query, (namespace, node)).fetchone()
        wanted |= row is not None and row[0] == key
    return wanted


_INSERT = (
    "INSERT INTO nodes (namespace, id, key, text_hash, token_ids, separator, checksum) VALUES (?, ?, ?, ?, ?, ?, ?)"
)


def _row(namespace: str, record: NodeRecord) -> tuple[str, str, str, str, bytes, bytes, int]:
    tokens = pack_tokens(record.token_ids)
    checksum = record_checksum(namespace, record, tokens)
    return namespace, record.id, record.key, record.text_hash, tokens, pack_tokens(record.separator), checksum


def _own(connection: sqlite3.Connection, namespace: str, tenant: str, keys: Iterable[str]) -> None:
    """Note whose a namespace is, and that the KV its names lead to is that tenant's too."""
    row = connection.execute("SELECT tenant FROM namespaces WHERE namespace = ?", (namespace,)).fetchone()
    owner = "" if row is None else row[0]
    named = "SELECT 1 FROM nodes WHERE namespace = ? LIMIT 1"
    if row is None and tenant and connection.execute(named, (namespace,)).fetchone() is None:
        claim(connection, tenant)
        connection.execute("INSERT INTO namespaces VALUES (?, ?)", (namespace, tenant))
        owner = tenant
    if owner != tenant:
        raise StoreError(f"the names of {namespace[:40]!r} are those of tenant {owner!r}, not of {tenant!r}")
    if tenant:
        # An index that was made anew from the files does not know whose they are.
        connection.executemany(
            "UPDATE entries SET tenant = ? WHERE key = ? AND tenant = ''", ((tenant, key) for key in keys)
        )


def _record(
    namespace: str, node: str, key: str, text_hash: str, tokens: bytes, separator: bytes, checksum: int
) -> NodeRecord | None:
    if not _is_sound(namespace, node, key, text_hash, tokens, separator, checksum):
        _log.warning(
            "the stored record of name %r is damaged; the name counts as unknown until it is added again", node
        )
        return None
    return NodeRecord(node, key, text_hash, unpack_tokens(tokens), unpack_tokens(separator))


def _is_sound(
    namespace: str, node: str, key: str, text_hash: str, tokens: bytes, separator: bytes, checksum: int
) -> bool:
    # In a damaged database a value may even have another type.
    texts = all(isinstance(text, str) for text in (namespace, node, key, text_hash))
    if not texts or not isinstance(tokens, bytes) or not isinstance(separator, bytes) or len(separator) % 4:
        return False
    record = NodeRecord(node, key, text_hash, (), unpack_tokens(separator))
    return record_checksum(namespace, record, tokens) == checksum


def _keys_of(connection: sqlite3.Connection, namespace: str, ids: Iterable[str]) -> list[str]:
    query = "SELECT key FROM nodes WHERE namespace = ? AND id = ?"
    rows = (connection.execute(query, (namespace, node)).fetchone() for node in dict.fromkeys(ids))
    return [row[0] for row in rows if row is not None]


def _drop_nameless(connection: sqlite3.Connection, keys: Iterable[str], writer: str) -> Dropped:
    dropped = Dropped()
    query = "SELECT 1 FROM nodes WHERE key = ? LIMIT 1"
    nameless = [key for key in dict.fromkeys(keys) if connection.execute(query, (key,)).fetchone() is None]
    drop_entries(connection, nameless, writer, dropped)
    # KV may be in RAM alone, without an entry.
    dropped.keys = nameless
    return dropped
