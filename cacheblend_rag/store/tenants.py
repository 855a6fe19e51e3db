"""Whose the entries and names of a store are."""

from __future__ import annotations

from cacheblend_rag.store.database import Database

__all__ = ["Tenants"]


class Tenants:
    """What each tenant has in a database, counted while it is written.

    Parameters
    ----------
    database : Database
        Where entries and names are kept.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def all(self) -> list[str]:
        """Return the tenants that have entries or names; "" stands for what is nobody's in particular."""
        with self._database.read() as connection:
            query = "SELECT tenant FROM tenants WHERE entries OR names ORDER BY tenant"
            return [row[0] for row in connection.execute(query)]

    def share(self, tenant: str | None) -> tuple[int, int, int]:
        """Return the entries, their bytes and the names of a tenant, or of all."""
        query = "SELECT ifnull(sum(entries), 0), ifnull(sum(bytes), 0), ifnull(sum(names), 0) FROM tenants"
        with self._database.read() as connection:
            if tenant is None:
                row = connection.execute(query).fetchone()
            else:
                row = connection.execute(f"{query} WHERE tenant = ?", (tenant,)).fetchone()
        return int(row[0]), int(row[1]), int(row[2])
