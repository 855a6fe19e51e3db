"""kill -9 at random moments of writing, reading, evicting and collecting, by four processes on one store."""

from __future__ import annotations

import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from cacheblend_rag.store import check_store, open_store
from tests.faults import workers
from tests.store.kit import is_held, key_of, record, start

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
        running[worker] = start(workers.use_until_killed, folder, log, worker, turn, disk_bytes)

    for worker in range(PROCESSES):
        begin(worker, 0)
    _wait_for(log)
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
    for number in (number for number, there in zip(kept, held, strict=True) if there):
        assert is_held(store, number)
    store.close()
    report = check_store(folder)
    assert report.problems == []
    assert disk_bytes is None or report.bytes <= disk_bytes


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert path.exists()
