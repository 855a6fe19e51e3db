"""What every remote tier does: Redis, a folder, memory, S3."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import ChunkReadError, RemoteUnavailableError, StoreError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.store import open_remote
from cacheblend_rag.store.chunkfile import ChunkFile, EncodedChunk, encode_chunk
from cacheblend_rag.store.remote import RemoteTier
from tests.store.kit import key_of, make_kv, read, same
from tests.store.remote.conftest import Opener


def put(tier: RemoteTier, number: int, kv: ChunkKV | None = None) -> EncodedChunk:
    chunk = encode_chunk(key_of(number), kv or make_kv(number))
    tier.put(key_of(number), chunk)
    return chunk


def get(tier: RemoteTier, number: int) -> ChunkKV | None:
    source = tier.open(key_of(number))
    return None if source is None else read(ChunkFile(source, key_of(number)))


def test_one_machine_writes_another_reads(opener: Opener) -> None:
    writer, reader = opener(), opener()
    assert reader.open(key_of(1)) is None
    assert reader.holds([]) == []
    for number in (1, 2):
        put(writer, number)
        put(writer, number)
    assert reader.holds([key_of(n) for n in (0, 1, 2, 3)]) == [False, True, True, False]
    for number in (1, 2):
        found = get(reader, number)
        assert found is not None and same(found, make_kv(number))
    reader.drop([key_of(1), key_of(3)])
    assert writer.holds([key_of(1), key_of(2)]) == [False, True]
    assert writer.open(key_of(1)) is None
    writer.drop([key_of(2)])
    writer.drop([])
    assert reader.holds([key_of(1), key_of(2)]) == [False, False]


def test_a_layer_is_read_alone_and_any_range(opener: Opener) -> None:
    tier = opener()
    kv = make_kv(1, tokens=1000, layers=4)
    chunk = put(tier, 1, kv)
    source = tier.open(key_of(1))
    assert source is not None and source.size == chunk.nbytes
    layer = ChunkFile(source, key_of(1)).layer(2)
    assert torch.equal(layer.keys, kv.layers[2].keys) and torch.equal(layer.values, kv.layers[2].values)
    whole = b"".join(chunk.buffers)

    @settings(max_examples=20)
    @given(st.integers(0, len(whole) + 5), st.integers(0, len(whole)))
    def check(offset: int, size: int) -> None:
        view = memoryview(bytearray(size))
        count = source.read_into(view, offset)
        assert bytes(view[:count]) == whole[offset : offset + len(view)]

    check()


@pytest.mark.parametrize("key", ["", "../../../../etc/passwd", "ABCDEF0123", "abcdef01\n", "*" * 8, "a" * 129])
def test_keys_lead_nowhere_else(opener: Opener, key: str) -> None:
    tier, chunk = opener(), encode_chunk(key_of(1), make_kv(1))
    calls = [lambda: tier.put(key, chunk), lambda: tier.open(key), lambda: tier.holds([key_of(1), key])]
    for call in (*calls, lambda: tier.drop([key])):
        with pytest.raises(StoreError, match="key"):
            call()


def test_a_reader_never_mixes_two_versions_and_a_closed_tier_reads_none(opener: Opener) -> None:
    tier, other = opener(), opener()
    old, new = make_kv(1, tokens=50), make_kv(2, tokens=50)
    put(tier, 1, old)
    source = tier.open(key_of(1))
    assert source is not None
    file = ChunkFile(source, key_of(1))
    file.layer(0)
    put(other, 1, new)
    with suppress(ChunkReadError):
        assert torch.equal(file.layer(1).keys, old.layers[1].keys)
    found = get(tier, 1)
    assert found is not None and same(found, new)
    for _ in range(2):
        tier.close()
    with pytest.raises(RemoteUnavailableError):
        tier.open(key_of(1))


def test_files_are_private(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    before = os.umask(0)
    try:
        tier = open_remote(f"file://{tmp_path}/share")
        put(tier, 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "share").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert not list((tmp_path / "share" / "tmp").iterdir())
