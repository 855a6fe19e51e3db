"""Names that machines share: one truth about what chunks and documents there are, beside each machine's own index.

Each machine keeps a whole copy of the names in its index, and brings it up to date before every look-up. What is acknowledged on
one machine is therefore what the next look-up finds on any other; where the truth is out of reach, nothing is looked up at all.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.errors import RemoteUnavailableError, StoreError
from cacheblend_rag.store.base import NodeRecord
from cacheblend_rag.store.documents import Drafts, NamedPiece, document_of
from cacheblend_rag.store.folder import locked
from cacheblend_rag.store.index import Dropped, Index
from cacheblend_rag.store.names import (
    Names,
    NamesSource,
    drop_nameless,
    end_sources,
    keys_of,
    kv_of,
    look_up,
    remove_names,
    sources_of,
    write_names,
)
from cacheblend_ray.log import Behind, NameLog, Unit, UnitName

__all__ = ["LoggedNames", "open_names"]

Result = TypeVar("Result")

# How long a look-up waits for another one of this machine to bring the names up to date.
_PATIENCE_S = 5.0
# How long a change is tried that others are always quicker than, and the first wait.
_TRY_S, _FIRST_WAIT_S, _LONGEST_WAIT_S = 30.0, 0.002, 0.1
# What is removed for all machines in one step.
_UNITS_A_TIME = 1000


def open_names(url: str) -> NamesSource:
    """Return the names that a Redis or Valkey server keeps for all machines, at a URL as `NameLog` takes it."""
    return partial(LoggedNames, NameLog(url))


class LoggedNames(Names):
    """The names in a log, followed by an index.

    One thread of one process of a machine at a time reads the log and writes to the index what has changed; who looks names up
    waits for it. A change is made in a transaction of the index, which the log's answer lets commit: if others were quicker, it
    is rolled back, what they did is read, and it is made again on that.

    Parameters
    ----------
    log : NameLog
        The log. It is closed with this.
    index : Index
        Where the names are, and the position up to which the log was followed.
    clock : callable
        The time by which chunks expire.
    folder : Path or None
        The store's folder, which other processes may have open.
    drop : callable
        Has the tiers follow what the names have dropped.
    """

    is_shared = True

    def __init__(
        self,
        log: NameLog,
        index: Index,
        clock: Callable[[], float],
        folder: Path | None,
        drop: Callable[[Dropped], None],
    ) -> None:
        super().__init__(index, clock)
        self._log = log
        self._path = None if folder is None else folder / "shared.lock"
        self._drop = drop
        self._lock = threading.Lock()
        # Of the thread that reads the log: that it does, and where it was when it began a change.
        self._holder = threading.local()

    def catch_up(self) -> None:
        """Bring the index up to date; `RemoteUnavailableError` if the log is out of reach, and nothing is looked up."""
        if getattr(self._holder, "is_here", False):
            return
        with self._alone(_PATIENCE_S):
            self._read()

    def change(self, deed: Callable[[], Result]) -> Result:
        """Return what `deed` returns once the log lets it commit; `RemoteUnavailableError` if others are always quicker."""
        until, wait_s = time.monotonic() + _TRY_S, _FIRST_WAIT_S
        while True:
            with self._alone(_TRY_S):
                self._holder.at = self._read()
                try:
                    return deed()
                except Behind:
                    pass
                finally:
                    self._holder.at = None
            if time.monotonic() > until:
                raise RemoteUnavailableError(
                    f"the names at {self._log.location} are changed by others all the time; nothing was changed, so try again"
                )
            time.sleep(random.uniform(0, wait_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def removals(self, tenant: str | None) -> Iterator[Callable[[], Dropped]]:
        self.catch_up()
        by_namespace = sorted(self._units(tenant), key=lambda unit: unit.namespace)
        for namespace, group in groupby(by_namespace, key=lambda unit: unit.namespace):
            while units := [Unit(name) for name in islice(group, _UNITS_A_TIME)]:
                yield partial(self._adopt, namespace, units)

    def close(self) -> None:
        """Release connections."""
        self._log.close()

    def _read(self) -> tuple[str, int]:
        """Write to the index what has changed; return the log's birth and the position that the index is at."""
        at = self._position() or self._begin()
        page = self._log.since(*at)
        if at[0] and not page.continues:
            raise StoreError(
                f"the names at {self._log.location} are not those that this store has followed up to change {at[1]}: the server "
                "has lost what it had acknowledged, or is another one. Restore its data; where that is lost, warm a new folder"
            )
        if page.is_whole:
            self._read_all()
            # What has changed while all of it was read is read once more.
            self._mark(page.birth, page.position)
            page = self._log.since(page.birth, page.position)
            if page.is_whole:
                raise RemoteUnavailableError(
                    f"the names at {self._log.location} change faster than they are read; try again"
                )
        if page.changed:
            self._take(_unpacked(page.changed))
        if at != (page.birth, page.position):
            self._mark(page.birth, page.position)
        return page.birth, page.position

    def _position(self) -> tuple[str, int] | None:
        """Return the birth of the log that the index follows, and up to where; None if it follows none."""
        with self._database.read() as connection:
            row = connection.execute("SELECT birth, position FROM shared").fetchone()
        return None if row is None else (str(row[0]), int(row[1]))

    def _begin(self) -> tuple[str, int]:
        """Note that the index follows a log from now on; an index that has names already is refused."""
        with self._database.read() as connection:
            has_names = connection.execute("SELECT 1 FROM nodes LIMIT 1").fetchone() is not None
        if has_names:
            raise StoreError(
                f"this store has names of its own, which those at {self._log.location} would replace: begin with another folder, "
                "or empty this one (`cacheblend-rag store clear`), and warm it again; KV in the remote tier is found there"
            )
        self._mark("", 0)
        return "", 0

    def _read_all(self) -> None:
        """Have in the index what the log has, and nothing else."""
        found, again = set[str](), set[str]()
        for states in self._log.units():
            units = _unpacked(states)
            found.update(states)
            again.update(unit.name.packed() for unit in units if unit.reaches_out)
            self._take(units)
        # What chunks were read behind may have come after them.
        for states in self._log.units() if again else ():
            self._take(_unpacked({name: state for name, state in states.items() if name in again}))
        self._take([Unit(name) for name in self._units(None) if name.packed() not in found])

    def _take(self, units: Sequence[Unit]) -> None:
        by_namespace = sorted(units, key=lambda unit: unit.name.namespace)
        for namespace, group in groupby(by_namespace, key=lambda unit: unit.name.namespace):
            self._drop(self._adopt(namespace, list(group)))

    def _adopt(self, namespace: str, units: Sequence[Unit]) -> Dropped:
        """Have units be what they are elsewhere, whatever they were here; what prompts brought of what has ended goes with it."""
        ids = {piece.record.id for unit in units for piece in unit.pieces}
        with self._drafting(namespace, self._database.write) as (connection, drafts):
            held = [id for unit in units for id in _held(drafts, unit.name)]
            replaced = keys_of(connection, namespace, [*held, *ids])
            keys = kv_of(connection, namespace, replaced, drafts)
            sources = sources_of(connection, namespace, replaced)
            remove_names(connection, namespace, [id for id in held if id in replaced and id not in ids], drafts)
            # Their order, and how long they live, are what they are elsewhere too.
            drafts.remove(ids)
            written: dict[str, list[NodeRecord]] = {}
            for unit in units:
                for record, expires_at in unit.pieces:
                    drafts.put([record], expires_at)
                    written.setdefault(unit.tenant, []).append(record)
            targets = drafts.targets()
            # All at once, since chunks may have been read behind each other.
            for tenant, records in written.items():
                write_names(connection, namespace, tenant, records, targets)
            _, _, more = end_sources(connection, namespace, sources, drafts)
            drafts.save()
            self._send(connection, units)
            return drop_nameless(connection, [*keys, *more])

    def _units(self, tenant: str | None) -> list[UnitName]:
        """Return all documents, and all chunks of none, or those of one tenant."""
        owned = "LEFT JOIN namespaces USING (namespace) WHERE (?1 IS NULL OR ifnull(namespaces.tenant, '') = ?1)"
        documents = f"SELECT namespace, name FROM documents {owned}"
        loose = f"SELECT namespace, id FROM nodes LEFT JOIN members USING (seq) {owned} AND document IS NULL"

        with self._database.read() as connection:
            found = [UnitName(space, document=name) for space, name in connection.execute(documents, (tenant,))]
            return found + [UnitName(space, id=id) for space, id in connection.execute(loose, (tenant,))]

    def _publish(self, connection: sqlite3.Connection, namespace: str, drafts: Drafts, alone: Sequence[str]) -> None:
        readers = look_up(connection, namespace, list(drafts.readers))
        # What they were read behind is gone: in the log their documents, loaded by this, may have it no longer either.
        bereft = [each.id for each in readers if each is not None and each.later is None]
        loose = [id for id in bereft if drafts.document_of(id) is None]
        alone = [*alone, *(set(loose) - self._own(connection, namespace, loose))]
        units = list(_units_now(connection, namespace, drafts, alone))
        seen = {
            id for unit in units for piece in unit.pieces if piece.record.later for id, _ in piece.record.later.seen
        }
        own = self._own(connection, namespace, seen - set(alone))
        self._send(connection, [unit.without(own) for unit in units])

    def _own(self, connection: sqlite3.Connection, namespace: str, ids: Iterable[str]) -> set[str]:
        """Return those of some ids that only prompts to this machine brought, so that others could not delete them."""
        if getattr(self._holder, "at", None) is None:
            return set()
        loose = [id for id in ids if document_of(connection, namespace, id) is None]
        there = self._log.has([UnitName(namespace, id=id).packed() for id in loose])
        return {id for id, is_there in zip(loose, there, strict=True) if not is_there}

    def _send(self, connection: sqlite3.Connection, units: Sequence[Unit]) -> None:
        """Write units to the log where they are changed here, not read from it."""
        at: tuple[str, int] | None = getattr(self._holder, "at", None)
        if at is not None and units:
            states = {unit.name.packed(): unit.packed() for unit in units}
            _note(connection, *self._log.change(*at, states))

    def _mark(self, birth: str, position: int) -> None:
        self._database.transact(lambda connection: _note(connection, birth, position))

    @contextmanager
    def _alone(self, patience_s: float) -> Iterator[None]:
        """Keep other threads and processes of this machine from reading the log; its holder looks names up as they are."""
        self._database.check_open()
        until = time.monotonic() + patience_s
        if not self._lock.acquire(timeout=patience_s):
            raise StoreError(
                f"the names at {self._log.location} are being read for too long by another thread; try again"
            )
        self._holder.is_here = True
        try:
            with self._alone_in_folder(until):
                yield
        finally:
            self._holder.is_here = False
            self._lock.release()

    def _alone_in_folder(self, until: float) -> AbstractContextManager[None]:
        otherwise = f"the names at {self._log.location} are being read for too long by another process; try again"
        return nullcontext() if self._path is None else locked(self._path, until, otherwise)


def _held(drafts: Drafts, unit: UnitName) -> list[str]:
    """Return the ids that a unit has here; a chunk that has come into a document is that document's."""
    if unit.document is not None:
        return drafts.ids(unit.document)
    return [unit.id] if unit.id is not None and drafts.document_of(unit.id) is None else []


def _units_now(connection: sqlite3.Connection, namespace: str, drafts: Drafts, alone: Iterable[str]) -> Iterator[Unit]:
    """Yield the documents that were drafted, and chunks that are of none, or were, as they are now."""
    row = connection.execute("SELECT tenant FROM namespaces WHERE namespace = ?", (namespace,)).fetchone()
    tenant = "" if row is None else str(row[0])
    # What has seen a chunk that went is read again as it is now.
    now = Drafts(connection, namespace)
    for document in drafts.names():
        yield Unit(UnitName(namespace, document=document), tenant, now.pieces(document))
    for id in dict.fromkeys(alone):
        [record] = look_up(connection, namespace, [id])
        pieces = [] if record is None or drafts.document_of(id) is not None else [NamedPiece(record, None)]
        yield Unit(UnitName(namespace, id=id), tenant, pieces)


def _unpacked(states: Mapping[str, bytes | None]) -> list[Unit]:
    """Return units from their names and states."""
    return [Unit.unpacked(UnitName.unpacked(name), state) for name, state in states.items()]


def _note(connection: sqlite3.Connection, birth: str, position: int) -> None:
    """Note up to where the log is followed."""
    connection.execute("INSERT OR REPLACE INTO shared VALUES (1, ?, ?)", (birth, position))
