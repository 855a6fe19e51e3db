"""The names by which chunks are asked for."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from logging import getLogger

from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.chunkfile import pack_tokens, unpack_tokens
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.index import Dropped, counter, drop_entries

__all__ = ["Names"]

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
        query = "SELECT key, text_hash, token_ids, checksum FROM nodes WHERE namespace = ? AND id = ?"
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

    def count(self) -> int:
        """Return how many names there are in all namespaces."""
        with self._database.read() as connection:
            return int(connection.execute("SELECT count(*) FROM nodes").fetchone()[0])

    def record(self, namespace: str, records: Iterable[NodeRecord], writer: str) -> Dropped:
        """Record names; entries that lose their last name are dropped."""
        rows = []
        for record in records:
            tokens = pack_tokens(record.token_ids)
            checksum = _checksum(namespace, record.id, record.key, record.text_hash, tokens)
            rows.append((namespace, record.id, record.key, record.text_hash, tokens, checksum))
        if not rows:
            return Dropped()
        with self._database.write() as connection:
            replaced = _keys_of(connection, namespace, [row[1] for row in rows])
            connection.executemany(
                "INSERT INTO nodes (namespace, id, key, text_hash, token_ids, checksum) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (namespace, id) DO UPDATE SET key = excluded.key, text_hash = excluded.text_hash, "
                "token_ids = excluded.token_ids, checksum = excluded.checksum",
                rows,
            )
            return _drop_nameless(connection, replaced, writer)

    def remove(self, namespace: str, ids: Sequence[str], writer: str) -> tuple[int, Dropped]:
        """Remove names, and entries that lose their last name; return how many names there were."""
        with self._database.write() as connection:
            keys = _keys_of(connection, namespace, ids)
            connection.executemany(
                "DELETE FROM nodes WHERE namespace = ? AND id = ?", ((namespace, node) for node in set(ids))
            )
            return len(keys), _drop_nameless(connection, keys, writer)

    def release(self, keys: Sequence[str], writer: str) -> Dropped:
        """Drop the entries under those of the keys that no name maps to."""
        with self._database.write() as connection:
            return _drop_nameless(connection, keys, writer)

    def damaged(self) -> list[tuple[str, str]]:
        """Return the namespace and id of each name whose record does not match its checksum."""
        query = "SELECT namespace, id, key, text_hash, token_ids, checksum FROM nodes"
        with self._database.read() as connection:
            return [tuple(row[:2]) for row in connection.execute(query) if not _is_sound(*row)]


def _record(namespace: str, node: str, key: str, text_hash: str, tokens: bytes, checksum: int) -> NodeRecord | None:
    if not _is_sound(namespace, node, key, text_hash, tokens, checksum):
        _log.warning(
            "the stored record of name %r is damaged; the name counts as unknown until it is added again", node
        )
        return None
    return NodeRecord(node, key, text_hash, unpack_tokens(tokens))


def _is_sound(namespace: str, node: str, key: str, text_hash: str, tokens: bytes, checksum: int) -> bool:
    # In a damaged database a value may even have another type.
    texts = all(isinstance(text, str) for text in (namespace, node, key, text_hash))
    return texts and isinstance(tokens, bytes) and _checksum(namespace, node, key, text_hash, tokens) == checksum


def _checksum(namespace: str, node: str, key: str, text_hash: str, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32("\0".join((namespace, node, key, text_hash)).encode("utf-8", "surrogatepass")))


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
