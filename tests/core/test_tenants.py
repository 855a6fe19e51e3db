"""Tenants of one store never see each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk, EngineConfig
from cacheblend_rag.errors import ConfigError, StoreError, UnknownChunkError
from cacheblend_rag.lab.settings import engine_settings
from cacheblend_rag.store import check_store, open_store
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
    assert two.add(CHUNKS).encoded == 0
    assert one.prefill(BlendPrompt("t1", CHUNKS, "t2")).report.hits == 2
    keys = [engine.records(["a", "b"]) for engine in pair]
    assert not {record.key for record in keys[0] if record} & {record.key for record in keys[1] if record}
    assert len(files_of(tmp_path)) == 4


def test_what_one_tenant_removes_is_its_own(pair: tuple[BlendEngine, BlendEngine], tmp_path: Path) -> None:
    one, two = pair
    for engine in pair:
        # One without a name too.
        engine.add([*CHUNKS, Chunk(words(9, 9))])
    assert one.store.tenants() == ["acme", "globex"]
    shares = [one.store.stats(tenant) for tenant in ("acme", "globex", "")]
    assert [(share.nodes, share.entries) for share in shares] == [(2, 3), (2, 3), (0, 0)]
    assert shares[0].disk_bytes == shares[1].disk_bytes
    assert shares[0].disk_bytes + shares[1].disk_bytes == one.store.stats().disk_bytes
    assert (shares[0].ram_bytes > 0, shares[1].ram_bytes) == (True, 0)
    assert one.delete(["a", "b"]) == 2
    assert sorted(two.ids()) == ["a", "b"]
    assert two.prefill(BlendPrompt("t1", CHUNKS, "t2")).report.hits == 2
    two.store.clear("acme")
    assert one.store.stats("acme").entries == 0
    assert two.store.stats("globex").entries == 3
    two.store.clear("")
    one.store.clear("globex")
    assert two.ids() == []
    assert files_of(tmp_path) == []
    assert check_store(tmp_path).is_clean


def test_no_tenant_is_as_it_always_was(pair: tuple[BlendEngine, BlendEngine], tmp_path: Path) -> None:
    one, _ = pair
    with BlendEngine(one.model, tiny_tokenizer(), store=tmp_path) as nobody:
        assert nobody.add(CHUNKS).encoded == 2
        assert not one.contains("a")
        nobody.store.clear("acme")
        assert nobody.contains("a")
        assert nobody.namespace not in (one.namespace, pair[1].namespace)


def test_ram_is_shared_out_as_well() -> None:
    store = open_store(None, 10**7)
    engines = [
        BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=store, tenant=name) for name in ("acme", "globex")
    ]
    for engine in engines:
        engine.add(CHUNKS)
    assert [store.stats(name).entries for name in ("acme", "globex")] == [2, 2]
    store.clear("acme")
    assert [store.stats(name).entries for name in ("acme", "globex")] == [0, 2]
    assert sorted(engines[1].ids()) == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["../../etc", "/root", "..", "a/b", "C:\\x", "%2e%2e", "globex|()", "ü" * 200, "'; --"]
)
def test_a_tenants_name_leads_nowhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "store"
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=folder, tenant=name) as engine:
        engine.add([Chunk(words(9, 1), "../../../escaped"), Chunk(words(9, 2), "/etc/passwd")])
        assert sorted(engine.ids()) == ["../../../escaped", "/etc/passwd"]
        assert engine.prefill(BlendPrompt("t1", ["/etc/passwd"], "t2")).report.hits == 1
        for key in ("../../escaped", "/etc/passwd", "..", "ab/../../../x"):
            with pytest.raises(StoreError, match="not a store key"):
                engine.store.open(key)
        assert engine.store.tenants() == [name]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["store"]
    assert all(len(path.parent.name) == 2 for path in files_of(folder))
    assert check_store(folder).is_clean


@pytest.mark.parametrize("name", ["", "a" * 201, "a\nb", "a\0", "\ud800", 7])
def test_what_is_no_tenants_name(name: object) -> None:
    with pytest.raises(ConfigError, match="tenant"):
        EngineConfig(tenant=name)


def test_a_call_cannot_change_the_tenant(pair: tuple[BlendEngine, BlendEngine]) -> None:
    one, two = pair
    with pytest.raises(ConfigError, match="expected BlendConfig, not the EngineConfig"):
        one.prefill(BlendPrompt("t1", CHUNKS, "t2"), blend=two.config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tenant is fixed when an engine is made"):
        BlendConfig(tenant="globex")


def test_a_namespace_has_one_owner(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    with BlendEngine(tiny_model("llama"), tiny_tokenizer(), store=store, tenant="acme") as engine:
        engine.add(CHUNKS)
        record = engine.records(["a"])[0]
        assert record is not None
        with pytest.raises(StoreError, match="belong to tenant 'acme', not to 'globex'"):
            store.name(engine.namespace, [record], tenant="globex")
    store.close()
