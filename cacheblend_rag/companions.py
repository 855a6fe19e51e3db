"""What a chunk is read behind, for the KV that serves it behind other chunks of a prompt.

A chunk that was read right behind the preamble is not in the state in which the model meets it in a prompt, where it follows
other chunks. It is read behind passages of the same kind of text instead, a companion, and the end of its own document, each
set off as chunks are in prompts; docs/encoding.md has what that is worth.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import chain

import numpy as np

from cacheblend_rag.chunk import HEAD_PREFIX, chunk_key, context_digest
from cacheblend_rag.store import Later, Names, NodeRecord

__all__ = ["Companions", "Nearness"]

_MOST_TOKENS = 256
"""Of a companion; the beginning of a longer one is taken, which is read for its own KV too."""

_PASSAGES = 2
"""Those nearest to a chunk's document, first of all: so that what is read behind them begins alike, and they are read once."""

_ENDING_TOKENS = 64
"""Of its own document, right before the chunk."""

# A word that more than this share of texts have says little of what they are about.
_COMMON = 0.2
_MANY = 50


class Nearness:
    """Which of some texts, in tokens, are about the same as another: by the words that they share, rare ones more (BM25)."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        each = [np.unique(np.asarray(text, dtype=np.int64)) for text in texts]
        lengths = np.array(list(map(len, each)), dtype=np.int64)
        owners = np.repeat(np.arange(len(texts)), lengths)
        words = np.concatenate(each) if each else np.empty(0, dtype=np.int64)
        order = words.argsort(kind="stable")
        # The owners of each word stand together, from its own start to the next one's.
        self._owners = owners[order]
        self._known, starts = np.unique(words[order], return_index=True)
        self._starts = np.append(starts, len(words))
        self._scale = 1 / (0.25 + 0.75 * lengths / max(lengths.mean(), 1)) if each else np.empty(0)

    def nearest(self, text: Sequence[int], most: int = 32) -> list[int]:
        """Return the numbers of so many texts at most, the nearest first; those that are as near in their order."""
        scores = np.zeros(len(self._scale))
        words = np.unique(np.asarray(text, dtype=np.int64))
        places = np.searchsorted(self._known, words)
        for place, word in zip(places, words, strict=True):
            if place < len(self._known) and self._known[place] == word:
                owners = self._owners[self._starts[place] : self._starts[place + 1]]
                if len(owners) <= max(_COMMON * len(scores), _MANY):
                    scores[owners] += np.log(1 + (len(scores) - len(owners) + 0.5) / (len(owners) + 0.5))
        scores *= -self._scale
        best = np.argpartition(scores, most)[:most] if most < len(scores) else np.arange(len(scores))
        return list(map(int, best[np.lexsort((best, scores[best]))]))


@dataclass(frozen=True)
class _Document:
    """A document in the order of reading, and the passages nearest to it."""

    members: Sequence[NodeRecord]
    passages: tuple[tuple[int, ...], ...]

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {member.id: number for number, member in enumerate(self.members)}

    @cached_property
    def nearness(self) -> Nearness:
        return Nearness([member.token_ids for member in self.members])


class Companions:
    """Chooses what chunks are read behind."""

    def __init__(
        self,
        kind: str,
        namespace: str,
        separator: tuple[int, ...],
        room: int | None,
        tokenize: Callable[[str], tuple[int, ...]],
        names: Callable[[], Names],
    ) -> None:
        self._kind, self._namespace, self._separator, self._room = kind, namespace, separator, room
        self._tokenize, self._names = tokenize, names
        # The ids of all chunks of the store, as they were at some time.
        self._pool: tuple[list[str], Nearness] = [], Nearness(())

    @cached_property
    def _known_passages(self) -> tuple[list[tuple[int, ...]], Nearness]:
        texts = files("cacheblend_rag").joinpath("passages.txt").read_text("utf-8").split("\n%\n")
        found = [self._tokenize(text.strip("\n"))[:_MOST_TOKENS] for text in texts]
        return found, Nearness(found)

    def choose(self, records: Sequence[NodeRecord], documents: Mapping[str, Sequence[NodeRecord]]) -> list[Later]:
        """Return how the KV behind others is computed of each chunk, whose documents are given in reading order."""
        if self._kind == "similar" and records:
            self._look_at_store()
        read: dict[str, _Document] = {}
        found = []
        for record in records:
            name = record.document or ""
            if name not in read:
                members = () if self._kind == "neutral" else documents.get(name, ())
                read[name] = _Document(members, self._passages(*(member.token_ids for member in members)))
            document = read[name]
            number = document.numbers.get(record.id)
            own = () if number is None else document.nearness.nearest(record.token_ids)
            of_all = self._of_store(record) if self._pool[0] else ()
            candidates = chain(of_all, (document.members[place] for place in own))
            others = (each for each in candidates if each.id != record.id and each.token_ids != record.token_ids)
            found.append(self._later(record, next(others, None), document, number))
        return found

    def _look_at_store(self) -> None:
        """Take in the chunks of the store, unless they are hardly more by now."""
        names = self._names()
        ids = names.ids(self._namespace)
        if not self._pool[0] or len(ids) > 1.1 * len(self._pool[0]) + 8:
            ids = [id for id in ids if not id.startswith(HEAD_PREFIX)]
            known = [each for each in names.lookup(self._namespace, ids) if each is not None]
            self._pool = [each.id for each in known], Nearness([each.token_ids for each in known])

    def _of_store(self, record: NodeRecord) -> Iterator[NodeRecord]:
        ids, nearness = self._pool
        for place in nearness.nearest(record.token_ids):
            [known] = self._names().lookup(self._namespace, [ids[place]])
            if known is not None:
                yield known

    def _later(
        self,
        record: NodeRecord,
        other: NodeRecord | None,
        document: _Document,
        number: int | None,
    ) -> Later:
        own = record.token_ids + record.separator
        room = math.inf if self._room is None else self._room - len(own)
        ending: tuple[int, ...] = ()
        before: tuple[str, ...] = ()
        if number is not None:
            ending, before = _end_before(document.members, number, self._separator)
        seen = {id: document.members[document.numbers[id]].token_ids for id in before}
        companion: tuple[int, ...] = ()
        if other is not None:
            companion = other.token_ids[:_MOST_TOKENS]
            seen[other.id] = other.token_ids
            if before == (other.id,) and len(other.token_ids) <= _MOST_TOKENS:
                # It is what stands before the chunk.
                ending = ()
        passages = self._passages(record.token_ids) if number is None else document.passages
        texts = (*passages, companion, ending)
        behind = tuple(chain.from_iterable(text + self._separator for text in texts if text))
        if room < len(behind):
            # The end stays: of the passages less, of the companion, and then of the document.
            behind = behind[len(behind) - max(int(room), 0) :]
        keys = tuple((id, chunk_key(self._namespace, text + record.separator)) for id, text in sorted(seen.items()))
        key = chunk_key(self._namespace, own, None, context_digest(behind))
        return Later(key, behind, keys if behind else ())

    def _passages(self, *texts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the passages nearest to texts together, in the package's order."""
        passages, nearness = self._known_passages
        near = nearness.nearest(tuple(chain.from_iterable(texts)), _PASSAGES)
        return tuple(passages[each] for each in sorted(near))


def _end_before(
    ordered: Sequence[NodeRecord], number: int, separator: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the end of the text before a chunk of a document in reading order, and the ids of the chunks that it is of."""
    tokens: tuple[int, ...] = ()
    ids: list[str] = []
    while number and ordered[number].start is not None and len(tokens) < _ENDING_TOKENS:
        number -= 1
        tokens = _left(ordered[number], ordered[number + 1], separator if tokens else ()) + tokens
        ids.append(ordered[number].id)
    return tokens[-_ENDING_TOKENS:], tuple(ids)


def _left(before: NodeRecord, after: NodeRecord, separator: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of a chunk that stand before the next one: where they overlap, it counts up to there."""
    assert before.start is not None and after.start is not None
    left = after.start - before.start
    if left >= before.length:
        return before.token_ids + separator
    # Of a chunk that begins no earlier than the next one nothing is left, nor of the words around its body.
    return before.token_ids[: bisect_right(before.ends, left)] if left > 0 else ()
