"""What other processes do to a store."""

import os
import random
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import KVStore, open_store
from tests.store.kit import add, key_of, make_kv, piece, put, read, record, same


def name_together(folder: Path, names: str, worker: int, count: int) -> None:
    """Change a document that other machines change too, each its own chunk, and one that all write; and names of its own."""
    store = open_store(folder, 10**6, names=names)
    for number in range(count):
        store.name("ns", [piece(f"w{worker}", "d", 10 * worker, number), piece("shared", "d", 100, worker)])
        store.name("ns", [record(f"w{worker}-{number}", number)])
    store.close()


def name_until_killed(connection: Connection, folder: Path, names: str, worker: int) -> None:
    """Name chunks and forget one of them, again and again; each that is done is told."""
    store = open_store(folder, 10**6, names=names)
    for number in range(10**6):
        id = f"{worker}-{number % 7}"
        if number % 7 == 0 and number:
            store.forget("ns", [id])
            connection.send((id, False))
        elif number < 7:
            store.name("ns", [record(id, number)])
            connection.send((id, True))
        else:
            store.name("ns", [record(f"{worker}-0", number)])
            connection.send((f"{worker}-0", True))


def work_together(folder: Path, seed: int, steps: int, disk_bytes: int | None) -> None:
    """Do anything to a few keys that other processes use too."""
    store = open_store(folder, 6_000, disk_bytes)
    work(store, seed, steps)
    store.close()


def work(store: KVStore, seed: int, steps: int) -> None:
    """Do anything to a few keys that others use too; whatever is read must be right."""
    chance = random.Random(seed)
    for _ in range(steps):
        number = chance.randrange(12)
        deed = chance.choice(["put", "put", "open", "open", "open", "name", "forget", "discard"])
        if deed == "put":
            store.name("ns", [record(f"n{chance.randrange(6)}", number)])
            store.put(key_of(number), make_kv(number))
        elif deed == "open":
            reader = store.open(key_of(number))
            assert reader is None or same(read(reader), make_kv(number))
        elif deed == "name":
            store.name("ns", [record(f"n{chance.randrange(6)}", number)])
        elif deed == "forget":
            store.forget("ns", [f"n{chance.randrange(6)}"])
        else:
            store.discard(key_of(number))


def use_after_fork(folder: Path | None) -> None:
    """Use a store in a forked child, which is refused, and end it there in the usual way; the parent goes on with it."""
    store = open_store(folder, 10**6)
    put(store, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        for use in (lambda: store.holds([key_of(1)]), lambda: store.open(key_of(1)), lambda: store.names.ids("ns")):
            with pytest.raises(ConfigError, match="opened before the process was forked"):
                use()
        store.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    put(store, 2)
    assert store.holds([key_of(1), key_of(2)]) == [True, True]
    store.close()


def write_some(folder: Path, numbers: Sequence[int], gone: Sequence[str] = ()) -> None:
    """Store chunks, and forget names."""
    store = open_store(folder, 0)
    add(store, *numbers)
    store.forget("ns", gone)
    store.close()


def end_without_closing(folder: Path) -> None:
    """End in the usual way with KV that waits to be written."""
    store = open_store(folder, 10**6)
    for number in range(8):
        store.put_later(key_of(number), make_kv(number), "ns", {}, record(f"n{number}", number))
