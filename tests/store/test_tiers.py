"""Budgets, recency, and RAM over disk."""

import logging
import shutil
from pathlib import Path

import pytest
import torch

from cacheblend_rag.codec import make_codec
from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.base import Entry
from cacheblend_rag.store.memory import RamTier
from tests.store.kit import files_of, held, is_held, key_of, make_kv, open_store, opened, put, read, record, same

KV_BYTES = make_kv(0).nbytes


def test_ram_keeps_what_was_used_last() -> None:
    store = open_store(None, 3 * KV_BYTES + 1)
    for number in range(3):
        store.put(key_of(number), make_kv(0))
    store.open(key_of(0))
    store.name("ns", [record("a", 1)])
    store.put(key_of(3), make_kv(0))
    assert held(store, range(4)) == [0, 2, 3]
    assert store.names.lookup("ns", ["a"]) == [record("a", 1)]
    stats = store.stats()
    assert (stats.evictions, stats.entries, stats.ram_bytes) == (1, 3, 3 * KV_BYTES)
    with pytest.raises(StoreFullError, match=f"{make_kv(0, tokens=60).nbytes} bytes exceeds .*ram_bytes"):
        store.put(key_of(4), make_kv(0, tokens=60))
    assert held(store, range(5)) == [0, 2, 3]


def test_disk_keeps_what_was_used_last(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10**6)
    store.put(key_of(0), make_kv(0))
    size = store.stats().disk_bytes
    store.close()
    assert size == files_of(tmp_path)[0].stat().st_size
    store = open_store(tmp_path, 10**6, 3 * size + size // 2)
    put(store, *range(1, 3))
    store.name("ns", [record("a", 1), record("b", 2)])
    store.open(key_of(0))
    store.put(key_of(3), make_kv(3))
    assert held(store, range(4)) == [0, 2, 3]
    assert store.names.lookup("ns", ["a", "b"]) == [record("a", 1), record("b", 2)]
    stats = store.stats()
    assert (stats.evictions, stats.entries) == (1, 3)
    assert stats.ram_bytes == make_kv(2).nbytes + make_kv(3).nbytes
    assert len(files_of(tmp_path)) == 3
    assert store.open(key_of(1)) is None
    store.open(key_of(2))
    store.close()
    # Recency outlives the process.
    store = open_store(tmp_path, 0, 3 * size + size // 2)
    store.put(key_of(4), make_kv(4))
    assert held(store, range(5)) == [2, 3, 4]
    with pytest.raises(StoreFullError, match="disk_bytes"):
        store.put(key_of(5), make_kv(5, tokens=200))
    assert held(store, range(6)) == [2, 3, 4]


def test_a_smaller_budget_than_before(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    put(store, *range(6))
    size = store.stats().disk_bytes
    store.close()
    store = open_store(tmp_path, 0, size // 2)
    store.put(key_of(9), make_kv(9))
    assert store.stats().disk_bytes <= size // 2
    assert store.holds([key_of(9), key_of(5), key_of(0)]) == [True, True, False]


@pytest.mark.parametrize("first_layer", [0, 1])
def test_what_was_read_to_its_end_is_kept_in_ram(tmp_path: Path, first_layer: int) -> None:
    store = open_store(tmp_path, 10**6)
    store.put(key_of(1), make_kv(1))
    store.close()
    store = open_store(tmp_path, 10**6)
    reader = opened(store, key_of(1))
    for layer in range(first_layer, reader.num_layers):
        reader.layer(layer)
    assert store.stats().ram_bytes == 0
    reader.finish()
    assert store.stats().ram_bytes == make_kv(1).nbytes
    shutil.rmtree(tmp_path / "kv")
    assert is_held(store, 1)


def test_ram_stays_in_its_budget_while_reading(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2 * KV_BYTES)
    for number in range(4):
        store.put(key_of(number), make_kv(number, layers=2))
    readers = [store.open(key_of(number)) for number in (0, 1, 2, 3, 0, 1)]
    for layer in range(2):
        for reader in readers:
            assert reader is not None
            reader.layer(layer)
            assert store.stats().ram_bytes <= 2 * KV_BYTES
    for reader in readers:
        assert reader is not None
        reader.finish()
        assert store.stats().ram_bytes <= 2 * KV_BYTES
    # Readers that stop half way leave their room to others.
    for _ in range(10):
        reader = opened(store, key_of(2))
        reader.layer(0)
        del reader
    for number in (2, 3):
        reader = opened(store, key_of(number))
        read(reader)
        assert store.stats().ram_bytes > 0


@pytest.mark.parametrize("codec", ["native", "int8"])
def test_ram_does_not_keep_larger_tensors_alive(codec: str) -> None:
    batch = torch.randn(100, 2, 6, 8)
    ram = RamTier(10**6, make_codec(codec))
    assert ram.keep("k", Entry(kv=ChunkKV((1,) * 6, 0, [LayerKV(batch[3], batch[4])])))
    kept = ram.get("k")
    assert kept is not None
    for part in kept.kv.layers[0].parts.values():
        assert part.untyped_storage().nbytes() <= kept.kv.layers[0].nbytes
    assert ram.nbytes() == kept.nbytes <= batch[3].nbytes * 2


def test_damaged_head_is_a_miss_and_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(tmp_path, 0)
    for number in range(2):
        store.put(key_of(number), make_kv(number))
        (file,) = (path for path in files_of(tmp_path) if path.name.startswith(key_of(number)))
        file.write_bytes(file.read_bytes()[:20] + b"x" + file.read_bytes()[21:])
    with caplog.at_level(logging.WARNING):
        assert store.open(key_of(0)) is None
    assert store.holds([key_of(0), key_of(1)]) == [False, True]
    for number in range(2):
        # Found out by `open` before, and here by `put` itself.
        store.put(key_of(number), make_kv(number))
        assert is_held(store, number)
    assert caplog.text.count("is damaged and computed again") == 1
    assert len(files_of(tmp_path)) == 2


def test_page_locked_memory_is_used_where_there_is_any(caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(None, 10**6, ram_codec="int8", page_locked=True)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            store.put(key_of(number), make_kv(number, tokens=64))
    there_is = torch.cuda.is_available()
    assert [record.message.count("ordinary memory") for record in caplog.records] == ([] if there_is else [1])
    plain = open_store(None, 10**6, ram_codec="int8")
    for number in range(3):
        plain.put(key_of(number), make_kv(number, tokens=64))
        one, other = store.open(key_of(number)), plain.open(key_of(number))
        assert one is not None and other is not None
        assert same(read(one), read(other))
        held = store._tiers.ram.get(key_of(number))  # type: ignore[attr-defined]
        assert {part.is_pinned() for layer in held.kv.layers for part in layer.parts.values()} == {there_is}
    assert store.stats().ram_bytes == plain.stats().ram_bytes


def test_page_locked_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    copied = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        if len(copied) == 8:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        copied.append(tensor.clone())
        return copied[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    store = open_store(None, 10**6, page_locked=True)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            # Its 6 tensors, 2 of the next, and then no more.
            store.put(key_of(number), make_kv(number))
    assert [record.message.count("out of memory (set") for record in caplog.records] == [1]
    for number in range(3):
        assert is_held(store, number)
    assert len(copied) == 8
    assert store.stats().ram_bytes == 3 * KV_BYTES
