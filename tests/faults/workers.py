"""What the processes do that are killed."""

from __future__ import annotations

import os
import random
from pathlib import Path

from cacheblend_rag.store import open_store
from tests.store.kit import add, key_of, make_kv, read, record, same

# Numbers that every process reads and writes, and the first number of those that a process has for itself.
SHARED = range(16)
OWN = 1_000_000


def use_until_killed(folder: Path, log: Path, worker: int, turn: int, disk_bytes: int | None) -> None:
    """Write, name, read, forget and evict without end.

    Each line of the log is a deed that had returned: ``put N``, ``forget N`` of a number that no other process touches, or
    ``wrong N`` if KV was read that is not that of N, which must never be.
    """
    chance = random.Random(f"{worker}:{turn}")
    # So little RAM that it evicts all the time.
    store = open_store(folder, 3 * make_kv(0).nbytes, disk_bytes)
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    own = OWN * (1 + worker) + 10_000 * turn
    mine: list[int] = []
    while True:
        deed = chance.choice(["put", "put", "shared", "open", "open", "forget", "discard", "replace"])
        if deed == "put":
            own += 1
            add(store, own)
            os.write(log_fd, f"put {own}\n".encode())
            mine.append(own)
        elif deed == "shared":
            number = chance.choice(SHARED)
            store.put(key_of(number), make_kv(number))
            store.name("ns", [record(f"shared{chance.randrange(8)}", number)])
        elif deed == "open":
            number = chance.choice([*SHARED, *mine[-8:]])
            reader = store.open(key_of(number))
            if reader is not None and not same(read(reader), make_kv(number)):
                os.write(log_fd, f"wrong {number}\n".encode())
        elif deed == "forget" and mine and chance.random() < 0.5:
            number = mine.pop(chance.randrange(len(mine)))
            # Said before it is done: from here on the number may be there or not.
            os.write(log_fd, f"forget {number}\n".encode())
            store.forget("ns", [f"n{number}"])
        elif deed == "discard":
            store.discard(key_of(chance.choice(SHARED)))
        elif deed == "replace":
            # A name moves from one text to another, and the KV of the first goes.
            store.put(key_of(own + OWN // 2), make_kv(own + OWN // 2))
            store.name("ns", [record(f"moving{worker}", own + OWN // 2)])
