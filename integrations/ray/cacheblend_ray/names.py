"""Names that machines share: one truth about what chunks and documents there are, beside each machine's own index.

Each machine keeps a whole copy of the names in its index, and brings it up to date before every look-up. What is acknowledged on
one machine is therefore what the next look-up finds on any other; where the truth is out of reach, nothing is looked up at all.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.errors import StoreError
from cacheblend_rag.files import locked
from cacheblend_rag.store.index import Index
from cacheblend_rag.store.names import (
    Names,
    NamesSource,
    NodeRecord,
    drop_nameless,
    kv_of,
    look_up,
    members_of,
    remove_names,
    write_laters,
    write_names,
)
from cacheblend_ray.table import NameTable, Session, Unit, UnitName

__all__ = ["SharedNames", "open_names"]

Result = TypeVar("Result")

# How long a look-up, and a change, waits for another one of this machine to bring the names up to date.
_PATIENCE_S, _CHANGE_S = 5.0, 30.0


def open_names(url: str) -> NamesSource:
    """Return the names that a database keeps for all machines, at a URL as `NameTable` takes it."""
    return partial(SharedNames, NameTable(url))


class SharedNames(Names):
    """The names in a table, followed by an index.

    One thread of one process of a machine at a time reads the table and writes to the index what has changed; who looks names up
    waits for it. A change is made in a transaction of the index while no other machine may change the table, and is committed
    there first: an index whose transaction then fails reads it like those of others.

    Parameters
    ----------
    table : NameTable
        The table. It is closed with this.
    index : Index
        Where the names are, and the position up to which the table was followed.
    folder : Path or None
        The store's folder, which other processes may have open.
    drop : callable
        Has the tiers follow what the names have dropped.
    """

    is_shared = True

    def __init__(
        self,
        table: NameTable,
        index: Index,
        folder: Path | None,
        drop: Callable[[list[str]], None],
    ) -> None:
        super().__init__(index)
        self._table = table
        self._path = None if folder is None else folder / "shared.lock"
        self._drop = drop
        self._lock = threading.Lock()
        # Of the thread that reads the table: that it does, and the session in which it makes a change.
        self._holder = threading.local()

    @property
    def _session(self) -> Session | None:
        return getattr(self._holder, "session", None)

    def catch_up(self) -> None:
        """Bring the index up to date; `RemoteUnavailableError` if the table is out of reach, and nothing is looked up."""
        if getattr(self._holder, "is_here", False):
            return
        with self._alone(_PATIENCE_S), self._table.session() as session:
            self._read(session)

    def change(self, deed: Callable[[], Result]) -> Result:
        """Return what `deed` returns, which is done on what all others have done."""
        with self._alone(_CHANGE_S), self._table.session(changes=True) as session:
            self._read(session)
            self._holder.session = session
            try:
                return deed()
            finally:
                self._holder.session = None

    def close(self) -> None:
        """Release connections."""
        self._table.close()

    def _read(self, session: Session) -> None:
        """Write to the index what has changed."""
        birth, position = self._position() or self._begin()
        if birth and (birth != session.birth or position > session.position):
            raise StoreError(
                f"the names at {self._table.location} are not those that this store has followed up to change {position}: the "
                "database has lost what it had acknowledged, or is another one. Restore its data; where that is lost, warm a "
                "new folder"
            )
        if (birth, position) != (session.birth, session.position):
            reaching: dict[UnitName, Unit] = {}
            for units in session.since(position):
                self._take(units)
                for unit in units:
                    reaching.pop(unit.name, None)
                    if unit.reaches_out:
                        reaching[unit.name] = unit
            # What chunks were read behind may have come after them.
            self._take(list(reaching.values()))
            with self._database.write() as connection:
                _note(connection, session)

    def _position(self) -> tuple[str, int] | None:
        """Return the birth of the table that the index follows, and up to where; None if it follows none."""
        rows = self._database.rows("SELECT birth, position FROM shared")
        return None if not rows else (str(rows[0][0]), int(rows[0][1]))

    def _begin(self) -> tuple[str, int]:
        """Return where an index begins to follow; one that has names already is refused."""
        if self._database.rows("SELECT 1 FROM nodes LIMIT 1"):
            raise StoreError(
                f"this store has names of its own, which those at {self._table.location} would replace: begin with another "
                "folder, or empty this one (`cacheblend-rag store clear`), and warm it again"
            )
        return "", 0

    def _take(self, units: Sequence[Unit]) -> None:
        by_namespace = sorted(units, key=lambda unit: unit.name.namespace)
        for namespace, group in groupby(by_namespace, key=lambda unit: unit.name.namespace):
            self._drop(self._adopt(namespace, list(group)))

    def _adopt(self, namespace: str, units: Sequence[Unit]) -> list[str]:
        """Have units be what they are elsewhere, whatever they were here."""
        with self._database.write() as connection:
            laters = {piece.id: piece.later for unit in units for piece in unit.pieces if piece.later is not None}
            known = look_up(connection, namespace, [piece.id for unit in units for piece in unit.pieces])
            here = {each.id: each for each in known if each is not None}
            here |= {each.id: each for unit in units for each in _pieces(connection, unit.name)}
            there = {piece.id: piece for unit in units for piece in unit.pieces}
            keys, _ = kv_of(connection, namespace, here)
            # Their order is what it is elsewhere too.
            moved = [id for id, each in here.items() if id not in there or _place(there[id]) != _place(each)]
            for unit in units:
                order = [each.id for each in _pieces(connection, unit.name) if each.id not in moved]
                if order != [piece.id for piece in unit.pieces][: len(order)]:
                    moved += order
            remove_names(connection, namespace, moved)
            for unit in units:
                write_names(connection, namespace, unit.tenant, unit.pieces)
            connection.executemany(
                "UPDATE nodes SET later = NULL, behind = NULL WHERE namespace = ? AND id = ? AND later IS NOT NULL",
                [(namespace, id) for id in there],
            )
            # All at once, since chunks may have been read behind each other.
            write_laters(connection, namespace, laters)
            return drop_nameless(connection, keys)

    @contextmanager
    def _telling(self, connection: sqlite3.Connection, namespace: str, ids: Sequence[str]) -> Iterator[None]:
        session = self._session
        if session is None:
            yield
            return
        # What has seen a chunk that goes is told too: it is read behind others from then on.
        _, readers = kv_of(connection, namespace, ids)
        units = _units_of(connection, namespace, [*ids, *readers])
        before = {name: _pieces(connection, name) for name in units}
        yield
        row = connection.execute("SELECT tenant FROM namespaces WHERE namespace = ?", (namespace,)).fetchone()
        units |= _units_of(connection, namespace, [*ids, *readers])
        changed = [
            Unit(name, "" if row is None else str(row[0]), pieces)
            for name in units
            if _said(pieces := _pieces(connection, name)) != _said(before.get(name, []))
        ]
        if changed:
            session.change(changed)
            _note(connection, session)

    @contextmanager
    def _alone(self, patience_s: float) -> Iterator[None]:
        """Keep other threads and processes of this machine from reading the table; its holder looks names up as they are."""
        self._database.check_open()
        until = time.monotonic() + patience_s
        otherwise = (
            f"the names at {self._table.location} are being read for too long by another thread or process; try again"
        )
        if not self._lock.acquire(timeout=patience_s):
            raise StoreError(otherwise)
        self._holder.is_here = True
        try:
            with nullcontext() if self._path is None else locked(self._path, until, otherwise):
                yield
        finally:
            self._holder.is_here = False
            self._lock.release()


def _units_of(connection: sqlite3.Connection, namespace: str, ids: Sequence[str]) -> dict[UnitName, None]:
    """Return the units in which machines are told of ids: their documents, and the chunks that are of none, or unknown."""
    places = [None if each is None else each.document for each in look_up(connection, namespace, ids)]
    return dict.fromkeys(
        UnitName(namespace, id=id) if document is None else UnitName(namespace, document)
        for id, document in zip(ids, places, strict=True)
    )


def _pieces(connection: sqlite3.Connection, unit: UnitName) -> list[NodeRecord]:
    """Return the chunks that a unit has here; a chunk that has come into a document is that document's."""
    if unit.document is not None:
        return members_of(connection, unit.namespace, unit.document)
    found = look_up(connection, unit.namespace, [] if unit.id is None else [unit.id])
    return [each for each in found if each is not None and each.document is None]


def _place(record: NodeRecord) -> tuple[str | None, int | None]:
    return record.document, record.start


def _said(pieces: Sequence[NodeRecord]) -> list[tuple[object, ...]]:
    """Return all that is told of pieces, which differ in more than they are compared by."""
    return [(piece, piece.ends, piece.later) for piece in pieces]


def _note(connection: sqlite3.Connection, session: Session) -> None:
    """Note up to where the table is followed."""
    connection.execute("INSERT OR REPLACE INTO shared VALUES (1, ?, ?)", (session.birth, session.position))
