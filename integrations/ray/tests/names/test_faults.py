"""Names that machines share: against the naive library, while their server is killed, and while machines join."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import KVStore, open_store
from tests.core.documents.test_machine import SOME_IDS, DocumentMachine, run_machine
from tests.store.kit import record
from tests.store.remote.conftest import RedisServer

NAMESPACE = "ns"


def opened(folder: Path | None, names: str) -> KVStore:
    return open_store(folder, 10**6, names=names)


def until_it_answers(call: Callable[[], object]) -> None:
    """Call until it is no error any more."""
    until = time.monotonic() + 60
    while True:
        try:
            call()
            return
        except StoreError:
            assert time.monotonic() < until
            time.sleep(0.05)


class Writer(threading.Thread):
    """Adds and deletes names of its own on one machine, and knows what each must be: there, gone, or either."""

    def __init__(self, number: int, store: KVStore) -> None:
        super().__init__()
        self.number = number
        self.store = store
        self.is_over = threading.Event()
        self.acknowledged = 0
        self.refused = 0
        # The number that each id was last given, None where it was deleted; what was refused may have been done.
        self.sure: dict[str, int | None] = {}
        self.unsure: dict[str, set[int | None]] = {}
        self.failure: BaseException | None = None

    def run(self) -> None:
        rng = random.Random(self.number)
        try:
            while not self.is_over.is_set():
                id, number = f"w{self.number}-{rng.randrange(8)}", rng.randrange(100)
                wanted = None if rng.random() < 0.4 else number
                try:
                    if wanted is None:
                        self.store.forget(NAMESPACE, [id])
                    else:
                        self.store.name(NAMESPACE, [record(id, number)])
                except StoreError:
                    self.refused += 1
                    self.unsure.setdefault(id, {self.sure.get(id)}).add(wanted)
                    time.sleep(0.01)
                else:
                    self.acknowledged += 1
                    self.sure[id] = wanted
                    self.unsure.pop(id, None)
        except BaseException as error:
            self.failure = error

    def check(self, store: KVStore) -> None:
        """Assert that a machine has what was acknowledged."""
        ids = sorted(self.sure)
        for id, found in zip(ids, store.names.lookup(NAMESPACE, ids), strict=True):
            allowed = self.unsure.get(id, {self.sure[id]})
            assert found in [None if number is None else record(id, number) for number in allowed], id


@pytest.mark.parametrize("restarts", [2, pytest.param(10, marks=pytest.mark.full)])
def test_a_server_is_killed_while_names_change(tmp_path: Path, mortal: RedisServer, restarts: int) -> None:
    stores = [opened(tmp_path / name, mortal.url()) for name in ("a", "b")]
    writers = [Writer(number, store) for number, store in enumerate(stores)]
    for writer in writers:
        writer.start()
    for _ in range(restarts):
        time.sleep(0.7)
        mortal.kill()
        time.sleep(0.2)
        mortal.start()
        # Until changes are made again.
        before = [writer.acknowledged for writer in writers]
        until = time.monotonic() + 60
        while any(writer.acknowledged == seen for writer, seen in zip(writers, before, strict=True)):
            assert time.monotonic() < until and all(writer.failure is None for writer in writers)
            time.sleep(0.05)
    for writer in writers:
        writer.is_over.set()
        writer.join()
        assert writer.failure is None
    assert min(writer.refused for writer in writers) > 0
    third = opened(tmp_path / "c", mortal.url())
    stores.append(third)
    for store in stores:
        until_it_answers(lambda store=store: store.names.revision())
        for writer in writers:
            writer.check(store)
    assert len({tuple(sorted(store.names.ids(NAMESPACE))) for store in stores}) == 1
    for store in stores:
        store.close()


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

        # Each machine has pins of its own, which this one does not tell apart.
        @rule(second=st.booleans(), ids=SOME_IDS, pinned=st.booleans())
        def pin(self, second: bool, ids: list[str], pinned: bool) -> None:
            pass

    return SharedMachine


def test_sampled(names: str) -> None:
    run_machine(8, 15, machine=machine_at(names))


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_whole(names: str, part: int) -> None:
    run_machine(40, 40, part, machine_at(names), database=None)
