"""A warning that is documented to come once comes once, also from several threads."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cacheblend_rag import EngineConfig
from cacheblend_rag.codec import make_codec
from cacheblend_rag.errors import RemoteUnavailableError
from cacheblend_rag.store.device import DeviceTier
from cacheblend_rag.store.ram import RamTier
from cacheblend_rag.store.remote import open_remote
from cacheblend_rag.store.remote.offsite import Offsite
from cacheblend_rag.store.waiting import Computed, WriteBack
from tests.store.kit import key_of, make_kv

ROUNDS, THREADS = 20, 8


@pytest.fixture(autouse=True)
def _switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def at_once(action: Callable[[], object]) -> None:
    """Run an action in several threads that begin together."""
    together = threading.Barrier(THREADS)

    def run() -> None:
        together.wait()
        action()

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def warnings_of(caplog: pytest.LogCaptureFixture, make: Callable[[int], Callable[[], object]]) -> list[int]:
    counts = []
    for number in range(ROUNDS):
        action = make(number)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="cacheblend_rag"):
            at_once(action)
        counts.append(len(caplog.records))
    return counts


def test_a_device_without_room(caplog: pytest.LogCaptureFixture) -> None:
    def make(number: int) -> Callable[[], object]:
        tier = DeviceTier(100)
        return lambda: tier.tell_no_room(MemoryError("none left"))

    assert warnings_of(caplog, make) == [1] * ROUNDS


def test_memory_that_cannot_be_page_locked(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # As it is where the system grants no more of it.
    def refuse(self: torch.Tensor, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("no more page-locked memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    kv = make_kv(1)

    def make(number: int) -> Callable[[], object]:
        tier = RamTier(2**30, make_codec("native"), page_locked=True)
        return lambda: tier.put(key_of(1), kv)

    assert warnings_of(caplog, make) == [1] * ROUNDS


def test_a_queue_that_is_full_counts_each(caplog: pytest.LogCaptureFixture) -> None:
    queues: list[WriteBack] = []

    def make(number: int) -> Callable[[], object]:
        queues.append(WriteBack(lambda chunk: None, 1))
        queue, kv = queues[-1], make_kv(1)
        return lambda: [queue.put(Computed(key_of(1), kv, "space", "", [], [], None)) for _ in range(20)]

    assert warnings_of(caplog, make) == [1] * ROUNDS
    assert [queue.refused.total() for queue in queues] == [20 * THREADS] * ROUNDS
    for queue in queues:
        queue.close()


def test_an_outage_of_a_remote_tier(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    def make(number: int) -> Callable[[], object]:
        offsite = Offsite(open_remote(f"file://{tmp_path}/share"), make_codec("native"))
        return lambda: offsite._tell(RemoteUnavailableError("it does not answer"))

    assert warnings_of(caplog, make) == [1] * ROUNDS


def test_a_variable_that_is_no_setting(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(number: int) -> Callable[[], object]:
        monkeypatch.setenv(f"CACHEBLEND_NO_SETTING_{number}", "1")
        return lambda: EngineConfig.of(None)

    assert warnings_of(caplog, make) == [1] * ROUNDS
