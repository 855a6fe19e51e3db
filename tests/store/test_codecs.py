"""Packed KV in files and in RAM: sizes, tiers of different codecs, and files of the format before codecs."""

from pathlib import Path

import pytest
import torch

from cacheblend_rag import EngineConfig
from cacheblend_rag.codec import codec_names, make_codec, pack_kv, unpack_layer
from cacheblend_rag.errors import ChunkReadError, ConfigError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store import check_store
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from tests.store.kit import files_of, key_of, open_store, read, same

KEY = key_of(1)


def chunk(
    layers: int = 2, heads: int = 2, tokens: int = 40, head_dim: int = 20, dtype: torch.dtype = torch.float32
) -> ChunkKV:
    numbers = torch.Generator().manual_seed(layers)
    shape = (heads, tokens, head_dim)
    kv = [LayerKV(*(torch.randn(*shape, generator=numbers).to(dtype) for _ in range(2))) for _ in range(layers)]
    return ChunkKV(tuple(range(tokens)), 1, kv)


def through(kv: ChunkKV, *codecs: str) -> ChunkKV:
    """The KV after it was packed by one codec after the other."""
    packed = pack_kv(kv, make_codec("native"))
    for name in codecs:
        packed = pack_kv(packed, make_codec(name))
    return ChunkKV(kv.token_ids, kv.start, [unpack_layer(layer) for layer in packed.layers])


def write(path: Path, kv: ChunkKV, codec: str) -> bytes:
    data = b"".join(encode_chunk(KEY, pack_kv(kv, make_codec(codec))).buffers)
    path.write_bytes(data)
    return data


@pytest.mark.parametrize("codec", codec_names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_file_of_every_codec(tmp_path: Path, codec: str, dtype: torch.dtype) -> None:
    kv = chunk(tokens=33, head_dim=21, dtype=dtype)
    data = write(tmp_path / "f", kv, codec)
    file = ChunkFile.open(tmp_path / "f", KEY)
    packed = pack_kv(kv, make_codec(codec))
    assert same(read(file), through(kv, codec))
    assert set(file.codecs) == {layer.codec for layer in packed.layers}
    assert (file.file_bytes, file.packed_bytes, file.kv_bytes) == (len(data), packed.nbytes, kv.nbytes)
    for index, layer in enumerate(packed.layers):
        stored = file.packed_layer(index)
        assert (stored.codec, stored.key_form, stored.value_form) == (layer.codec, layer.key_form, layer.value_form)
        assert list(stored.parts) == list(layer.parts)
        assert all(torch.equal(stored.parts[name], part) for name, part in layer.parts.items())
    file.verify()


def test_layers_of_different_codecs_and_forms(tmp_path: Path) -> None:
    numbers = [
        torch.randn(2, 5, 7),
        torch.randn(1, 5, 9).half(),
        torch.full((2, 5, 4), float("nan")),
        torch.ones(1, 5, 1),
    ]
    kv = ChunkKV((1, 2, 3, 4, 5), 0, [LayerKV(each, each + 1) for each in numbers])
    write(tmp_path / "f", kv, "int4")
    file = ChunkFile.open(tmp_path / "f", KEY)
    assert file.codecs == ("int4", "int4", "native", "int4")
    for index in (3, 1, 2, 0):
        for tensor, wanted in zip(file.layer(index), through(kv, "int4").layers[index], strict=True):
            assert tensor.dtype == wanted.dtype
            assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.55), ("int4", 0.32)])
@pytest.mark.parametrize(("layers", "heads", "head_dim"), [(24, 2, 64), (8, 8, 128)], ids=["qwen2-0.5b", "llama-like"])
def test_share_of_the_bytes_of_float16_header_included(
    codec: str, most: float, layers: int, heads: int, head_dim: int
) -> None:
    kv = chunk(layers, heads, 512, head_dim, torch.float16)
    size = encode_chunk(KEY, pack_kv(kv, make_codec(codec))).nbytes
    assert size <= most * kv.nbytes


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_damage_in_any_part_is_detected(tmp_path: Path, codec: str) -> None:
    data = write(tmp_path / "f", chunk(), codec)
    begin = len(data) - ChunkFile.open(tmp_path / "f", KEY).packed_bytes
    # Of every part of both layers, and of the head that says what they are.
    for place in (*range(begin, len(data), 97), *range(8, begin, 41), len(data) - 1):
        (tmp_path / "f").write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(ChunkReadError):
            ChunkFile.open(tmp_path / "f", KEY).verify()


def test_a_file_of_another_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("cacheblend_rag.store.chunkfile._FORMAT", "cacheblend-rag chunk kv 1")
        write(tmp_path / "f", chunk(), "native")
    with pytest.raises(ChunkReadError, match="in the format 'cacheblend-rag chunk kv 1'; this version reads"):
        ChunkFile.open(tmp_path / "f", KEY)


def test_a_codec_of_a_later_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "f", chunk(), "int4")
    monkeypatch.setattr("cacheblend_rag.store.chunkfile.codec_names", lambda: ("native", "int8"))
    with pytest.raises(ChunkReadError, match="packed by the codec 'int4'; this version knows native, int8"):
        ChunkFile.open(tmp_path / "f", KEY)


@pytest.mark.parametrize("codec", codec_names())
def test_ram_keeps_and_counts_what_is_packed(codec: str) -> None:
    kv = chunk()
    size = pack_kv(kv, make_codec(codec)).nbytes
    store = open_store(None, 2 * size, ram_codec=codec)
    for number in range(3):
        store.put(key_of(number), kv)
    assert store.holds([key_of(number) for number in range(3)]) == [False, True, True]
    assert store.stats().ram_bytes == 2 * size
    reader = store.open(key_of(1))
    assert reader is not None
    assert same(read(reader), through(kv, codec))
    store.cache(key_of(5), kv)
    assert store.stats().ram_bytes == 2 * size


@pytest.mark.parametrize(
    ("ram", "disk", "in_ram"),
    [
        ("native", "native", ()),
        ("int4", "int4", ("int4",)),
        # What the disk gives back.
        ("native", "int4", ("int4",)),
        ("int8", "int4", ("int4",)),
        ("int4", "native", ("int4",)),
    ],
)
def test_put_packs_for_each_tier(tmp_path: Path, ram: str, disk: str, in_ram: tuple[str, ...]) -> None:
    kv = chunk()
    store = open_store(tmp_path, 10**6, ram_codec=ram, disk_codec=disk)
    store.put(KEY, kv)
    reader = store.open(KEY)
    assert reader is not None
    assert same(read(reader), through(kv, *in_ram))
    assert store.stats().ram_bytes == pack_kv(pack_kv(kv, make_codec(disk)), make_codec(ram)).nbytes
    store.close()
    (path,) = files_of(tmp_path)
    # Packed from the KV itself, not from what RAM has made of it.
    assert same(read(ChunkFile.open(path, KEY)), through(kv, disk))
    assert set(ChunkFile.open(path, KEY).codecs) == {disk}
    assert check_store(tmp_path).is_clean


@pytest.mark.parametrize(
    ("disk", "ram", "kept"),
    [
        ("int4", "int4", ("int4",)),
        ("int4", "native", ("int4",)),
        ("int4", "int8", ("int4",)),
        ("int8", "int4", ("int8", "int4")),
        ("native", "int4", ("int4",)),
        ("int8", "native", ("int8",)),
    ],
)
def test_what_is_read_is_kept_as_ram_keeps_it(tmp_path: Path, disk: str, ram: str, kept: tuple[str, ...]) -> None:
    kv = chunk()
    store = open_store(tmp_path, 0, disk_codec=disk)
    store.put(KEY, kv)
    store.close()
    # The codec is the stored bytes' own: they are a hit whatever the settings say now.
    store = open_store(tmp_path, 10**6, ram_codec=ram, disk_codec="int8")
    wanted = through(kv, *kept)
    for _ in range(2):
        assert store.holds([KEY]) == [True]
        reader = store.open(KEY)
        assert reader is not None
        assert same(read(reader), wanted)
    packed = pack_kv(pack_kv(kv, make_codec(disk)), make_codec(ram))
    assert store.stats().ram_bytes == packed.nbytes
    store.put(KEY, kv)
    store.close()
    assert set(ChunkFile.open(files_of(tmp_path)[0], KEY).codecs) == {disk}


def test_equal_codecs_promote_the_bytes_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = chunk()
    store = open_store(tmp_path, 0, disk_codec="int4")
    store.put(KEY, kv)
    store.close()
    store = open_store(tmp_path, pack_kv(kv, make_codec("int4")).nbytes, ram_codec="int4", disk_codec="int4")
    packed: list[str] = []
    codec = type(make_codec("int4"))
    pack = codec.pack
    monkeypatch.setattr(codec, "pack", lambda self, layer: packed.append(self.name) or pack(self, layer))
    reader = store.open(KEY)
    assert reader is not None
    stored = read(reader)
    files_of(tmp_path)[0].unlink()
    # From RAM now, where there is room for the packed bytes only.
    again = store.open(KEY)
    assert again is not None
    assert same(read(again), stored)
    assert not packed


def test_room_is_reserved_for_what_ram_will_keep(tmp_path: Path) -> None:
    kv = chunk()
    store = open_store(tmp_path, 0, disk_codec="int4")
    store.put(KEY, kv)
    store.close()
    packed_bytes = pack_kv(kv, make_codec("int4")).nbytes
    for ram_bytes, ram_codec, held in (
        (packed_bytes, "int4", packed_bytes),
        (packed_bytes, "native", 0),
        (kv.nbytes, "native", kv.nbytes),
    ):
        store = open_store(tmp_path, ram_bytes, ram_codec=ram_codec)
        reader = store.open(KEY)
        assert reader is not None
        assert same(read(reader), through(kv, "int4"))
        assert store.stats().ram_bytes == held
        store.close()


def test_settings_are_checked(tmp_path: Path) -> None:
    for setting in ({"ram_codec": "int3"}, {"disk_codec": "zip"}):
        with pytest.raises(ConfigError, match=r"unknown codec .*; choose one of native"):
            open_store(tmp_path / "store", 0, **setting)
    assert not (tmp_path / "store").exists()
    assert (EngineConfig().ram_codec, EngineConfig().disk_codec) == ("native", "native")
