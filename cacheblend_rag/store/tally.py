"""What the index counts on the way, against what there is."""

from __future__ import annotations

import sqlite3

from cacheblend_rag.store.database import Database
from cacheblend_rag.store.entries import counter

__all__ = ["Tally"]

_BYTES = "ifnull(sum(bytes), 0)"
_PINNED_BYTES = "ifnull(sum(CASE WHEN pinned THEN bytes END), 0)"
_SHARES = """
SELECT tenant, sum(entries), sum(bytes), sum(names) FROM (
    SELECT tenant, count(*) AS entries, sum(bytes) AS bytes, 0 AS names FROM entries GROUP BY tenant
    UNION ALL
    SELECT ifnull(tenant, ''), 0, 0, count(*) FROM nodes LEFT JOIN namespaces USING (namespace) GROUP BY 1
) GROUP BY tenant
"""


class Tally:
    """The sums that triggers keep, so that nobody has to go through a million rows; each method is one transaction.

    Parameters
    ----------
    database : Database
        Where they are kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def damage(self) -> list[str]:
        """Return what is wrong with the database, apart from single names.

        Raises
        ------
        StoreError
            If it is too damaged to work with.
        """
        with self._database.snapshot() as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
            if found:
                raise sqlite3.DatabaseError(f"database disk image is malformed: {found[0]}")
            counted = counter(connection, "entry_bytes"), counter(connection, "pinned_bytes")
            total = connection.execute(f"SELECT {_BYTES}, {_PINNED_BYTES} FROM entries").fetchone()
            shares = set(connection.execute("SELECT tenant, entries, bytes, names FROM tenants WHERE entries OR names"))
            counts = set(connection.execute(_SHARES))
        problems = []
        if counted != total:
            problems.append(f"the index counts {counted[0]} bytes, {counted[1]} pinned, where its entries have {total}")
        elif shares != counts:
            problems.append(
                f"the index counts {sorted(shares)} as the tenants' shares where they have {sorted(counts)}"
            )
        return problems

    def recount(self) -> None:
        """Count anew what is counted on the way."""
        with self._database.write() as connection:
            for name, total in (("entry_bytes", _BYTES), ("pinned_bytes", _PINNED_BYTES)):
                query = f"UPDATE counters SET value = (SELECT {total} FROM entries) WHERE name = ?"
                connection.execute(query, (name,))
            shares = connection.execute(_SHARES).fetchall()
            connection.execute("DELETE FROM tenants")
            connection.executemany("INSERT INTO tenants VALUES (?, ?, ?, ?)", shares)
            connection.execute("INSERT OR IGNORE INTO tenants VALUES ('', 0, 0, 0)")
