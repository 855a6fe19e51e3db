"""Tenants of one store never see each other."""

from contextlib import closing
from pathlib import Path

import pytest

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import StoreError, UnknownChunkError
from cacheblend_rag.store import StoreStats, check_store, open_store
from tests.engines import MakeEngine
from tests.families import tiny_model, words
from tests.store.kit import files_of

CHUNKS = [Chunk(words(20, 1), "a"), Chunk(words(21, 2), "b")]
ENGINE = {"self_check": False}


def hits(engine: BlendEngine) -> int:
    return engine.prefill(BlendPrompt("t1", CHUNKS, "t2")).report.hits


def test_what_one_tenant_has_and_removes_is_its_own(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_model("llama")
    every = [make_engine(tmp_path, model, tenant=tenant) for tenant in ("acme", "globex", None)]
    one, two, nobody = every
    for engine in every:
        assert engine.ids() == []
        with pytest.raises(UnknownChunkError):
            engine.prefill(BlendPrompt("t1", ["a"], "t2"))
        assert engine.add(CHUNKS).encoded == 2
    assert len({engine.namespace for engine in every}) == 3
    assert repr(one) == f"BlendEngine('LlamaForCausalLM', tenant='acme', store=KVStore('{tmp_path}'))"
    with closing(open_store(tmp_path, 0)) as store:
        assert store.tenants() == ["", "acme", "globex"]
        shares = [engine.store.stats() for engine in every]
        assert [(share.nodes, share.entries) for share in shares] == [(2, 4)] * 3
        assert sum(share.disk_bytes for share in shares) == store.stats().disk_bytes
        assert one.delete(["a", "b"]) == 2
        assert [hits(engine) for engine in (two, nobody)] == [2, 2]
        one.store.clear()
        assert [engine.store.stats().entries for engine in every] == [0, 4, 4]
        nobody.store.clear()
        assert (nobody.ids(), hits(two)) == ([], 2)
        store.clear("globex")
        assert two.ids() == []
    assert files_of(tmp_path) == []
    assert check_store(tmp_path).is_clean


@pytest.mark.parametrize("name", ["../../etc", "/root", "..", "a/b", "C:\\", "%2e%2e", "globex|()", "ü" * 200, "'; --"])
def test_a_tenants_name_leads_nowhere(make_engine: MakeEngine, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "store"
    engine = make_engine(folder, tenant=name)
    engine.add([Chunk(words(9, 1), "../../../escaped"), Chunk(words(9, 2), "/etc/passwd")])
    assert sorted(engine.ids()) == ["../../../escaped", "/etc/passwd"]
    assert engine.prefill(BlendPrompt("t1", ["/etc/passwd"], "t2")).report.hits == 1
    with closing(open_store(folder, 0)) as store:
        assert store.tenants() == [name]
        for key in ("../../escaped", "/etc/passwd", "..", "ab/../../../x"):
            with pytest.raises(StoreError):
                store.open(key)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["store"]
    assert all(len(path.parent.name) == 2 for path in files_of(folder))
    assert check_store(folder).is_clean


def test_no_figure_of_an_engine_is_another_tenants(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_model("llama")
    with make_engine(tmp_path / "other", model) as other:
        other.add(CHUNKS)
        nbytes, file_bytes = other.store.stats().ram_bytes, other.store.stats().disk_bytes
    with closing(open_store(tmp_path / "kv", 2 * nbytes, 3 * file_bytes)) as store:
        one, two = (make_engine(store, model, tenant=name) for name in ("acme", "globex"))
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
        assert min(theirs.evictions, theirs.ram_evictions) > 0
        assert figures(one) == before
