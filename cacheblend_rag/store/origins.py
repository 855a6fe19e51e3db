"""Origins: by whom a chunk was added, and what its text was made of. One chunk may have several.

All of it is done in a transaction that has begun.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from cacheblend_rag.store.base import NodeRecord

__all__ = ["add_origins", "disown", "has_origin", "made_of", "sources_of"]


def add_origins(connection: sqlite3.Connection, namespace: str, records: Sequence[NodeRecord]) -> None:
    """Add what records say of their origins to what chunks have."""
    origins = [(each.owner, each.source or "", namespace, each.id) for each in records if each.owner or each.source]
    # Of collections that last no longer than their process a name is the latest one's.
    passing = [(namespace, each.id) for each in records if each.owner.startswith("?")]
    connection.executemany(
        "DELETE FROM origins WHERE owner GLOB '[?]*' AND node = (SELECT seq FROM nodes WHERE namespace = ? AND id = ?)",
        passing,
    )
    connection.executemany(
        "INSERT OR REPLACE INTO origins SELECT seq, ?, ? FROM nodes WHERE namespace = ? AND id = ?", origins
    )


def sources_of(connection: sqlite3.Connection, namespace: str, node: str) -> set[str]:
    """Return what a chunk's text was made of."""
    query = "SELECT source FROM origins JOIN nodes ON seq = node WHERE namespace = ? AND id = ?"
    return {row[0] for row in connection.execute(query, (namespace, node)) if row[0]}


def made_of(connection: sqlite3.Connection, namespace: str, source: str, whose: str, *owner: str) -> list[str]:
    """Return the names of texts that were made of a source, of the owners that the condition says."""
    query = f"SELECT id FROM origins JOIN nodes ON seq = node WHERE source = ? AND namespace = ? AND {whose}"
    return [row[0] for row in connection.execute(query, (source, namespace, *owner))] if source else []


def has_origin(connection: sqlite3.Connection, namespace: str, record: NodeRecord) -> bool:
    """Return whether what a record says of its origin is recorded."""
    query = (
        "SELECT 1 FROM origins JOIN nodes ON seq = node "
        "WHERE namespace = ?1 AND id = ?2 AND (?3 = '' OR owner = ?3) AND source = ?4"
    )
    row = (namespace, record.id, record.owner, record.source or "")
    return not (record.owner or record.source) or connection.execute(query, row).fetchone() is not None


def disown(connection: sqlite3.Connection, namespace: str, ids: Sequence[str], owner: str) -> list[str]:
    """Take names from an owner; return those that no other owner has."""
    seq = "SELECT seq FROM nodes WHERE namespace = ? AND id = ?"
    found = []
    for node in dict.fromkeys(ids):
        others = f"SELECT 1 FROM origins WHERE node = ({seq}) AND owner NOT IN ('', ?)"
        if connection.execute(others, (namespace, node, owner)).fetchone() is None:
            found.append(node)
        else:
            connection.execute(f"DELETE FROM origins WHERE node = ({seq}) AND owner = ?", (namespace, node, owner))
    return found
