"""Any sequence of calls by two processes, against a dictionary."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store import NodeRecord, check_store
from tests.store.elsewhere import LocalStore, Opened, RemoteStore
from tests.store.kit import damage, key_of, make_kv, record, same

NUMBERS = st.integers(0, 5)
NODES = st.sampled_from(["a", "b", "c"])
# Each namespace, and the chunks under its names, is one tenant's.
TENANTS = {"x": "", "y": "acme"}
SPACES = st.sampled_from(sorted(TENANTS))
EVERY = [(space, number) for space in TENANTS for number in range(6)]
BUDGETS = st.sampled_from([0, 4_000, 10**6])
FILE_BYTES = 2_600


def key(space: str, number: int) -> str:
    """Return the key of a text, which is another one for another tenant."""
    return key_of(number + 100 * (space == "y"))


def record_of(space: str, node: str, number: int) -> NodeRecord:
    plain = record(node, number)
    return NodeRecord(node, key(space, number), plain.text_hash, plain.token_ids)


@dataclass
class Model:
    """What a store should hold."""

    names: dict[str, dict[str, int]] = field(default_factory=lambda: {space: {} for space in TENANTS})
    held: set[tuple[str, int]] = field(default_factory=set)

    def drop_nameless(self, space: str, number: int) -> None:
        if number not in self.names[space].values():
            self.held.discard((space, number))

    def forget(self, space: str, node: str) -> None:
        number = self.names[space].pop(node, None)
        if number is not None:
            self.drop_nameless(space, number)


class Follower:
    """Keeps the names of a namespace in mind by what changed alone."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[str, str]] = {}
        self._mark: int | None = None

    def follow(self, store: LocalStore | RemoteStore) -> dict[str, str]:
        changes = store.call("names.changes", "x", self._mark)
        assert changes.whole == (self._mark is None)
        for number, id, digest in changes.names:
            self._names.pop(number, None)
            if id is not None:
                self._names[number] = id, digest
        self._mark = changes.mark
        return dict(self._names.values())


class FolderMachine(RuleBasedStateMachine):
    """One folder that this process and another have open; `second` says which of the two is called."""

    def __init__(self) -> None:
        super().__init__()
        self.folder: Path | None = Path(tempfile.mkdtemp())
        self.model = Model()
        self.stores: list[LocalStore | RemoteStore] = []
        self.followers = [Follower(), Follower()]

    @initialize(ram=BUDGETS, room=st.sampled_from([None, 3]))
    def make(self, ram: int, room: int | None) -> None:
        self.opened = Opened(self.folder, ram, None if room is None else room * FILE_BYTES)
        self.is_bounded = room is not None
        self.stores = [LocalStore(self.opened), RemoteStore(self.opened)]

    @rule(second=st.booleans(), space=SPACES, node=NODES, number=NUMBERS)
    def put(self, second: bool, space: str, node: str, number: int) -> None:
        self.name(second, space, node, number)
        self.stores[second].call("put", key(space, number), make_kv(number), tenant=TENANTS[space])
        self.model.held.add((space, number))
        assert self.stores[not second].call("holds", [key(space, number)]) == [True]

    @rule(second=st.booleans(), space=SPACES, node=NODES, number=NUMBERS, by=st.sampled_from([None, 0, 1]))
    def put_later(self, second: bool, space: str, node: str, number: int, by: int | None) -> None:
        """Write the KV of a miss in the background; the store `by` deletes its name before anybody waits for that."""
        gone = by is not None
        store, options = self.stores[second], {"tenant": TENANTS[space]}
        before = self.model.names[space].get(node)
        names = ({}, record_of(space, node, number)) if before is None else ({node: None},)
        store.call("put_later", key(space, number), make_kv(number), space, *names, **options)
        if by is not None:
            assert self.stores[by].call("forget", space, [node]) == 1
        store.call("flush")
        if gone:
            self.model.forget(space, node)
        elif before is None:
            self.model.names[space][node] = number
        held = store.call("holds", [key(space, number)])[0]
        if not gone and self.model.names[space].get(node) == number:
            self.model.held.add((space, number))
        elif held and number in self.model.names[space].values():
            # Another name leads to it: it was written for that one.
            self.model.held.add((space, number))
        elif gone and before is None and not held:
            # It was written and named before the deletion, which then took what was there without a name along.
            self.model.drop_nameless(space, number)

    @rule(second=st.booleans(), space=SPACES, number=NUMBERS, layers=st.integers(0, 3))
    def open(self, second: bool, space: str, number: int, layers: int) -> None:
        found = self.stores[second].read(key(space, number), layers)
        is_held = (space, number) in self.model.held
        assert is_held or found is None
        assert found is not None or not is_held or self.is_bounded
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
            self.model.forget(space, node)

    @rule(second=st.booleans(), space=SPACES, number=NUMBERS)
    def discard(self, second: bool, space: str, number: int) -> None:
        self.stores[second].call("discard", key(space, number))
        self.model.held.discard((space, number))

    @precondition(lambda self: self.folder is not None)
    @rule(second=st.booleans(), space=SPACES, number=NUMBERS)
    def damage(self, second: bool, space: str, number: int) -> None:
        """Change a bit of a file; what is found damaged is dropped, as engines do."""
        assert self.folder is not None
        file = self.folder / "kv" / key(space, number)[:2] / f"{key(space, number)}.safetensors"
        if file.exists():
            damage(file)
            found = self.stores[second].read(key(space, number), 3)
            # There may be a sound copy in memory.
            assert found is None or (isinstance(found, ChunkKV) and same(found, make_kv(number)))
            self.discard(second, space, number)

    @precondition(lambda self: self.folder is not None)
    @rule(second=st.booleans())
    def reopen(self, second: bool) -> None:
        self.stores[second].end()
        self.stores[second] = (RemoteStore if second else LocalStore)(self.opened)

    @precondition(lambda self: self.folder is not None)
    @rule(space=SPACES, node=NODES, number=NUMBERS)
    def kill(self, space: str, node: str, number: int) -> None:
        """Kill the other process while it writes."""
        other = self.stores[1]
        assert isinstance(other, RemoteStore)
        if node not in self.model.names[space]:
            head = record_of(space, node, number)
            other.call("put_later", key(space, number), make_kv(number), space, {}, head, tenant=TENANTS[space])
            self.model.names[space][node] = number
        other.kill()
        self.stores[1] = RemoteStore(self.opened)
        if self.stores[0].call("holds", [key(space, number)])[0] and number in self.model.names[space].values():
            self.model.held.add((space, number))

    @precondition(lambda self: self.folder is not None)
    @rule()
    def collect(self) -> None:
        assert self.folder is not None
        check_store(self.folder, repair=True)

    @rule(second=st.booleans(), space=st.none() | SPACES)
    def clear(self, second: bool, space: str | None) -> None:
        self.stores[second].call("clear", None if space is None else TENANTS[space])
        for each in TENANTS if space is None else [space]:
            self.model.names[each] = {}
            self.model.held = {what for what in self.model.held if what[0] != each}

    @precondition(lambda self: self.stores)
    @invariant()
    def agrees(self) -> None:
        expected = set(self.model.held)
        for store, follower in zip(self.stores, self.followers, strict=True):
            holds = store.call("holds", [key(*each) for each in EVERY])
            there = {each for each, held in zip(EVERY, holds, strict=True) if held}
            assert there <= expected and (self.is_bounded or there == expected)
            stats = store.call("stats")
            assert stats.entries >= len(there)
            assert stats.nodes == sum(map(len, self.model.names.values()))
            assert stats.ram_bytes <= self.opened.ram_bytes
            assert self.opened.disk_bytes is None or stats.disk_bytes <= self.opened.disk_bytes
            for space, nodes in self.model.names.items():
                assert store.call("stats", TENANTS[space]).nodes == len(nodes)
                assert sorted(store.call("names.ids", space)) == sorted(nodes)
                records = [record_of(space, node, nodes[node]) if node in nodes else None for node in ("a", "b", "c")]
                assert store.call("names.lookup", space, ["a", "b", "c"]) == records
            assert follower.follow(store) == {node: f"hash{number}" for node, number in self.model.names["x"].items()}
        self.model.held &= there

    def teardown(self) -> None:
        for store in self.stores:
            store.end()
        if self.folder is not None:
            assert not self.stores or check_store(self.folder).problems == []
            shutil.rmtree(self.folder)


class RamMachine(FolderMachine):
    """The same of a store that has no folder and is this process's alone."""

    def __init__(self) -> None:
        super().__init__()
        assert self.folder is not None
        self.folder.rmdir()
        self.folder = None

    @initialize(ram=st.sampled_from([4_100, 10**6]), room=st.none())
    def make(self, ram: int, room: None) -> None:
        self.opened = Opened(None, ram)
        self.is_bounded = ram < 10**6
        self.stores = [LocalStore(self.opened)] * 2


_SETTINGS = {"stateful_step_count": 25, "suppress_health_check": [HealthCheck.too_slow]}
TestFolder = FolderMachine.TestCase
TestFolder.settings = settings(max_examples=12, **_SETTINGS)
TestRam = RamMachine.TestCase
TestRam.settings = settings(max_examples=30, **_SETTINGS)
