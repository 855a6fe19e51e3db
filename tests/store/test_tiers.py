"""Budgets and recency of RAM and disk, and copies that go when what they are copies of goes."""

from pathlib import Path

import pytest
import torch

from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.kv import ChunkKV, LayerKV
from tests.store.kit import add, files_of, held, is_held, key_of, make_kv, open_store, opened, put, put_kv, record

KV_BYTES = make_kv(0).nbytes
ROOM = 10 * KV_BYTES


@pytest.fixture(params=["ram", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "ram" else tmp_path / "kv"


def test_what_was_used_last_is_kept(folder: Path | None) -> None:
    """Four chunks in a budget of three: the one that was not used goes, and names stay."""
    size = KV_BYTES
    if folder is not None:
        store = open_store(folder, 0)
        put_kv(store, key_of(0), make_kv(0))
        size = store.stats().disk_bytes
        store.close()
    budget = 3 * size + size // 2
    store = open_store(folder, budget) if folder is None else open_store(folder, 10**6, budget)
    put(store, *range(3))
    store.name("ns", [record("a", 1)])
    store.open(key_of(0))
    put(store, 3)
    assert held(store, range(4)) == [0, 2, 3]
    assert store.open(key_of(1)) is None
    assert store.names.lookup("ns", ["a"]) == [record("a", 1)]
    assert (store.stats().evictions, store.stats().entries) == (1, 3)
    with pytest.raises(StoreFullError):
        put_kv(store, key_of(4), make_kv(4, tokens=200))
    assert held(store, range(5)) == [0, 2, 3]
    if folder is not None:
        assert len(files_of(folder)) == 3
        # Recency outlives the process.
        store.open(key_of(2))
        store.open(key_of(0))
        store.close()
        store = open_store(folder, 0, budget)
        put(store, 4)
        assert held(store, range(5)) == [0, 2, 4]
        store.close()
        # A smaller budget than before.
        store = open_store(folder, 0, size)
        put(store, 5)
        assert held(store, range(6)) == [5]


def test_ram_stays_in_its_budget_while_reading(tmp_path: Path) -> None:
    store = open_store(tmp_path, 2 * KV_BYTES)
    put(store, *range(4))
    readers = [opened(store, key_of(number)) for number in (0, 1, 2, 3, 0, 1)]
    for layer in range(3):
        for reader in readers:
            reader.layer(layer)
            assert store.stats().ram_bytes <= 2 * KV_BYTES
    for reader in readers:
        reader.finish()
        assert 0 < store.stats().ram_bytes <= 2 * KV_BYTES


def test_ram_keeps_no_more_than_was_put() -> None:
    batch = torch.randn(100, 2, 6, 8)
    own = batch.clone()
    store = open_store(None, 10**6)
    put_kv(store, key_of(1), ChunkKV((1,) * 6, 0, [LayerKV(batch[3], batch[4])]))
    batch.zero_()
    kept = opened(store, key_of(1)).layer(0)
    assert torch.equal(kept.keys, own[3]) and torch.equal(kept.values, own[4])
    for part in kept:
        assert part.untyped_storage().nbytes() <= kept.nbytes


def test_files_that_are_gone_or_whose_heads_are_damaged_are_misses_and_are_replaced(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0)
    put(store, *range(4))
    gone, *damaged = files_of(tmp_path)
    gone.unlink()
    for file in damaged:
        file.write_bytes(file.read_bytes()[:20] + b"x" + file.read_bytes()[21:])
    assert store.open(key_of(0)) is store.open(key_of(1)) is None
    assert held(store, range(4)) == [2, 3]
    # Found out by `open` before, and here by `put` itself.
    put(store, *range(3))
    assert all(is_held(store, number) for number in range(3))


def test_page_locked_memory_that_is_not_there_or_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        if len(copied) == 8:
            raise RuntimeError("CUDA error: out of memory\nmore of it")
        copied.append(tensor.clone())
        return copied[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    store = open_store(None, 10**6, page_locked=True)
    # Six tensors of the first, two of the next, and then no more.
    put(store, *range(3))
    assert len(copied) == 8
    assert all(is_held(store, number) for number in range(3))
    assert store.stats().ram_bytes == 3 * KV_BYTES


@pytest.mark.cuda
def test_page_locked_memory() -> None:
    store = open_store(None, 10**6, ram_codec="int8", page_locked=True)
    put_kv(store, key_of(1), make_kv(1, tokens=64))
    layer = opened(store, key_of(1)).packed_layer(0)
    assert all(part.is_pinned() for part in layer.parts.values())


def test_what_is_deleted_on_its_way_up_does_not_arrive(tmp_path: Path) -> None:
    add(open_store(tmp_path, 0), 1)
    store = open_store(tmp_path, ROOM)
    reader = opened(store, key_of(1))
    for layer in range(reader.num_layers):
        reader.layer(layer)
    store.forget("ns", ["n1"])
    reader.finish()
    assert (store.open(key_of(1)), store.stats().ram_bytes) == (None, 0)


def test_only_what_was_read_for_the_most_part_stays_in_ram(tmp_path: Path) -> None:
    put(open_store(tmp_path, 0), 1, 2)
    store = open_store(tmp_path, ROOM)
    for number, layers in ((1, 1), (2, 2)):
        reader = opened(store, key_of(number))
        for layer in range(layers):
            reader.layer(layer)
        reader.finish()
    assert [opened(store, key_of(number)).tier for number in (1, 2)] == ["disk", "ram"]
