"""What documents lead to, worked out in the plainest way from all that was ever done to them.

Nothing of how the package reads documents is used here: every question is answered from scratch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.kv import LayerKV
from tests.core.documents.texts import TOLERANCE, expected
from tests.families import tiny_model

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A chunk as it was added; the words of the tiny tokenizer are `t` and the number of their token."""

    chunk: Chunk
    previous: str | None
    expires_at: float

    @property
    def id(self) -> str:
        return str(self.chunk.id)

    @property
    def ids(self) -> Ids:
        return tuple(int(word[1:]) for word in self.chunk.text.split())

    @property
    def body(self) -> str:
        begin, stop = self.chunk.body or (0, len(self.chunk.text))
        return self.chunk.text[begin:stop]

    def before(self, after: Piece, separator: Ids) -> Ids:
        shared = 0
        if self.chunk.start is not None and after.chunk.start is not None:
            shared = max(0, self.chunk.start + len(self.body) - after.chunk.start)
        elif self.chunk.start is None and after.chunk.start is None:
            alike = [n for n in range(16, min(len(self.body), len(after.body)) + 1) if self.body[-n:] == after.body[:n]]
            shared = max(alike, default=0)
        if not shared:
            return self.ids + separator
        end = len(self.body) - shared
        first = 0 if self.chunk.body is None else self.chunk.body[0]
        left, at = [], -first
        for word in self.chunk.text.split(" "):
            at += len(word)
            if at <= end:
                left.append(int(word[1:]))
            at += 1
        return tuple(left) if end > 0 else ()


@dataclass(frozen=True)
class Reading:
    """Behind what a chunk is encoded, and when the first life in that ends; what has ended counts no more."""

    context: Ids
    ids: Ids
    expires_at: float


@dataclass
class Library:
    """All chunks that there should be.

    Attributes
    ----------
    limit, separator
        How documents are read.
    pieces : dict
        The chunks of each document, in the order in which they came.
    alone : dict
        Those of none.
    """

    limit: int | None
    separator: Ids
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    alone: dict[str, Piece] = field(default_factory=dict)

    def add(self, chunks: Iterable[Chunk], expires_at: float) -> None:
        """Add chunks, of several with one id the last, where the first stood."""
        for chunk in {chunk.id: chunk for chunk in chunks}.values():
            new = Piece(chunk, None if chunk.start is not None else chunk.previous, expires_at)
            if chunk.document is None:
                self.remove([new.id])
                self.alone[new.id] = new
                continue
            there = self.pieces.get(chunk.document, [])
            old = next((piece for piece in there if piece.id == new.id), None)
            if old is not None and (old.chunk.start, old.previous) == (chunk.start, new.previous):
                there[there.index(old)] = replace(new, expires_at=max(old.expires_at, expires_at))
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
                gone = next((piece for piece in pieces if piece.id == id), None)
                if gone is None:
                    continue
                left = [replace(p, previous=gone.previous) if p.previous == id else p for p in pieces if p is not gone]
                self.pieces[document] = left
                if not left:
                    del self.pieces[document]

    def order(self, document: str) -> list[Piece]:
        pieces = self.pieces.get(document, [])
        known = {piece.id for piece in pieces}
        firsts = [piece for piece in pieces if piece.previous not in known]
        placed = sorted((piece for piece in firsts if piece.chunk.start is not None), key=lambda each: each.chunk.start)

        def with_followers(piece: Piece) -> list[Piece]:
            followers = [each for each in pieces if each.previous == piece.id]
            return [piece, *(each for follower in followers for each in with_followers(follower))]

        ordered = placed + [piece for piece in firsts if piece.chunk.start is None]
        return [each for piece in ordered for each in with_followers(piece)]

    def has_circle(self) -> bool:
        """Return whether chunks name each other as predecessors, so that no order is theirs."""
        return any(len(self.order(document)) < len(pieces) for document, pieces in self.pieces.items())

    def readings(self, now: float) -> dict[str, Reading]:
        found = {id: Reading((), piece.ids + self.separator, _life([piece], now)) for id, piece in self.alone.items()}
        for document in self.pieces:
            ordered = self.order(document)
            begin = 0
            for number, piece in enumerate(ordered):

                def context(first: int, number: int = number, ordered: list[Piece] = ordered) -> Ids:
                    ids: Ids = ()
                    for place in range(first, number):
                        ids += ordered[place].before(ordered[place + 1], self.separator)
                    return ids

                size = len(piece.ids + self.separator)
                if self.limit is not None and begin < number and len(context(begin)) + size > self.limit:
                    room = min(self.limit // 4, self.limit - size)
                    begin = next((n for n in range(begin, number) if len(context(n)) <= room), number)
                life = _life(ordered[begin : number + 1], now)
                found[piece.id] = Reading(context(begin), piece.ids + self.separator, life)
        return found


def _life(pieces: list[Piece], now: float) -> float:
    return min((piece.expires_at for piece in pieces if piece.expires_at > now), default=math.inf)


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
        reader = engine._store.open(key)
        if reader is None:
            return None
        assert engine.model is self.model
        assert reader.token_ids == reading.ids
        name = reading.context, reading.ids
        if name not in self._known:
            self._known[name] = expected(engine, *name)
        return max(
            float((ours - own).abs().max() / own.abs().max())
            for number, layer in enumerate(self._known[name])
            for ours, own in zip(reader.layer(number), layer, strict=True)
        )

    def is_right(self, engine: BlendEngine, key: str, reading: Reading) -> bool:
        distance = self.distance(engine, key, reading)
        return distance is None or distance < TOLERANCE
