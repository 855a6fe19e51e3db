"""The names of all machines in a database: what each document is now, and the number of the change that made it so."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sql
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from cacheblend_rag.errors import ConfigError, RemoteUnavailableError, StoreError, StoreFormatError
from cacheblend_rag.store import NodeRecord
from cacheblend_rag.store.index import valid_key

__all__ = ["NameTable", "Session", "Unit", "UnitName"]

_VERSION = 2
_PAGE = 500
# How long a change waits for another one that is being made.
_WAIT_S = 30

_TABLES = sql.MetaData()
# One row: random digits, which another database has others of, and how many changes there were.
_LOG = sql.Table(
    "cacheblend_log",
    _TABLES,
    sql.Column("version", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("birth", sql.Text, nullable=False),
    sql.Column("position", sql.BigInteger, nullable=False),
)
# The state of each document and of each chunk of none, which is null once it is deleted.
_UNITS = sql.Table(
    "cacheblend_units",
    _TABLES,
    sql.Column("name", sql.Text, primary_key=True),
    sql.Column("position", sql.BigInteger, nullable=False, index=True),
    sql.Column("tenant", sql.Text, nullable=False),
    sql.Column("state", sql.Text),
)
_STATE = TypeAdapter(list[NodeRecord])


@dataclass(frozen=True, slots=True)
class UnitName:
    """Name of a document, or of a chunk that is of none."""

    namespace: str
    document: str | None = None
    id: str | None = None

    def packed(self) -> str:
        """Return it as a text."""
        return json.dumps([self.namespace, self.document, self.id])


@dataclass(frozen=True, slots=True)
class Unit:
    """A document, or a chunk of none, as it is now: its chunks in the order in which they came, none where it is no more."""

    name: UnitName
    tenant: str = ""
    pieces: Sequence[NodeRecord] = ()

    @property
    def reaches_out(self) -> bool:
        """Whether a chunk of it was read behind one that is not."""
        own = {piece.id for piece in self.pieces}
        laters = (piece.later for piece in self.pieces)
        return any(id not in own for later in laters if later is not None for id, _ in later.seen)

    def row(self, position: int) -> dict[str, Any]:
        """Return it as a row of the table."""
        state = _STATE.dump_json(list(self.pieces)).decode() if self.pieces else None
        return {"name": self.name.packed(), "position": position, "tenant": self.tenant, "state": state}

    @classmethod
    def of_row(cls, name: str, tenant: str, state: str | None) -> Unit:
        """Return what `row` made a row of; its keys are such, since files are called by them."""
        try:
            made = cls(UnitName(*json.loads(name)), tenant, [] if state is None else _STATE.validate_json(state))
        except (ValueError, TypeError, ValidationError) as error:
            raise StoreError(f"the shared entry of {name:.80} cannot be read; add it again, or delete it") from error
        for piece in made.pieces:
            for key in piece.keys:
                valid_key(key)
        return made


class Session:
    """What is asked of the table in one go, up to the change at `position`; where it may change, nobody else does meanwhile."""

    def __init__(self, connection: sql.Connection, birth: str, position: int) -> None:
        self.birth, self.position = birth, position
        self._connection = connection
        self._is_done = False

    def since(self, position: int) -> Iterator[list[Unit]]:
        """Yield what has changed since a position, a page at a time."""
        query = sql.select(_UNITS.c.name, _UNITS.c.tenant, _UNITS.c.state, _UNITS.c.position)
        query = query.order_by(_UNITS.c.position, _UNITS.c.name).limit(_PAGE)
        behind = _UNITS.c.position > position
        while rows := self._connection.execute(query.where(behind)).all():
            yield [Unit.of_row(*row[:3]) for row in rows]
            last = rows[-1]
            of_same = (_UNITS.c.position == last.position) & (_UNITS.c.name > last.name)
            behind = (_UNITS.c.position > last.position) | of_same

    def change(self, units: Sequence[Unit]) -> None:
        """Give units their states for all machines, and end the change; a second call of the same change does nothing."""
        if self._is_done:
            return
        self.position += 1
        rows = [unit.row(self.position) for unit in units]
        gone = [{"gone": row["name"]} for row in rows]
        self._connection.execute(sql.delete(_UNITS).where(_UNITS.c.name == sql.bindparam("gone")), gone)
        self._connection.execute(sql.insert(_UNITS), rows)
        self._connection.commit()
        self._is_done = True


class NameTable:
    """Documents, and chunks of none, each of which changes as a whole; a change of several is one step for all readers.

    Nothing is connected to before it is used. `session` raises `RemoteUnavailableError` where the database is out of reach. The
    URL is as SQLAlchemy reads it: ``postgresql+psycopg://user:password@host/database``, or ``sqlite:////folder/names.sqlite``.
    """

    def __init__(self, url: str) -> None:
        try:
            made = sql.make_url(url)
            self.location = made.set(username=None, password=None, query={}).render_as_string()
            is_sqlite = made.get_backend_name() == "sqlite"
            if is_sqlite and made.database in (None, "", ":memory:"):
                raise ConfigError(
                    "ids in memory are shared with nobody; give a file, such as sqlite:////folder/names.sqlite"
                )
            options = f"-c lock_timeout={_WAIT_S}s -c idle_in_transaction_session_timeout={2 * _WAIT_S}s"
            given = {"timeout": _WAIT_S} if is_sqlite else {"connect_timeout": 10, "options": options}
            self._engine = sql.create_engine(made, connect_args=given, hide_parameters=True)
        except (ArgumentError, NoSuchModuleError, ImportError) as error:
            raise ConfigError(
                f"ids cannot be shared at such an address ({type(error).__name__}); give postgresql+psycopg://user@host/database "
                "(with psycopg installed), or sqlite:////folder/names.sqlite"
            ) from error
        if is_sqlite:
            # What is deleted is overwritten: token ids are text.
            sql.event.listen(self._engine, "connect", lambda raw, _: raw.execute("PRAGMA secure_delete = ON"))
        self._is_there = False

    @contextmanager
    def session(self, *, changes: bool = False) -> Iterator[Session]:
        """Ask the table; with `changes` others wait until it is over, and nothing is kept unless `Session.change` was called."""
        try:
            self._prepare()
            with self._engine.connect() as connection:
                if changes:
                    # Written before anything is read, since this is what others wait for.
                    connection.execute(sql.update(_LOG).values(position=_LOG.c.position + 1))
                else:
                    connection.execution_options(isolation_level="AUTOCOMMIT")
                birth, position = connection.execute(sql.select(_LOG.c.birth, _LOG.c.position)).one()
                yield Session(connection, birth, position - changes)
        except SQLAlchemyError as error:
            said = str(error.orig).strip().partition("\n")[0] if isinstance(error, DBAPIError) else type(error).__name__
            raise RemoteUnavailableError(f"the ids at {self.location} cannot be read or changed now ({said})") from None

    def close(self) -> None:
        """Release connections."""
        self._engine.dispose()

    def _prepare(self) -> None:
        """Make the tables where there are none; several machines may do so at once."""
        for trial in range(3):
            if self._is_there:
                return
            try:
                _TABLES.create_all(self._engine)
                with self._engine.begin() as connection:
                    versions = connection.execute(sql.select(_LOG.c.version)).scalars().all()
                    if not versions:
                        connection.execute(
                            sql.insert(_LOG).values(version=_VERSION, birth=secrets.token_hex(8), position=0)
                        )
            except DBAPIError:
                if trial == 2:
                    raise
                continue
            if versions and versions != [_VERSION]:
                raise StoreFormatError(
                    f"the ids at {self.location} are in format version {versions[0]}, but this cacheblend-rag reads version "
                    f"{_VERSION}; give another database and warm it, or use the cacheblend-rag that wrote it"
                )
            self._is_there = True
