"""What is wrong with the names of a store and with its documents, and how that is mended."""

from __future__ import annotations

import sqlite3

from cacheblend_rag.store.database import Database
from cacheblend_rag.store.documents import Drafts
from cacheblend_rag.store.entries import Dropped
from cacheblend_rag.store.names import drop_nameless
from cacheblend_rag.store.pieces import is_sound, read_document, read_pieces

__all__ = ["Damage"]

_NAMES = "SELECT namespace, id, key, text_hash, token_ids, separator, checksum FROM nodes"
_HOMELESS = (
    "SELECT nodes.namespace, id FROM members JOIN nodes USING (seq) LEFT JOIN documents ON number = members.document "
    "AND documents.namespace = nodes.namespace WHERE number IS NULL"
)
# Of no name, and of no chunk.
_STRAY = (
    "members WHERE seq NOT IN (SELECT seq FROM nodes)",
    "documents WHERE number NOT IN (SELECT document FROM members)",
)


class Damage:
    """What names and documents say, against their checksums and against each other; each method is one transaction.

    Parameters
    ----------
    database : Database
        Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def names(self) -> list[tuple[str, str]]:
        """Return the namespace and id of each name whose record, or whose place in its document, is not what was written."""
        with self._database.snapshot() as connection:
            found = [tuple(row[:2]) for row in connection.execute(_NAMES) if not is_sound(*row)]
            found += connection.execute(_HOMELESS).fetchall()
            for namespace, document in _documents(connection):
                known = read_document(connection, namespace, document)
                pieces = () if known is None else read_pieces(connection, namespace, document, known[0])
                found += [(namespace, id) for id, piece in pieces if piece is None]
        return list(dict.fromkeys(found))

    def documents(self) -> list[tuple[str, str]]:
        """Return the namespace and name of each document whose record is damaged, or is not what made the keys of its chunks."""
        found = []
        with self._database.snapshot() as connection:
            for namespace, document in _documents(connection):
                drafts = Drafts(connection, namespace)
                drafts.load(document)
                known = read_document(connection, namespace, document)
                is_damaged = known is not None and known[1] is None
                if is_damaged or any(target.is_changed for target in drafts.targets(0.0).values()):
                    found.append((namespace, document))
        return found

    def strays(self) -> int:
        """Return how many rows say where something stands that is not there."""
        with self._database.snapshot() as connection:
            return sum(int(connection.execute(f"SELECT count(*) FROM {rows}").fetchone()[0]) for rows in _STRAY)

    def reread(self, namespace: str, document: str, writer: str) -> Dropped:
        """Give the chunks of a document the keys that they have in it."""
        with self._database.write() as connection:
            drafts = Drafts(connection, namespace)
            drafts.load(document)
            return drop_nameless(connection, drafts.save(drafts.targets(0.0)), writer)

    def remove_strays(self) -> None:
        """Remove rows that say where something stands that is not there."""
        with self._database.write() as connection:
            for rows in _STRAY:
                connection.execute(f"DELETE FROM {rows}")


def _documents(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    return connection.execute("SELECT namespace, name FROM documents").fetchall()
