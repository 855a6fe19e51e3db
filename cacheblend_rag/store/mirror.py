"""The mirror: a database beside the index that repeats what it says of names and KV, for when the index is damaged.

Triggers write it in the transactions that write the index; it is read when the index is in doubt, and at no other time. It keeps
no log beside it, as the index does: with the log would go what was deleted last. The revision of both tells which one is behind,
where one was put back or lost its log; where the index can no longer be read, the revision is in a small file besides.

It is not synced: after the machine has gone down it is made anew from the index, which is.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cacheblend_rag.store.locks import let_go
from cacheblend_rag.store.schema import MIRRORED, columns

__all__ = ["alone_in", "attach_mirror", "follow", "last_revision", "mirror_of", "renew_mirror", "revisions"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def mirror_of(index: Path) -> Path:
    """Return where the mirror of an index is."""
    return index.with_name("mirror.sqlite")


def attach_mirror(connection: sqlite3.Connection, index: Path) -> None:
    """Have a connection to the index write the mirror too, made where there is none, or where the machine has gone down since."""
    path = mirror_of(index)
    if not path.exists():
        renew_mirror(index)
    connection.execute("ATTACH DATABASE ? AS mirror", (str(path),))
    now, mirrored = revisions(connection)
    if now == mirrored and connection.execute("SELECT boot FROM mirrored_revision").fetchone()[0] != _boot():
        connection.execute("DETACH DATABASE mirror")
        renew_mirror(index)
        connection.execute("ATTACH DATABASE ? AS mirror", (str(path),))
    # What is deleted is overwritten, and not kept in the journal: token ids are text.
    for setting in ("journal_mode = TRUNCATE", "secure_delete = ON", f"synchronous = {'OFF' if _boot() else 'NORMAL'}"):
        connection.execute(f"PRAGMA mirror.{setting}")
    connection.execute("PRAGMA temp_store = MEMORY")
    for table, (key, _) in MIRRORED.items():
        names = columns(table)
        removal = f"DELETE FROM mirrored_{table} WHERE " + " AND ".join(
            f"{name} = old.{name}" for name in key.split(", ")
        )
        # Not by a conflict's clause, since that of the statement which fires the trigger would count.
        addition = removal.replace("old.", "new.") + (
            f"; INSERT INTO mirrored_{table} ({', '.join(names)}) VALUES ({', '.join(f'new.{name}' for name in names)})"
        )
        for change, deeds in (
            ("INSERT", addition),
            ("DELETE", removal),
            (f"UPDATE OF {', '.join(names)}", f"{removal}; {addition}"),
        ):
            name = f"mirror_{table}_{change.split()[0].lower()}"
            connection.execute(f"CREATE TEMP TRIGGER {name} AFTER {change} ON main.{table} BEGIN {deeds}; END")


def revisions(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return the revision of the index and that of the mirror attached."""
    query = "SELECT (SELECT value FROM counters WHERE name = 'revision'), (SELECT value FROM mirrored_revision)"
    index, mirror = connection.execute(query).fetchone()
    return index, mirror


def follow(connection: sqlite3.Connection, before: int, index: Path) -> None:
    """Give the mirror the index's revision, if a transaction that is about to end has raised it."""
    now, _ = revisions(connection)
    if now != before:
        connection.execute("UPDATE mirrored_revision SET value = ?", (now,))
        # Where it cannot be written, an older one says less, and nothing wrong.
        with suppress(OSError):
            fd = os.open(_revision_file(index), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, b"%20d%20d" % (now, now), 0)
            finally:
                os.close(fd)


def last_revision(index: Path) -> int:
    """Return the revision that the index had last, or was about to have; 0 where that is not known."""
    try:
        first, second = map(int, _revision_file(index).read_bytes().split())
    except (OSError, ValueError):
        return 0
    return first if first == second else 0


def _revision_file(index: Path) -> Path:
    return index.with_name("revision")


def renew_mirror(index: Path) -> None:
    """Make the mirror anew from an index that is sound; the caller is alone in the folder."""
    path = mirror_of(index)
    new = path.with_name(path.name + ".new")
    with suppress(FileNotFoundError):
        new.unlink()
    os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with closing(sqlite3.connect(index, isolation_level=None)) as connection:
        connection.execute("ATTACH DATABASE ? AS mirror", (str(new),))
        connection.execute("PRAGMA mirror.journal_mode = OFF")
        connection.execute("PRAGMA mirror.synchronous = OFF")
        connection.execute("BEGIN")
        for table, (key, _) in MIRRORED.items():
            names = ", ".join(columns(table))
            connection.execute(f"CREATE TABLE mirror.mirrored_{table} ({names}, PRIMARY KEY ({key})) WITHOUT ROWID")
            connection.execute(f"INSERT INTO mirrored_{table} SELECT {names} FROM main.{table} ORDER BY {key}")
        connection.execute("CREATE TABLE mirror.mirrored_revision (value INTEGER NOT NULL, boot TEXT NOT NULL)")
        query = "INSERT INTO mirrored_revision SELECT value, ? FROM counters WHERE name = 'revision'"
        connection.execute(query, (_boot(),))
        connection.execute("COMMIT")
    # Of the old one's journal nothing is to be rolled back into the new one. Whoever has written since to the old one finds that
    # the new one is behind.
    with suppress(FileNotFoundError):
        path.with_name(path.name + "-journal").unlink()
    new.rename(path)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes, and other stores of this one, from replacing an index or a mirror in the same folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        let_go(fd)


def _boot() -> str:
    """Return what is another after the machine has gone down; "" where the system does not say."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""
