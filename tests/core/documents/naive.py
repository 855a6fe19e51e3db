"""What documents lead to, worked out in the plainest way from all that was ever done to them.

Nothing of how the package reads documents is used here: every question is answered from scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.store import NodeRecord
from tests.core.documents.texts import TOLERANCE, distance, expected
from tests.engines import store_of
from tests.families import tiny_model

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A chunk as it was added; the words of the tiny tokenizer are `t` and the number of their token."""

    chunk: Chunk

    @property
    def id(self) -> str:
        return str(self.chunk.id)

    @property
    def ids(self) -> Ids:
        return tuple(int(word[1:]) for word in self.chunk.text.split())


@dataclass(frozen=True)
class Reading:
    """Behind what a chunk is encoded."""

    context: Ids
    ids: Ids


@dataclass
class Library:
    """All chunks that there should be, those of each document in the order in which they came, and how they are set off."""

    separator: Ids
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    alone: dict[str, Piece] = field(default_factory=dict)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Add chunks, of several with one id the last, where the first stood."""
        for chunk in {chunk.id: chunk for chunk in chunks}.values():
            new = Piece(chunk)
            if chunk.document is None:
                self.remove([new.id])
                self.alone[new.id] = new
                continue
            there = self.pieces.get(chunk.document, [])
            old = next((piece for piece in there if piece.id == new.id), None)
            if old is not None and old.chunk.start == chunk.start:
                there[there.index(old)] = new
                continue
            self.remove([new.id])
            self.pieces.setdefault(chunk.document, []).append(new)

    def others(self, chunks: Iterable[Chunk]) -> set[str]:
        """Return what else there is in the documents of these chunks."""
        named = {str(chunk.id): chunk.document for chunk in chunks}
        there = {piece.id for document in named.values() for piece in self.pieces.get(document or "", [])}
        return there - set(named)

    def remove(self, ids: Iterable[str]) -> None:
        for id in ids:
            self.alone.pop(id, None)
            for document, pieces in list(self.pieces.items()):
                self.pieces[document] = [piece for piece in pieces if piece.id != id]
                if not self.pieces[document]:
                    del self.pieces[document]

    def order(self, document: str) -> list[Piece]:
        """Return those with a place by their places, and then the others as they came."""
        pieces = self.pieces.get(document, [])
        placed = [piece for piece in pieces if piece.chunk.start is not None]
        return [
            *sorted(placed, key=lambda each: each.chunk.start or 0),
            *(piece for piece in pieces if piece.chunk.start is None),
        ]

    def readings(self) -> dict[str, Reading]:
        """Return how the KV right behind the preamble is read."""
        pieces = [*self.alone.values(), *(piece for pieces in self.pieces.values() for piece in pieces)]
        return {piece.id: Reading((), piece.ids + self.separator) for piece in pieces}


def later_of(engine: BlendEngine, record: NodeRecord, readings: Mapping[str, Reading]) -> Reading | None:
    """Return how a chunk's KV behind another one is read, what it has seen being there as it was; None until that is chosen."""
    if record.later is None:
        return None
    own = readings[record.id]
    ids = {id for id, _ in record.later.seen}
    assert record.id not in ids
    assert ids <= set(readings), "what was seen is gone"
    there = {each.id: each.key for each in engine.records(list(ids)) if each is not None}
    assert all(there[id] == key for id, key in record.later.seen), "what was seen is another by now"
    # All words of the package's passages are one token to the tiny tokenizer, that of what it does not know.
    told = {token for id in ids for token in readings[id].ids} | {0, *own.ids[len(record.token_ids) :]}
    assert told >= set(record.later.behind)
    return Reading(record.later.behind, own.ids)


@cache
def small_model() -> PreTrainedModel:
    """Return a model of two layers, in the second of which it shows what stands before."""
    config = tiny_model("llama").config.to_dict() | {"num_hidden_layers": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.25)
    return model.eval()


class Rows:
    """The rows that chunks should have, computed once each by a plain forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._known: dict[tuple[Ids, Ids], list[LayerKV]] = {}

    def distance(self, engine: BlendEngine, key: str, reading: Reading) -> float | None:
        """Return how far stored KV is from what it should be, of each layer's largest value; None where none is stored."""
        reader = store_of(engine).open(key)
        if reader is None:
            return None
        assert engine.model is self.model
        assert reader.token_ids == reading.ids
        name = reading.context, reading.ids
        if name not in self._known:
            self._known[name] = expected(engine, *name)
        return distance(reader, self._known[name])

    def is_right(self, engine: BlendEngine, key: str, reading: Reading) -> bool:
        distance = self.distance(engine, key, reading)
        return distance is None or distance < TOLERANCE
