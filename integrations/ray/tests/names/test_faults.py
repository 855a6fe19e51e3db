"""Names that machines share: against the naive library, and while a machine joins that has what the others deleted."""

import threading
from pathlib import Path

import pytest
import redis

from cacheblend_rag.store import KVStore, open_store
from tests.core.documents.test_machine import DocumentMachine, run_machine
from tests.store.kit import record
from tests.store.remote.conftest import RedisServer

NAMESPACE = "ns"


def opened(folder: Path | None, names: str) -> KVStore:
    return open_store(folder, 10**6, names=names)


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.full)])
def test_a_joining_machine_has_nothing_deleted(tmp_path: Path, mortal: RedisServer, times: int) -> None:
    first = opened(tmp_path / "first", mortal.url())
    for number in range(times):
        ids = [f"{number}-{each}" for each in range(40)]
        first.name(NAMESPACE, [record(id, 1) for id in ids])
        made: list[KVStore] = []
        joining = threading.Thread(target=lambda made=made: made.append(opened(None, mortal.url())))
        joining.start()
        gone = ids[:: 1 + number % 3]
        first.forget(NAMESPACE, gone)
        joining.join()
        [joined] = made
        # The deletion was acknowledged before this look-up began.
        found = joined.names.lookup(NAMESPACE, ids)
        assert [record is None for record in found] == [id in gone for id in ids]
        joined.close()
        first.forget(NAMESPACE, ids)
    first.close()


def machine_at(url: str) -> type[DocumentMachine]:
    """Return a machine whose two engines have folders of their own, and names at a server."""

    class SharedMachine(DocumentMachine):
        def __init__(self) -> None:
            super().__init__()
            with redis.Redis.from_url(url) as client:
                client.flushall()

        def folder_of(self, second: bool) -> Path:
            return self.folder / str(int(second))

        def store_of(self, second: bool) -> KVStore:
            return open_store(self.folder_of(second), clock=lambda: self.now, names=url, **self.options)  # type: ignore[arg-type]

    return SharedMachine


def test_sampled(names: str) -> None:
    run_machine(8, 15, machine=machine_at(names))


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_whole(names: str, part: int) -> None:
    run_machine(40, 40, part, machine_at(names), database=None)
