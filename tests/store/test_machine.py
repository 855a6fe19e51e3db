"""Any sequence of calls, against a dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cacheblend_rag.store import KVStore, check_store, open_store
from tests.store.kit import key_of, make_kv, read, record, same

NUMBERS = st.integers(0, 5)
NODES = st.sampled_from(["a", "b", "c"])
SPACES = st.sampled_from(["x", "y"])
FILE_BYTES = 2_600


class StoreMachine(RuleBasedStateMachine):
    """One folder opened twice, as by two processes; `second` says which of the two is used."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.names: dict[str, dict[str, int]] = {"x": {}, "y": {}}
        self.held: set[int] = set()
        self.stores: list[KVStore] = []

    @initialize(ram=st.sampled_from([0, 4_000, 10**6]), room=st.sampled_from([None, 3]))
    def make(self, ram: int, room: int | None) -> None:
        self.ram_bytes = ram
        self.disk_bytes = None if room is None else room * FILE_BYTES
        self.stores = [open_store(self.folder, ram, self.disk_bytes) for _ in range(2)]

    def drop_nameless(self, number: int) -> None:
        if not any(number in nodes.values() for nodes in self.names.values()):
            self.held.discard(number)

    @rule(second=st.booleans(), number=NUMBERS)
    def put(self, second: bool, number: int) -> None:
        self.stores[second].put(key_of(number), make_kv(number))
        self.held.add(number)
        assert self.stores[not second].holds([key_of(number)]) == [True]

    @rule(second=st.booleans(), number=NUMBERS, layers=st.integers(0, 3))
    def open(self, second: bool, number: int, layers: int) -> None:
        reader = self.stores[second].open(key_of(number))
        assert number in self.held or reader is None
        assert reader is not None or number not in self.held or self.disk_bytes is not None
        if reader is not None:
            if layers == 3:
                assert same(read(reader), make_kv(number))
            for layer in range(layers):
                reader.layer(layer)

    @rule(second=st.booleans(), space=SPACES, node=NODES, number=NUMBERS)
    def name(self, second: bool, space: str, node: str, number: int) -> None:
        self.stores[second].name(space, [record(node, number)])
        before = self.names[space].get(node)
        self.names[space][node] = number
        if before is not None:
            self.drop_nameless(before)

    @rule(second=st.booleans(), space=SPACES, nodes=st.lists(NODES, max_size=3))
    def forget(self, second: bool, space: str, nodes: list[str]) -> None:
        known = {node for node in nodes if node in self.names[space]}
        assert self.stores[second].forget(space, nodes) == len(known)
        numbers = [self.names[space].pop(node) for node in known]
        for number in numbers:
            self.drop_nameless(number)

    @rule(second=st.booleans(), number=NUMBERS)
    def discard(self, second: bool, number: int) -> None:
        self.stores[second].discard(key_of(number))
        self.held.discard(number)

    @rule(second=st.booleans())
    def reopen(self, second: bool) -> None:
        self.stores[second].close()
        self.stores[second] = open_store(self.folder, self.ram_bytes, self.disk_bytes)

    @rule(second=st.booleans())
    def clear(self, second: bool) -> None:
        self.stores[second].clear()
        self.names = {"x": {}, "y": {}}
        self.held.clear()

    @invariant()
    def agrees(self) -> None:
        for store in self.stores:
            there = {number for number in range(6) if store.holds([key_of(number)])[0]}
            assert there == self.held if self.disk_bytes is None else there <= self.held
            stats = store.stats()
            assert stats.entries == len(there)
            assert stats.nodes == sum(map(len, self.names.values()))
            assert stats.ram_bytes <= self.ram_bytes
            assert self.disk_bytes is None or stats.disk_bytes <= self.disk_bytes
            for space, nodes in self.names.items():
                assert store.names(space) == list(nodes)
                expected = [record(node, nodes[node]) if node in nodes else None for node in ("a", "b", "c")]
                assert store.lookup(space, ["a", "b", "c"]) == expected
        if self.disk_bytes is not None and self.stores:
            self.held = there

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        if self.stores:
            report = check_store(self.folder)
            assert report.problems == []
            assert report.entries == len(self.held)
        shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
