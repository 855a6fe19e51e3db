"""The bytes of a chunk's file."""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from cacheblend_rag.errors import ChunkReadError, StoreError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.chunkfile import ChunkFile, encode_chunk
from tests.limits import within
from tests.store.kit import key_of, make_kv, read, same

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


def write(path: Path, kv: ChunkKV) -> bytes:
    data = b"".join(encode_chunk(KEY, kv).buffers)
    path.write_bytes(data)
    return data


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn]
)
def test_round_trip(tmp_path: Path, dtype: torch.dtype) -> None:
    kv = make_kv(1, tokens=7, dtype=dtype)
    data = write(tmp_path / "f", kv)
    file = ChunkFile.open(tmp_path / "f", KEY)
    back = read(file)
    views = [[t.view(torch.uint8) if dtype.itemsize == 1 else t for t in layer] for layer in (*kv.layers, *back.layers)]
    assert all(torch.equal(a, b) for x, y in zip(views[:3], views[3:], strict=True) for a, b in zip(x, y, strict=True))
    assert (back.token_ids, back.start, back.layers[0].keys.dtype) == (kv.token_ids, kv.start, dtype)
    assert (file.file_bytes, file.kv_bytes) == (len(data), kv.nbytes)


def test_layers_in_any_order_and_of_any_layout(tmp_path: Path) -> None:
    layers = [
        LayerKV(torch.randn(1, 3, 5).to(torch.int8), torch.randn(1, 3, 5)),  # values begin at an odd place
        LayerKV(torch.randn(3, 2, 4).transpose(0, 1), torch.randn(2, 3, 4)[:, :, 1:]),  # not contiguous
        LayerKV(torch.randn(0, 3, 4), torch.randn(1, 3, 1)),  # nothing in it
    ]
    write(tmp_path / "f", ChunkKV((5, 6, 7), 0, layers))
    file = ChunkFile.open(tmp_path / "f", KEY)
    for index in (2, 0, 1, 0):
        assert all(torch.equal(a, b) for a, b in zip(file.layer(index), layers[index], strict=True))


def test_safetensors_reads_it(tmp_path: Path) -> None:
    kv = make_kv(1)
    write(tmp_path / "f", kv)
    tensors = load_file(tmp_path / "f")
    assert tensors["token_ids"].tolist() == list(kv.token_ids)
    assert torch.equal(tensors["layer.2.values"], kv.layers[2].values)


def test_long_head(tmp_path: Path) -> None:
    kv = make_kv(1, tokens=9000, layers=1)
    write(tmp_path / "f", kv)
    assert same(read(ChunkFile.open(tmp_path / "f", KEY)), kv)


def test_every_damage_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = write(path, make_kv(1, tokens=3, layers=2))
    chance = random.Random(0)
    places = [*range(64), *(chance.randrange(len(data) * 8) for _ in range(600)), len(data) * 8 - 1]
    damaged = [data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :] for at in places]
    damaged += [data[: chance.randrange(len(data))] for _ in range(200)] + [b"", data[:-1], data + b"\0", data * 2]
    damaged += [bytes(len(data)), data[: len(data) // 2] + bytes(len(data) - len(data) // 2)]
    for wrong in damaged:
        path.write_bytes(wrong)
        with pytest.raises(ChunkReadError):
            ChunkFile.open(path, KEY).verify()


def test_damage_in_one_layer_leaves_the_others_readable(tmp_path: Path) -> None:
    kv = make_kv(1)
    data = bytearray(write(tmp_path / "f", kv))
    data[-1] ^= 1
    (tmp_path / "f").write_bytes(data)
    file = ChunkFile.open(tmp_path / "f", KEY)
    assert torch.equal(file.layer(1).keys, kv.layers[1].keys)
    with pytest.raises(ChunkReadError, match="layer 2 does not match its checksum") as error:
        file.layer(2)
    assert error.value.key == KEY


def test_cut_short_while_open(tmp_path: Path) -> None:
    data = write(tmp_path / "f", make_kv(1))
    file = ChunkFile.open(tmp_path / "f", KEY)
    with open(tmp_path / "f", "r+b") as writer:
        writer.truncate(len(data) - 10)
    with pytest.raises(ChunkReadError, match="ends too early"):
        file.layer(2)


def test_readable_after_it_was_removed(tmp_path: Path) -> None:
    kv = make_kv(1)
    write(tmp_path / "f", kv)
    file = ChunkFile.open(tmp_path / "f", KEY)
    (tmp_path / "f").unlink()
    assert same(read(file), kv)


def test_file_of_another_key(tmp_path: Path) -> None:
    write(tmp_path / "f", make_kv(1))
    with pytest.raises(ChunkReadError, match="belongs to key"):
        ChunkFile.open(tmp_path / "f", key_of(2))


def test_layers_of_fewer_rows_than_tokens(tmp_path: Path) -> None:
    kv = make_kv(1, tokens=6)
    short = LayerKV(*(tensor[:, :5] for tensor in kv.layers[0]))
    write(tmp_path / "f", ChunkKV(kv.token_ids, kv.start, (short, *kv.layers[1:])))
    with pytest.raises(ChunkReadError, match="its header is damaged"):
        ChunkFile.open(tmp_path / "f", key_of(1))


CHUNK = b"".join(map(bytes, encode_chunk(KEY, make_kv(1)).buffers))
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


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """A file whose digest is right, and whose header says something that is not so."""
    length = int.from_bytes(CHUNK[:8], "little")
    told = json.loads(CHUNK[8 : 8 + length])
    *path, last = draw(st.sampled_from([path for path in places(told) if path]))
    inside = told
    for key in path:
        inside = inside[key]
    inside[last] = "JUNK"
    text = json.dumps(told).replace('"JUNK"', draw(JUNK)).encode()
    tokens_end = 8 + length + 4 * len(make_kv(1).token_ids)
    head = len(text).to_bytes(8, "little") + text + CHUNK[8 + length : tokens_end]
    return head + hashlib.blake2b(head, digest_size=16).digest() + CHUNK[tokens_end + 16 :]


@settings(max_examples=200)
@given(hostile())
def test_a_file_that_somebody_wrote_to_do_harm(data: bytes) -> None:
    """As in a remote tier that others write to."""
    with within(200_000_000, 1.0), suppress(ChunkReadError):
        file = ChunkFile(Bytes(data), KEY)
        file.verify()
        # What is not read: where the KV began, and types of tensors that have but one.
        assert len(file.token_ids) == len(make_kv(1).token_ids)


def test_what_cannot_be_stored() -> None:
    ones = torch.ones(1, 1, 1)
    with pytest.raises(StoreError, match=r"layer 0 has values of torch\.complex64"):
        encode_chunk(KEY, ChunkKV((1,), 0, [LayerKV(ones, ones.to(torch.complex64))]))
    with pytest.raises(StoreError, match="token ids"):
        encode_chunk(KEY, ChunkKV((2**31,), 0, [LayerKV(ones, ones)]))
