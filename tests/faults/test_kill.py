"""kill -9 at random moments of writing, reading, evicting and collecting, by four processes on one store."""

import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cacheblend_rag.store import check_store, open_store
from tests.limits import wait_until
from tests.store.kit import add, files_of, is_held, key_of, make_kv, read, record, same, start

PROCESSES = 4


@pytest.mark.parametrize(
    "kills", [12, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(900)])], ids=["sampled", "whole"]
)
@pytest.mark.parametrize("disk_bytes", [None, 60_000], ids=["unbounded", "evicting"])
def test_kills(tmp_path: Path, kills: int, disk_bytes: int | None) -> None:
    folder, log = tmp_path / "store", tmp_path / "log"
    chance = random.Random(kills)
    running: dict[int, BaseProcess] = {}

    def begin(worker: int, turn: int) -> None:
        running[worker] = start(use_until_killed, folder, log, worker, turn, disk_bytes)

    for worker in range(PROCESSES):
        begin(worker, 0)
    wait_until(log.exists)
    for kill in range(1, kills + 1):
        time.sleep(chance.uniform(0.01, 0.15))
        worker = chance.randrange(PROCESSES)
        running[worker].kill()
        running[worker].join()
        begin(worker, kill)
    for process in running.values():
        process.kill()
        process.join()

    deeds = [line.split() for line in log.read_text(encoding="ascii").splitlines()]
    assert [number for deed, number in deeds if deed == "wrong"] == []
    put = {int(number) for deed, number in deeds if deed == "put"}
    forgotten = {int(number) for deed, number in deeds if deed == "forget"}
    kept = sorted(put - forgotten)
    assert len(kept) > kills, "the processes came to nothing"

    store = open_store(folder, 0, disk_bytes)
    assert store.names.lookup("ns", [f"n{number}" for number in kept]) == [
        record(f"n{number}", number) for number in kept
    ]
    held = store.holds([key_of(number) for number in kept])
    assert disk_bytes is not None or all(held)
    # A file goes before its entry does: killed between, while it made room, a process leaves a miss.
    files = {file.stem for file in files_of(folder)}
    for number in (number for number, there in zip(kept, held, strict=True) if there):
        assert is_held(store, number) or (disk_bytes is not None and key_of(number) not in files)
    store.close()
    report = check_store(folder)
    assert all(disk_bytes is not None and problem.endswith("is missing") for problem in report.problems)
    assert disk_bytes is None or report.bytes <= disk_bytes


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
