"""The documents' machine once more, with two machines that share names and nothing else."""

from pathlib import Path

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cacheblend_rag.store import KVStore, open_store
from tests.core.documents.test_machine import SOME_IDS, DocumentMachine, run_machine


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
