"""A machine's own copy of the names that machines share: brought up to date before each look-up, changed in step with all."""

from __future__ import annotations

import fcntl
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from cacheblend_rag.errors import RemoteUnavailableError, StoreError
from cacheblend_rag.store.clock import StoreClock
from cacheblend_rag.store.database import Database
from cacheblend_rag.store.index import Dropped
from cacheblend_rag.store.locks import let_go
from cacheblend_rag.store.names import Names, Publish
from cacheblend_rag.store.shared.log import Behind, NameLog
from cacheblend_rag.store.unit import Unit, UnitName
from cacheblend_rag.store.waiting import WriteBack

__all__ = ["SharedNames", "follows_others"]

Result = TypeVar("Result")

# How long a look-up waits for another one of this machine to bring the names up to date.
_PATIENCE_S = 5.0
_POLL_S = 0.002
# How long a change is tried that others are always quicker than, and the first wait.
_TRY_S, _FIRST_WAIT_S, _LONGEST_WAIT_S = 30.0, 0.002, 0.1


class SharedNames:
    """The names in a log, followed by an index.

    One thread of one process of a machine at a time reads the log and writes to the index what has changed; who looks names up
    waits for it. A change is made in a transaction of the index, which the log's answer lets commit: if others were quicker, it
    is rolled back, what they did is read, and it is made again on that.

    Parameters
    ----------
    log : NameLog
        The log. It is closed with this.
    database : Database
        Where the names are, and the position up to which the log was followed.
    clock : StoreClock
        The store's time, by which chunks expire.
    folder : Path or None
        The store's folder, which other processes may have open.
    names : Names
        The index's names.
    waiting : WriteBack
        What is to be named yet.
    drop : callable
        Has the tiers follow what the names have dropped.
    """

    def __init__(
        self,
        log: NameLog,
        database: Database,
        clock: StoreClock,
        folder: Path | None,
        names: Names,
        waiting: WriteBack,
        drop: Callable[[Dropped], None],
    ) -> None:
        self._log = log
        self._database = database
        self._clock = clock
        self._path = None if folder is None else folder / "shared.lock"
        self._names = names
        self._waiting = waiting
        self._drop = drop
        self._lock, self._process = threading.Lock(), os.getpid()
        self._holder = threading.local()

    def catch_up(self) -> None:
        """Bring the index up to date.

        Raises
        ------
        RemoteUnavailableError
            If the log is out of reach: what is in the index may be out of date, and is not looked up.
        """
        if getattr(self._holder, "is_here", False):
            return
        with self._alone(_PATIENCE_S):
            self._read()

    def change(self, deed: Callable[[Publish], Result]) -> Result:
        """Return what `deed` returns, which changes names in a transaction that ends by what it is called with.

        Raises
        ------
        RemoteUnavailableError
            If the log is out of reach, or others are quicker again and again; nothing has changed.
        """
        until, wait_s = time.monotonic() + _TRY_S, _FIRST_WAIT_S
        while True:
            with self._alone(_TRY_S):
                at = self._read()
                try:
                    return deed(partial(self._publish, at))
                except Behind:
                    pass
            if time.monotonic() > until:
                raise RemoteUnavailableError(
                    f"the names at {self._log.location} are changed by others all the time; nothing was changed, so try again"
                )
            time.sleep(random.uniform(0, wait_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _publish(self, at: tuple[str, int], connection: sqlite3.Connection, units: Sequence[Unit]) -> None:
        ahead_s = self._clock.ahead_s()
        states = {unit.name.packed(): unit.packed(ahead_s) for unit in units}
        if states:
            _note(connection, *self._log.change(*at, states))

    def close(self) -> None:
        """Release connections."""
        self._log.close()

    def _read(self) -> tuple[str, int]:
        """Write to the index what has changed; return the log's birth and the position that the index is at."""
        at = self._database.healing(lambda: _position(self._database)) or self._begin()
        page = self._log.since(*at)
        if at[0] and not page.continues:
            raise StoreError(
                f"the names at {self._log.location} are not those that this store has followed up to change {at[1]}: the server "
                "has lost what it had acknowledged, or is another one. Restore its data; where that is lost, warm a new folder"
            )
        with self._database.patient():
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
                self._take([(UnitName.unpacked(name), state) for name, state in page.changed.items()])
            if at != (page.birth, page.position):
                self._mark(page.birth, page.position)
        return page.birth, page.position

    def _begin(self) -> tuple[str, int]:
        """Note that the index follows a log from now on; its names so far are nobody else's."""
        with self._database.read() as connection:
            has_names = connection.execute("SELECT 1 FROM nodes LIMIT 1").fetchone() is not None
        if has_names:
            raise StoreError(
                f"this store has names of its own, which those at {self._log.location} would replace: begin with another folder, "
                "or empty this one (`cacheblend-rag store clear`), and warm it again; KV in the remote tier is found there"
            )
        with self._database.patient():
            self._mark("", 0)
        return "", 0

    def _read_all(self) -> None:
        """Have in the index what the log has, and nothing else."""
        seen: set[str] = set()
        for units in self._log.units():
            seen.update(units)
            self._take([(UnitName.unpacked(name), state) for name, state in units.items()])
        self._take([(name, None) for name in self._names.units() if name.packed() not in seen])

    def _take(self, units: Sequence[tuple[UnitName, bytes | None]]) -> None:
        ahead_s = self._clock.ahead_s()
        by_namespace = sorted(units, key=lambda each: each[0].namespace)
        for namespace, group in groupby(by_namespace, key=lambda each: each[0].namespace):
            self._adopt(namespace, [Unit.unpacked(name, state, ahead_s) for name, state in group])

    def _adopt(self, namespace: str, units: Sequence[Unit]) -> None:
        """Have units be what they are elsewhere, and what prompts brought of them here, written yet or not, go with them."""
        there = {piece.record.id for unit in units for piece in unit.pieces}
        gone = {unit.name.id for unit in units if unit.name.id is not None and not unit.pieces} - there
        self._waiting.forget(namespace, list(gone))
        waiting = self._waiting.records(namespace)
        ended, dropped = self._names.adopt(namespace, units)
        self._drop(dropped)
        waiting |= self._waiting.records(namespace)
        late = [id for id, record in waiting.items() if record.source in ended and id not in there]
        if late:
            self._waiting.forget(namespace, late)
            # Those that were written while this was done.
            self._drop(self._names.remove(namespace, late)[-1])

    def _mark(self, birth: str, position: int) -> None:
        self._database.transact(lambda connection: _note(connection, birth, position))

    @contextmanager
    def _alone(self, patience_s: float) -> Iterator[None]:
        """Keep other threads and processes of this machine from reading the log; whoever is inside looks names up as they are."""
        if self._process != os.getpid():
            # Somebody else's thread may have held it when this process was forked.
            self._lock, self._process = threading.Lock(), os.getpid()
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

    @contextmanager
    def _alone_in_folder(self, until: float) -> Iterator[None]:
        if self._path is None:
            yield
            return
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise StoreError(
                            f"the names at {self._log.location} are being read for too long by another process; try again"
                        ) from None
                    time.sleep(_POLL_S)
            yield
        finally:
            let_go(fd)


def follows_others(database: Database) -> bool:
    """Return whether an index is a copy of shared names, whoever follows them now."""
    return _position(database) is not None


def _position(database: Database) -> tuple[str, int] | None:
    """Return the birth of the log that an index follows, and up to where; None if it follows none."""
    with database.read() as connection:
        row = connection.execute("SELECT birth, position FROM shared").fetchone()
    return None if row is None else (str(row[0]), int(row[1]))


def _note(connection: sqlite3.Connection, birth: str, position: int) -> None:
    """Note up to where the log is followed."""
    connection.execute("INSERT OR REPLACE INTO shared VALUES (1, ?, ?)", (birth, position))
