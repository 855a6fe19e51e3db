"""The size of an ingestion, told from one text of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.codec import codec_names, make_codec, pack_kv
from cacheblend_rag.engine.cost import _first, _total
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.chunkfile import encode_chunk


@settings(max_examples=40)
@given(
    codec=st.sampled_from(codec_names()),
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([8, 20, 64])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_one_text_tells_the_size_of_all(
    codec: str, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    layers, heads, dim = shape
    count = max(lengths)
    tensors = torch.randn(layers, 2, heads, count, dim, generator=torch.Generator().manual_seed(count)).to(dtype)
    kv = ChunkKV(tuple(range(count)), 1, [LayerKV(*layer) for layer in tensors])

    def size(kv: ChunkKV) -> int:
        return encode_chunk("0" * 32, pack_kv(kv, make_codec(codec))).nbytes

    assert _total(kv, lengths, size) == pytest.approx(sum(size(_first(kv, length)) for length in lengths), rel=0.1)
