"""Tenants of one store never see each other."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import ConfigError, StoreError, UnknownChunkError
from cacheblend_rag.store import KVStore, StoreStats, check_store, open_store
from tests.engines import MakeEngine
from tests.families import tiny_model, tiny_tokenizer, words
from tests.store.kit import files_of

CHUNKS = [Chunk(words(20, 1), "a"), Chunk(words(21, 2), "b")]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[BlendEngine, BlendEngine]]:
    model = tiny_model("llama")
    one = BlendEngine(model, tiny_tokenizer(), store=tmp_path, tenant="acme")
    two = BlendEngine(model, tiny_tokenizer(), store=tmp_path, **engine_settings(tenant="globex"))
    yield one, two
    one.close()
    two.close()


def test_equal_texts_of_two_tenants_are_two_entries(pair: tuple[BlendEngine, BlendEngine], tmp_path: Path) -> None:
    one, two = pair
    assert one.add(CHUNKS).encoded == 2
    assert not two.contains("a")
    assert two.ids() == []
    with pytest.raises(UnknownChunkError):
        two.prefill(BlendPrompt("t1", ["a"], "t2"))
    assert two.prefill(BlendPrompt("t1", CHUNKS, "t2")).report.hits == 0
    two.flush()
    # Each stood in one place, and the other KV is still to be computed.
    assert two.add(CHUNKS).encoded == 2
    assert one.prefill(BlendPrompt("t1", CHUNKS, "t2")).report.hits == 2
    keys = [engine.records(["a", "b"]) for engine in pair]
    assert not {record.key for record in keys[0] if record} & {record.key for record in keys[1] if record}
    assert len(files_of(tmp_path)) == 8


def test_what_one_tenant_removes_is_its_own(pair: tuple[BlendEngine, BlendEngine], tmp_path: Path) -> None:
    one, two = pair
    for engine in pair:
        # One without a name too.
        engine.add([*CHUNKS, Chunk(words(9, 9))])
    store = open_store(tmp_path, 0)
    assert store.tenants() == ["acme", "globex"]
    shares = [one.store.stats(), two.store.stats(), store.stats("")]
    assert [(share.nodes, share.entries) for share in shares] == [(2, 6), (2, 6), (0, 0)]
    assert shares[0].disk_bytes == shares[1].disk_bytes
    assert shares[0].disk_bytes + shares[1].disk_bytes == store.stats().disk_bytes
    assert shares[0].ram_bytes == shares[1].ram_bytes > 0
    assert one.store.holds(["a", "x", "b"]) == [True, False, True]
    assert one.delete(["a", "b"]) == 2
    assert sorted(two.ids()) == ["a", "b"]
    assert two.prefill(BlendPrompt("t1", CHUNKS, "t2")).report.hits == 2
    one.store.clear()
    assert one.store.stats().entries == 0
    assert two.store.stats().entries == 6
    store.clear("")
    store.clear("globex")
    assert two.ids() == []
    store.close()
    assert files_of(tmp_path) == []
    assert check_store(tmp_path).is_clean


def test_nobodys_chunks_stay(make_engine: MakeEngine, pair: tuple[BlendEngine, BlendEngine], tmp_path: Path) -> None:
    one, _ = pair
    nobody = make_engine(tmp_path, model=one.model)
    assert nobody.add(CHUNKS).encoded == 2
    assert not one.contains("a")
    one.store.clear()
    assert nobody.contains("a")
    one.add(CHUNKS)
    nobody.store.clear()
    assert one.contains("a") and not nobody.contains("a")
    assert nobody.namespace not in (one.namespace, pair[1].namespace)


@pytest.mark.parametrize("name", ["../../etc", "/root", "..", "a/b", "C:\\", "%2e%2e", "globex|()", "ü" * 200, "'; --"])
def test_a_tenants_name_leads_nowhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "store"
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=folder, tenant=name) as engine:
        engine.add([Chunk(words(9, 1), "../../../escaped"), Chunk(words(9, 2), "/etc/passwd")])
        assert sorted(engine.ids()) == ["../../../escaped", "/etc/passwd"]
        assert engine.prefill(BlendPrompt("t1", ["/etc/passwd"], "t2")).report.hits == 1
        for key in ("../../escaped", "/etc/passwd", "..", "ab/../../../x"):
            with pytest.raises(StoreError, match="not a store key"):
                engine._store.open(key)
    with closing(open_store(folder, 0)) as store:
        assert store.tenants() == [name]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["store"]
    assert all(len(path.parent.name) == 2 for path in files_of(folder))
    assert check_store(folder).is_clean


@pytest.mark.parametrize("name", ["", "a" * 201, "a\nb", "a\0", "\ud800", 7])
def test_what_is_no_tenants_name(name: object) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        EngineConfig(tenant=name)


def test_a_namespace_has_one_owner(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=store, tenant="acme") as engine:
        engine.add(CHUNKS)
        record = engine.records(["a"])[0]
        assert record is not None
        with pytest.raises(StoreError, match="do not belong to tenant 'globex'"):
            store.name(engine.namespace, [record], tenant="globex")
    store.close()


@pytest.mark.parametrize("in_folder", [False, True])
def test_no_figure_of_an_engine_is_another_tenants(tmp_path: Path, in_folder: bool) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    with BlendEngine(model, tokenizer, store=tmp_path / "other") as other:
        other.add(CHUNKS)
        nbytes, file_bytes = other.store.stats().ram_bytes, other.store.stats().disk_bytes
    place = tmp_path / "kv" if in_folder else None
    store = open_store(place, 2 * nbytes, 3 * file_bytes, device_bytes=nbytes)
    one, two = (BlendEngine(model, tokenizer, store=store, tenant=name) for name in ("acme", "globex"))
    one.add([Chunk(words(9, 1), "mine")])
    [record] = one.records(["mine"])
    assert record is not None

    def figures(engine: BlendEngine) -> tuple[StoreStats, dict[str, float]]:
        samples = [each for metric in engine.metrics.registry.collect() for each in metric.samples]
        return engine.store.stats(), {f"{each.name}{each.labels}": each.value for each in samples}

    before = figures(one)
    assert (before[0].nodes, before[0].entries, before[0].evictions) == (1, 2, 0)
    for number in range(8):
        two.add([Chunk(words(20, number), f"n{number}")])
        two.prefill(BlendPrompt("t1", [f"n{number}"] * 2, "t2"))
        for key in record.keys:
            # Used last, it is not what is evicted.
            assert store.open(key)
    theirs = two.store.stats()
    assert min(theirs.evictions, theirs.ram_evictions, theirs.device_evictions) > 0
    assert figures(one) == before
    store.close()


def test_no_engine_hands_out_its_store(pair: tuple[BlendEngine, BlendEngine]) -> None:
    one, two = pair

    def reachable(part: object, depth: int) -> Iterator[object]:
        """Yield what public attributes of our objects lead to."""
        yield part
        if depth and type(part).__module__.startswith("cacheblend_rag"):
            for name, value in getattr(part, "__dict__", {}).items():
                if not name.startswith("_"):
                    yield from reachable(value, depth - 1)

    found = list(reachable(one, 3))
    assert not [part for part in found if isinstance(part, KVStore)]
    with pytest.raises(ConfigError, match="store is a TenantStore; give a folder, or what open_store returned"):
        BlendEngine(one.model, one.tokenizer, store=two.store)  # type: ignore[arg-type]


def test_what_comes_back_from_a_remote_tier_is_its_tenants(tmp_path: Path) -> None:
    remote, one_process = f"file://{tmp_path}/remote", tmp_path / "kv"
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    with closing(open_store(one_process, 10**7, remote=remote)) as store:
        with BlendEngine(model, tokenizer, store=store, tenant="acme") as engine:
            engine.add(CHUNKS)
        store.flush()
    for file in files_of(one_process):
        file.unlink()
    with closing(open_store(one_process, 10**7, remote=remote)) as store:
        acme, nobody = (BlendEngine(model, tokenizer, store=store, tenant=name) for name in ("acme", None))
        assert acme.prefill(BlendPrompt("t1", ["a", "b"], "t2")).report.hits == 2
        assert acme.store.stats().ram_bytes > 0
        assert nobody.store.stats().ram_bytes == 0
        acme.store.clear()
        assert store.stats().ram_bytes == 0
