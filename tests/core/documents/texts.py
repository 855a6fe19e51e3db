"""Documents of the tiny tokenizer's words cut into chunks, and what their KV should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.kv import LayerKV, shift_layer
from cacheblend_rag.model import CACHE, KVCache
from cacheblend_rag.store import KVReader
from tests.engines import preamble_of, store_of
from tests.families import words

TOLERANCE = 1e-5
"""Of a layer's largest value."""


@dataclass(frozen=True)
class Text:
    """A document: its words, and the half-open ranges of them that are its chunks, by where they begin."""

    name: str
    words: tuple[str, ...]
    cuts: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, name: str, sizes: Sequence[int], overlaps: Sequence[int], seed: int) -> Text:
        """Return chunks of so many words, of which each begins so many words before the end of the one before it."""
        cuts, begin = [], 0
        for number, size in enumerate(sizes):
            if number:
                begin = max(cuts[-1][0] + 1, cuts[-1][1] - overlaps[number - 1])
            cuts.append((begin, begin + size))
        return cls(name, tuple(words(max(stop for _, stop in cuts), seed).split()), tuple(cuts))

    def chunk(self, number: int) -> Chunk:
        """Return one of its chunks."""
        begin, stop = self.cuts[number]
        starts = list(accumulate((len(word) + 1 for word in self.words), initial=0))
        return Chunk(
            " ".join(self.words[begin:stop]),
            f"{self.name}-{number}",
            document=self.name,
            start=starts[begin],
        )

    @property
    def chunks(self) -> list[Chunk]:
        return [self.chunk(number) for number in range(len(self.cuts))]


@torch.no_grad()
def expected(engine: BlendEngine, context: Sequence[int], ids: Sequence[int]) -> list[LayerKV]:
    """Return the rows of `ids` in one plain forward over preamble, context and `ids`, turned to right behind the preamble."""
    decoder = engine.decoder
    assert decoder is not None
    prefix = preamble_of(engine)
    cache = KVCache(decoder.num_layers)
    inputs = torch.tensor([[*prefix, *context, *ids]])
    decoder.model.get_decoder()(input_ids=inputs, **{CACHE: cache}, use_cache=True)
    start = len(prefix) + len(context)
    rows = []
    for layer, rotation in zip(cache.kv(), decoder.rotations, strict=True):
        kv = LayerKV(*(part[0, :, start:].clone() for part in layer))
        if rotation is not None:
            shift_layer(kv, rotation.table(torch.full((len(ids),), -len(context)), torch.device("cpu")))
        rows.append(kv)
    return rows


def distance(reader: KVReader, rows: Sequence[LayerKV]) -> float:
    """Return how far stored KV is from what it should be, relative to each layer's largest value."""
    return max(
        float((ours - own).abs().max() / own.abs().max())
        for number, layer in enumerate(rows)
        for ours, own in zip(reader.layer(number), layer, strict=True)
    )


def distances(engine: BlendEngine, id: str) -> list[float]:
    """Return how far what is stored of a chunk is off: its KV right behind the preamble, and that behind other chunks."""
    [record] = engine.records([id])
    assert record is not None and record.later is not None
    ids = record.token_ids + record.separator
    found = []
    for key, behind in ((record.key, ()), (record.later.key, record.later.behind)):
        if (reader := store_of(engine).open(key)) is not None:
            assert reader.token_ids == ids
            found.append(distance(reader, expected(engine, behind, ids)))
    return found
