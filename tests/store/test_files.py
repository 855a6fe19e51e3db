"""The bytes of a chunk's file, and KV packed for each tier."""

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from cacheblend_rag.codec import codec_names, make_codec, pack_kv, unpack_layer
from cacheblend_rag.errors import ChunkReadError, ConfigError, StoreError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store import check_store
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from tests.limits import within
from tests.store.kit import files_of, key_of, make_kv, open_store, opened, put_kv, read, same

KEY = key_of(1)


class Bytes:
    """A `ByteSource` in memory."""

    tier = "disk"

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, view: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)


def encoded(kv: ChunkKV, codec: str = "native") -> bytes:
    return b"".join(encode_chunk(KEY, pack_kv(kv, make_codec(codec))).buffers)


def through(kv: ChunkKV, *codecs: str) -> ChunkKV:
    """The KV after it was packed by one codec after the other."""
    packed = pack_kv(kv, make_codec("native"))
    for name in codecs:
        packed = pack_kv(packed, make_codec(name))
    return ChunkKV(kv.token_ids, kv.start, [unpack_layer(layer) for layer in packed.layers])


def in_bits(kv: ChunkKV) -> ChunkKV:
    """The same bytes as numbers that can be compared."""
    return ChunkKV(
        kv.token_ids,
        kv.start,
        [LayerKV(*(part.contiguous().view(torch.uint8) for part in layer)) for layer in kv.layers],
    )


def rewritten(change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a file whose digest is right, and whose header has been changed."""
    data = encoded(make_kv(1))
    length = int.from_bytes(data[:8], "little")
    told = json.loads(data[8 : 8 + length])
    text = json.dumps(told) if (changed := change(told)) is None else str(changed)
    tokens_end = 8 + length + 4 * len(make_kv(1).token_ids)
    head = len(text.encode()).to_bytes(8, "little") + text.encode() + data[8 + length : tokens_end]
    return head + hashlib.blake2b(head, digest_size=16).digest() + data[tokens_end + 16 :]


CASES = [
    *((dtype, "native") for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn)),
    *((dtype, codec) for dtype in (torch.float32, torch.float16, torch.bfloat16) for codec in codec_names()),
]


@pytest.mark.parametrize(("dtype", "codec"), CASES, ids=str)
def test_round_trip(tmp_path: Path, dtype: torch.dtype, codec: str) -> None:
    # Long enough that its head is not read at once.
    kv = make_kv(1, tokens=9000 if dtype == torch.float64 else 33, dtype=dtype)
    data, packed = encoded(kv, codec), pack_kv(kv, make_codec(codec))
    (tmp_path / "f").write_bytes(data)
    file = ChunkFile.open(tmp_path / "f", KEY)
    # It stays readable when it is removed.
    (tmp_path / "f").unlink()
    assert same(in_bits(read(file)), in_bits(through(kv, codec)))
    assert (file.file_bytes, file.packed_bytes, file.kv_bytes) == (len(data), packed.nbytes, kv.nbytes)
    assert set(file.codecs) == {layer.codec for layer in packed.layers}


@pytest.mark.parametrize("codec", ["native", "int4"])
def test_layers_in_any_order_and_of_any_form(codec: str) -> None:
    layers = [
        LayerKV(torch.randn(1, 3, 5).to(torch.int8), torch.randn(1, 3, 5)),  # values begin at an odd place
        LayerKV(torch.randn(3, 2, 4).transpose(0, 1), torch.randn(2, 3, 4)[:, :, 1:]),  # not contiguous
        LayerKV(torch.full((2, 3, 4), torch.nan), torch.randn(2, 3, 9).half()),
        LayerKV(torch.randn(0, 3, 4), torch.randn(1, 3, 1)),  # nothing in it
    ]
    kv = ChunkKV((5, 6, 7), 0, layers)
    file = ChunkFile(Bytes(encoded(kv, codec)), KEY)
    wanted = in_bits(through(kv, codec)).layers
    for index in (2, 0, 3, 1, 0):
        got = in_bits(ChunkKV((5, 6, 7), 0, [file.layer(index)])).layers[0]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted[index], strict=True))


def test_safetensors_reads_it(tmp_path: Path) -> None:
    kv = make_kv(1)
    (tmp_path / "f").write_bytes(encoded(kv))
    tensors = load_file(tmp_path / "f")
    assert tensors["token_ids"].tolist() == list(kv.token_ids)
    assert torch.equal(tensors["layer.2.values"], kv.layers[2].values)


@pytest.mark.parametrize(("codec", "most"), [("int8", 0.55), ("int4", 0.32)])
def test_share_of_the_bytes_of_float16_header_included(codec: str, most: float) -> None:
    shape = (2, 512, 64)
    kv = ChunkKV((1,) * 512, 1, [LayerKV(torch.randn(shape).half(), torch.randn(shape).half()) for _ in range(24)])
    assert len(encoded(kv, codec)) <= most * kv.nbytes


@pytest.mark.parametrize("codec", ["native", "int4"])
def test_every_damage_is_detected(codec: str) -> None:
    data = encoded(make_kv(1, tokens=3, layers=2), codec)
    chance = random.Random(0)
    places = [*range(64), *(chance.randrange(len(data) * 8) for _ in range(600)), len(data) * 8 - 1]
    damaged = [data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :] for at in places]
    damaged += [data[: chance.randrange(len(data))] for _ in range(200)] + [b"", data[:-1], data + b"\0", data * 2]
    damaged += [bytes(len(data)), data[: len(data) // 2] + bytes(len(data) - len(data) // 2)]
    for wrong in damaged:
        with pytest.raises(ChunkReadError):
            ChunkFile(Bytes(wrong), KEY).verify()


def test_damage_in_one_layer_leaves_the_others_readable() -> None:
    kv = make_kv(1)
    data = encoded(kv)
    file = ChunkFile(Bytes(data[:-1] + bytes([data[-1] ^ 1])), KEY)
    assert torch.equal(file.layer(1).keys, kv.layers[1].keys)
    with pytest.raises(ChunkReadError) as error:
        file.layer(2)
    assert (error.value.key, error.value.damaged) == (KEY, True)


def test_a_file_of_another_key_or_cut_short_while_open(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(encoded(make_kv(1)))
    with pytest.raises(ChunkReadError):
        ChunkFile.open(tmp_path / "f", key_of(2))
    file = ChunkFile.open(tmp_path / "f", KEY)
    with open(tmp_path / "f", "r+b") as writer:
        writer.truncate(file.file_bytes - 10)
    with pytest.raises(ChunkReadError):
        file.layer(2)


def another_format(told: dict[str, Any]) -> None:
    told["__metadata__"]["format"] = "cacheblend-rag chunk kv 99"


def another_codec(told: dict[str, Any]) -> None:
    told["__metadata__"]["forms"] = told["__metadata__"]["forms"].replace("native", "int9")


@pytest.mark.parametrize("change", [another_format, another_codec])
def test_what_another_version_has_written_is_refused_and_not_called_damaged(change: Callable[..., None]) -> None:
    with pytest.raises(ChunkReadError) as error:
        ChunkFile(Bytes(rewritten(change)), KEY)
    assert not error.value.damaged


# JSON that is right nowhere in a header.
JUNK = st.one_of(
    st.sampled_from(
        ["true", "{}", "[[]]", '["x"]', "NaN", "1e999", "9" * 4000, "[-1]", "[1.5]", "[", "-1", "4294967296"]
    ),
    st.integers(3, 200_000).map(lambda depth: "[" * depth + "]" * depth),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where a value and all inside it stand."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


@settings(max_examples=200)
@given(st.data())
def test_a_file_that_somebody_wrote_to_do_harm(data: st.DataObject) -> None:
    """As in a remote tier that others write to: a header whose digest is right, and which says something that is not so."""

    def change(told: dict[str, Any]) -> str:
        *path, last = data.draw(st.sampled_from([path for path in places(told) if path]))
        inside: Any = told
        for key in path:
            inside = inside[key]
        inside[last] = "JUNK"
        return json.dumps(told).replace('"JUNK"', data.draw(JUNK))

    written = rewritten(change)
    with within(200_000_000, 1.0), suppress(ChunkReadError):
        file = ChunkFile(Bytes(written), KEY)
        file.verify()
        # What is not read: where the KV began, and types of tensors that have but one.
        assert len(file.token_ids) == len(make_kv(1).token_ids)


def test_what_cannot_be_stored() -> None:
    ones = torch.ones(1, 1, 1)
    for kv in (
        ChunkKV((1,), 0, [LayerKV(ones, ones.to(torch.complex64))]),
        ChunkKV((2**31,), 0, [LayerKV(ones, ones)]),
    ):
        with pytest.raises(StoreError):
            encode_chunk(KEY, kv)
    short = make_kv(1)
    layers = (LayerKV(*(tensor[:, :5] for tensor in short.layers[0])), *short.layers[1:])
    with pytest.raises(ChunkReadError):
        ChunkFile(Bytes(encoded(ChunkKV(short.token_ids, 0, layers))), KEY)


@pytest.mark.parametrize("disk", codec_names())
@pytest.mark.parametrize("ram", codec_names())
def test_each_tier_packs_with_its_codec_and_reads_any(tmp_path: Path, ram: str, disk: str) -> None:
    kv = make_kv(1, tokens=40)
    wanted, in_ram = through(kv, disk, ram), pack_kv(pack_kv(kv, make_codec(disk)), make_codec(ram)).nbytes
    store = open_store(tmp_path, kv.nbytes, ram_codec=ram, disk_codec=disk)
    put_kv(store, KEY, kv)
    (path,) = files_of(tmp_path)
    # Packed from the KV itself, not from what RAM has made of it.
    assert same(read(ChunkFile.open(path, KEY)), through(kv, disk))
    assert same(read(opened(store, KEY)), wanted)
    assert store.stats().ram_bytes == in_ram
    store.close()
    assert check_store(tmp_path).is_clean
    # KV that is stored is a hit whatever the settings say now, and is kept in RAM as it is kept there.
    store = open_store(tmp_path, kv.nbytes, ram_codec=ram, disk_codec="int8")
    assert same(read(opened(store, KEY)), wanted)
    assert store.stats().ram_bytes == in_ram
    path.rename(tmp_path / "kv" / "moved")
    assert same(read(opened(store, KEY)), wanted)
    (tmp_path / "kv" / "moved").rename(path)
    put_kv(store, KEY, kv)
    assert path.read_bytes() == encoded(kv, disk)


def test_an_unknown_codec(tmp_path: Path) -> None:
    for setting in ({"ram_codec": "int3"}, {"disk_codec": "zip"}):
        with pytest.raises(ConfigError):
            open_store(tmp_path / "store", 0, **setting)
    assert not (tmp_path / "store").exists()
