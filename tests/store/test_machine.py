"""Any sequence of calls by two processes, against a dictionary."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store import NodeRecord, check_store, collect_garbage
from tests.store.elsewhere import LocalStore, Opened, RemoteStore
from tests.store.kit import key_of, make_kv, record, same

NUMBERS = st.integers(0, 5)
NODES = st.sampled_from(["a", "b", "c"])
# Each namespace, and the chunks under its names, is one tenant's.
TENANTS = {"x": "", "y": "acme"}
SPACES = st.sampled_from(sorted(TENANTS))
LIVES = st.sampled_from([None, 50.0, 100.0])
FILE_BYTES = 2_600
EVER = float("inf")


def key(space: str, number: int) -> str:
    """Return the key of a text, which is another one for another tenant."""
    return key_of(number + 100 * (space == "y"))


@dataclass
class Model:
    """What a store should hold."""

    names: dict[str, dict[str, int]] = field(default_factory=lambda: {"x": {}, "y": {}})
    # When what is held expires.
    held: dict[tuple[str, int], float] = field(default_factory=dict)

    def drop_nameless(self, space: str, number: int) -> None:
        if number not in self.names[space].values():
            self.held.pop((space, number), None)


class StoreMachine(RuleBasedStateMachine):
    """One folder that this process and another have open; `second` says which of the two is called."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.model = Model()
        self.now = 1.8e9
        self.stores: list[LocalStore | RemoteStore] = []

    @initialize(
        ram=st.sampled_from([0, 4_000, 10**6]),
        room=st.sampled_from([None, 3]),
        device=st.sampled_from([0, 4_000, 10**6]),
    )
    def make(self, ram: int, room: int | None, device: int) -> None:
        self.ram_bytes = ram
        self.device_bytes = device
        self.disk_bytes = None if room is None else room * FILE_BYTES
        self.opened = Opened(self.folder, ram, self.disk_bytes, 10**6, device)
        self.stores = [LocalStore(self.opened, self.now), RemoteStore(self.opened, self.now)]

    def hold(self, space: str, number: int, ttl_s: float | None) -> None:
        until = EVER if ttl_s is None else self.now + ttl_s
        self.model.held[space, number] = max(until, self.model.held.get((space, number), 0.0))

    @rule(second=st.booleans(), space=SPACES, number=NUMBERS, ttl_s=LIVES)
    def put(self, second: bool, space: str, number: int, ttl_s: float | None) -> None:
        self.stores[second].call("put", key(space, number), make_kv(number), tenant=TENANTS[space], ttl_s=ttl_s)
        self.hold(space, number, ttl_s)
        assert self.stores[not second].call("holds", [key(space, number)]) == [True]

    @rule(second=st.booleans(), space=SPACES, node=NODES, number=NUMBERS, ttl_s=LIVES, gone=st.booleans())
    def put_later(self, second: bool, space: str, node: str, number: int, ttl_s: float | None, gone: bool) -> None:
        """Write the KV of a miss in the background; with `gone` its name is deleted before anybody waits for that."""
        store, options = self.stores[second], {"tenant": TENANTS[space], "ttl_s": ttl_s}
        before = self.model.names[space].get(node)
        records = [record_of(space, node, number)] if before is None else []
        known = {} if before is None else {node: None}
        assert store.call("put_later", key(space, number), make_kv(number), space, records, known, **options)
        if gone:
            assert store.call("forget", space, [node]) == 1
        store.call("flush")
        if before is None and not gone:
            self.model.names[space][node] = number
        if self.model.names[space].get(node) == number and not gone:
            self.hold(space, number, ttl_s)
        if gone:
            self.forgotten(space, node)
            # It may have been written and named before the deletion, which then took what was there without a name along.
            held = store.call("holds", [key(space, number)])[0]
            if before is None and not held:
                self.model.drop_nameless(space, number)
            # Or it stays for another name that leads to it.
            elif held and (space, number) not in self.model.held and number in self.model.names[space].values():
                self.hold(space, number, ttl_s)

    @rule(second=st.booleans(), space=SPACES, number=NUMBERS, layers=st.integers(0, 3))
    def open(self, second: bool, space: str, number: int, layers: int) -> None:
        found = self.stores[second].read(key(space, number), layers)
        is_held = (space, number) in self.model.held
        assert is_held or found is None
        assert found is not None or not is_held or self.disk_bytes is not None
        if isinstance(found, ChunkKV):
            assert same(found, make_kv(number))

    @rule(second=st.booleans(), space=SPACES, node=NODES, number=NUMBERS)
    def name(self, second: bool, space: str, node: str, number: int) -> None:
        self.stores[second].call("name", space, [record_of(space, node, number)], tenant=TENANTS[space])
        before = self.model.names[space].get(node)
        self.model.names[space][node] = number
        if before is not None:
            self.model.drop_nameless(space, before)

    @rule(second=st.booleans(), space=SPACES, nodes=st.lists(NODES, max_size=3))
    def forget(self, second: bool, space: str, nodes: list[str]) -> None:
        known = {node for node in nodes if node in self.model.names[space]}
        assert self.stores[second].call("forget", space, nodes) == len(known)
        for node in known:
            self.forgotten(space, node)

    def forgotten(self, space: str, node: str) -> None:
        number = self.model.names[space].pop(node, None)
        if number is not None:
            self.model.drop_nameless(space, number)

    @rule(second=st.booleans(), space=SPACES, number=NUMBERS)
    def discard(self, second: bool, space: str, number: int) -> None:
        self.stores[second].call("discard", key(space, number))
        self.model.held.pop((space, number), None)

    @rule(second=st.booleans(), space=SPACES, number=NUMBERS, ttl_s=LIVES)
    def prolong(self, second: bool, space: str, number: int, ttl_s: float | None) -> None:
        self.stores[second].call("prolong", [key(space, number)], ttl_s)
        if (space, number) in self.model.held:
            self.hold(space, number, ttl_s)

    @rule(seconds=st.sampled_from([1.0, 50.0, 75.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for store in self.stores:
            store.passes(seconds)
        self.model.held = {what: until for what, until in self.model.held.items() if until > self.now}

    @rule(second=st.booleans())
    def reopen(self, second: bool) -> None:
        self.stores[second].end()
        self.stores[second] = (RemoteStore if second else LocalStore)(self.opened, self.now)

    @rule()
    def kill(self) -> None:
        other = self.stores[1]
        assert isinstance(other, RemoteStore)
        other.kill()
        self.stores[1] = RemoteStore(self.opened, self.now)

    @rule()
    def collect(self) -> None:
        collect_garbage(self.folder, clock=lambda: self.now)

    @rule(second=st.booleans(), space=st.none() | SPACES)
    def clear(self, second: bool, space: str | None) -> None:
        self.stores[second].call("clear", None if space is None else TENANTS[space])
        for each in TENANTS if space is None else [space]:
            self.model.names[each] = {}
            self.model.held = {what: until for what, until in self.model.held.items() if what[0] != each}

    @precondition(lambda self: self.stores)
    @invariant()
    def agrees(self) -> None:
        expected = set(self.model.held)
        for store in self.stores:
            everything = [(space, number) for space in TENANTS for number in range(6)]
            holds = store.call("holds", [key(*each) for each in everything])
            there = {each for each, held in zip(everything, holds, strict=True) if held}
            assert there == expected if self.disk_bytes is None else there <= expected
            stats = store.call("stats")
            assert stats.entries >= len(there)
            assert stats.nodes == sum(map(len, self.model.names.values()))
            assert stats.ram_bytes <= self.ram_bytes
            assert stats.device_bytes <= self.device_bytes
            assert self.disk_bytes is None or stats.disk_bytes <= self.disk_bytes
            for space, nodes in self.model.names.items():
                assert store.call("stats", TENANTS[space]).nodes == len(nodes)
                assert sorted(store.call("names.ids", space)) == sorted(nodes)
                records = [record_of(space, node, nodes[node]) if node in nodes else None for node in ("a", "b", "c")]
                assert store.call("names.lookup", space, ["a", "b", "c"]) == records
        for each in expected - there:
            del self.model.held[each]

    def teardown(self) -> None:
        for store in self.stores:
            store.end()
        if self.stores:
            assert check_store(self.folder).problems == []
        shutil.rmtree(self.folder)


def record_of(space: str, node: str, number: int) -> NodeRecord:
    """Return the record of a name."""
    plain = record(node, number)
    return NodeRecord(node, key(space, number), plain.text_hash, plain.token_ids)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=8, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
