"""Budgets and recency of RAM, disk and devices, and copies that go when what they are copies of goes."""

import gc
from pathlib import Path

import pytest
import torch

from cacheblend_rag.errors import StoreFullError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store import KVReader, KVStore
from tests.store.kit import add, files_of, held, is_held, key_of, make_kv, open_store, opened, put, read, record, same

KV_BYTES = make_kv(0).nbytes
ROOM = 10 * KV_BYTES


def raise_up(store: KVStore, number: int) -> KVReader:
    """Read a chunk as the loader does; return the reader."""
    reader = opened(store, key_of(number))
    read(reader)
    return reader


def tier_of(store: KVStore, number: int) -> str | None:
    reader = store.open(key_of(number))
    return None if reader is None else reader.tier


def filled(folder: Path | None, *numbers: int, device_bytes: int = ROOM, ram_bytes: int = 10**6) -> KVStore:
    """Open a store with chunks under names of their own, all of them on the device."""
    store = open_store(folder, ram_bytes, device_bytes=device_bytes)
    for number in numbers:
        add(store, number)
        raise_up(store, number)
    return store


@pytest.fixture(params=["ram", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "ram" else tmp_path / "kv"


def test_the_longest_life_asked_for_counts(folder: Path | None) -> None:
    now = 1.8e9
    store = open_store(folder, 10**6, clock=lambda: now)
    keys = [key_of(number) for number in range(3)]
    for number, (key, ttl_s) in enumerate(zip(keys, (10.0, 200.0, None), strict=True)):
        store.put(key, make_kv(number), ttl_s=100.0)
        store.prolong([key], ttl_s)
    now += 150
    assert store.holds(keys) == [False, True, True]
    now += 100
    assert store.holds(keys) == [False, False, True]


def test_what_was_used_last_is_kept(folder: Path | None) -> None:
    """Four chunks in a budget of three: the one that was not used goes, and names stay."""
    size = KV_BYTES
    if folder is not None:
        store = open_store(folder, 0)
        store.put(key_of(0), make_kv(0))
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
        store.put(key_of(4), make_kv(4, tokens=200))
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


@pytest.mark.parametrize("device_bytes", [0, ROOM])
def test_tiers_keep_copies_of_no_more_than_was_put(device_bytes: int) -> None:
    batch = torch.randn(100, 2, 6, 8)
    own = batch.clone()
    store = open_store(None, 10**6, device_bytes=device_bytes)
    store.put(key_of(1), ChunkKV((1,) * 6, 0, [LayerKV(batch[3], batch[4])]))
    raise_up(store, 1)
    batch.zero_()
    kept = opened(store, key_of(1)).resident(0)
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
    store.put(key_of(1), make_kv(1, tokens=64))
    layer = opened(store, key_of(1)).packed_layer(0)  # type: ignore[attr-defined]
    assert all(part.is_pinned() for part in layer.parts.values())


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
@pytest.mark.parametrize("codec", ["native", "int8"])
def test_what_was_used_is_used_on_the_device_the_next_time(tmp_path: Path, ram_bytes: int, codec: str) -> None:
    with_kv = open_store(tmp_path, 0, disk_codec=codec)
    with_kv.put(key_of(1), make_kv(1, dtype=torch.float16))
    kv = read(opened(with_kv, key_of(1)))
    with_kv.close()
    store = open_store(tmp_path, ram_bytes, device_bytes=ROOM)
    assert raise_up(store, 1).tier == "disk"
    for path in files_of(tmp_path):
        path.write_bytes(b"")
    reader = opened(store, key_of(1))
    # Unpacked.
    assert (reader.tier, reader.codec, reader.packed_bytes) == ("device", "native", kv.nbytes)
    assert store.stats().device_bytes == kv.nbytes
    assert same(read(reader), kv)
    assert reader.devices == (torch.device("cpu"),) * 3
    store.close()
    # A reader stays good.
    assert same(read(reader), kv)


def test_what_is_deleted_on_its_way_up_does_not_arrive(folder: Path | None) -> None:
    store = filled(folder)
    add(store, 1)
    reader = opened(store, key_of(1))
    for layer in range(reader.num_layers):
        reader.keep(layer, reader.layer(layer))
    store.forget("ns", ["n1"])
    reader.finish()
    assert (tier_of(store, 1), store.stats().device_bytes) == (None, 0)


def test_the_budget_of_the_device_is_kept(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2, 3, device_bytes=2 * KV_BYTES)
    assert [tier_of(store, number) for number in (1, 2, 3)] == ["ram", "device", "device"]
    stats = store.stats()
    assert (stats.device_bytes, stats.device_evictions, stats.evictions) == (2 * KV_BYTES, 1, 0)
    # Room is made when a chunk begins to rise, not when it is opened; who stops half way gives it back.
    readers = [opened(store, key_of(1)) for _ in range(3)]
    assert store.stats().device_bytes == 2 * KV_BYTES
    for reader in readers:
        reader.keep(0, reader.layer(0))
    assert store.stats().device_bytes == 0
    # Most of it was never asked for.
    readers[2].finish()
    assert store.stats().device_bytes == 0
    del readers, reader
    gc.collect()
    for number in (1, 2):
        raise_up(store, number)
    assert store.stats().device_bytes == 2 * KV_BYTES


def test_a_device_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(None, device_bytes=2 * KV_BYTES)
    put(store, 0, 3)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 1 MiB\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        raise_up(store, 0)
        raise_up(store, 3)
    assert (tier_of(store, 0), store.stats().device_bytes) == ("ram", 0)
    # Nothing of the room is lost.
    gc.collect()
    for number in (0, 3):
        raise_up(store, number)
    assert [tier_of(store, number) for number in (0, 3)] == ["device"] * 2
