"""The device tier: copies that are used where they are, and go when what they are copies of goes."""

import gc
import logging
from pathlib import Path

import pytest
import torch

from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.store.memory import DeviceReader, DeviceTier, ResidentKV
from tests.store.kit import add, files_of, key_of, make_kv, open_store, put, read, same

KV_BYTES = make_kv(0).nbytes
ROOM = 10 * KV_BYTES


def raise_up(store: KVStore, number: int, first_layer: int = 0) -> KVReader:
    """Read a chunk as the loader does, from that layer on; return the reader."""
    reader = store.open(key_of(number))
    assert reader is not None
    for layer in range(first_layer, reader.num_layers):
        if reader.promotes_to_device:
            reader.keep(layer, reader.layer(layer))
    reader.finish()
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


@pytest.mark.parametrize("ram_bytes", [0, 10**6])
def test_what_was_used_is_used_there_the_next_time(tmp_path: Path, ram_bytes: int) -> None:
    store = open_store(tmp_path, ram_bytes, device_bytes=ROOM, disk_codec="native")
    kv = make_kv(1, dtype=torch.float16)
    store.put(key_of(1), kv)
    store.close()
    store = open_store(tmp_path, ram_bytes, device_bytes=ROOM)
    # The first layer was computed in full, and never asked for.
    assert raise_up(store, 1, first_layer=1).tier == "disk"
    for path in files_of(tmp_path):
        path.write_bytes(b"")
    reader = store.open(key_of(1))
    assert isinstance(reader, DeviceReader)
    assert (reader.tier, reader.packed_bytes) == ("device", store.stats().device_bytes)
    assert same(read(reader), kv)
    assert reader.devices == (torch.device("cpu"),) * 3
    store.close()
    # A reader stays good.
    assert same(read(reader), kv)


def test_the_copy_is_unpacked(tmp_path: Path) -> None:
    store = open_store(tmp_path, 0, disk_codec="int8", device_bytes=ROOM)
    store.put(key_of(1), make_kv(1))
    unpacked = read(raise_up(store, 1))
    again = store.open(key_of(1))
    assert again is not None and (again.tier, again.codec) == ("device", "native")
    assert same(read(again), unpacked)
    assert store.stats().device_bytes == KV_BYTES


def test_the_copy_is_a_copy() -> None:
    tier = DeviceTier(ROOM)
    kv = make_kv(1)
    resident = ResidentKV(kv.token_ids, kv.start, [tier.place(*each) for each in enumerate(kv.layers)], kv.context)
    kept = make_kv(1)
    for layer in kv.layers:
        for tensor in layer:
            tensor.zero_()
    assert same(read(DeviceReader(resident)), kept)
    # Of a cut, no more than the cut is kept.
    wide = LayerKV(torch.randn(2, 100, 8), torch.randn(2, 100, 4))
    placed = tier.place(0, LayerKV(*(tensor[:, 10:20] for tensor in wide))).layer
    assert placed.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in placed) == 2 * 10 * 12 * 4


def test_most_of_it_was_never_asked_for() -> None:
    store = open_store(None, 10**6, device_bytes=ROOM)
    store.put(key_of(1), make_kv(1))
    raise_up(store, 1, first_layer=2)
    assert (tier_of(store, 1), store.stats().device_bytes) == ("ram", 0)


def test_what_is_deleted_on_its_way_up_does_not_arrive(folder: Path | None) -> None:
    store = filled(folder)
    add(store, 1)
    reader = store.open(key_of(1))
    assert reader is not None and reader.promotes_to_device
    for layer in range(reader.num_layers):
        reader.keep(layer, reader.layer(layer))
    store.forget("ns", ["n1"])
    reader.finish()
    assert (tier_of(store, 1), store.stats().device_bytes) == (None, 0)
    store.put(key_of(2), make_kv(2))
    late = store.open(key_of(2))
    assert late is not None and late.promotes_to_device
    late.keep(2, late.layer(2))
    late.keep(1, late.layer(1))
    store.close()
    late.finish()


def test_what_the_slower_tier_drops_for_room_goes(tmp_path: Path) -> None:
    store = filled(None, 1, 2, ram_bytes=2 * KV_BYTES)
    # What is used on the device stays in RAM, which is all there is.
    assert tier_of(store, 1) == "device"
    store.put(key_of(3), make_kv(3))
    assert [tier_of(store, number) for number in (1, 2, 3)] == ["device", None, "ram"]
    assert store.stats().device_bytes == KV_BYTES
    store.close()
    store = filled(tmp_path, 1)
    size = store.stats().disk_bytes
    store.close()
    store = open_store(tmp_path, 10**6, 2 * size, device_bytes=ROOM)
    raise_up(store, 1)
    for number in (2, 3):
        store.put(key_of(number), make_kv(0))
    assert (tier_of(store, 1), store.stats().device_bytes) == (None, 0)


def test_the_budget_is_kept(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, 2, 3, device_bytes=2 * KV_BYTES)
    assert [tier_of(store, number) for number in (1, 2, 3)] == ["ram", "device", "device"]
    stats = store.stats()
    assert (stats.device_bytes, stats.device_evictions, stats.evictions) == (2 * KV_BYTES, 1, 0)
    # Room is made when a chunk begins to rise, not when it is opened; who stops half way gives it back.
    readers = [store.open(key_of(1)) for _ in range(3)]
    assert store.stats().device_bytes == 2 * KV_BYTES
    for reader in readers:
        assert reader is not None and reader.promotes_to_device
        reader.keep(0, reader.layer(0))
    assert store.stats().device_bytes == 0
    assert readers[2] is not None
    readers[2].finish()
    assert store.stats().device_bytes == 0
    del readers, reader
    gc.collect()
    for number in (1, 2):
        raise_up(store, number)
    assert store.stats().device_bytes == 2 * KV_BYTES
    raise_up(store, 3)
    assert [tier_of(store, number) for number in (1, 3)] == ["ram", "device"]


def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    store = filled(tmp_path, 1, device_bytes=0)
    assert (tier_of(store, 1), store.stats().device_bytes) == ("ram", 0)


def test_a_device_that_is_full(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = filled(None)
    put(store, 1, 2)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 1 MiB\nand more")

    with caplog.at_level(logging.WARNING), monkeypatch.context() as patch:
        patch.setattr("cacheblend_rag.store.memory.torch.empty", full)
        raise_up(store, 1)
        raise_up(store, 2, first_layer=1)
    assert [record.message.count("give a smaller device_bytes") for record in caplog.records] == [1]
    assert (tier_of(store, 1), store.stats().device_bytes) == ("ram", 0)
    # Nothing of the room is lost.
    gc.collect()
    raise_up(store, 1)
    assert tier_of(store, 1) == "device"
    assert store._tiers.device._make_room(ROOM - KV_BYTES)  # type: ignore[attr-defined]
