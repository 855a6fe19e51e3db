"""The chunks of a context as pieces of their documents, and, for comparison, behind what does not belong before them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.lab.eval.methods import BEHIND_OTHER, BEHIND_SHUFFLED, DOCUMENTS

__all__ = ["Pieces"]


class Pieces:
    """Names the chunks of a context by what a method reads, and knows which of them have to be stored for that.

    Parameters
    ----------
    texts : sequence of str
        The texts of the chunks.
    lengths : sequence of int
        How many chunks each document has (`EvalContext.documents`); none where they are of no document.
    separator : str
        What stands between two chunks of a document.
    limit : int, optional
        Most tokens of whole documents; at least one document is read.
    count : callable
        Returns how many tokens a text has.

    Attributes
    ----------
    stored : dict of str to (dict of str to Chunk)
        For each thing that was read, all chunks that it takes, by id: of a document that one is a piece of, every piece. The
        retrieved chunks and those of whole documents are under "".
    """

    def __init__(
        self,
        texts: Sequence[str],
        lengths: Sequence[int],
        separator: str,
        limit: int | None,
        count: Callable[[str], int],
    ) -> None:
        self._texts = texts
        self._separator = separator
        self._limit = limit
        self._count = count
        self._documents = [range(end - length, end) for end, length in zip(accumulate(lengths), lengths, strict=True)]
        self._of = [place for place, numbers in enumerate(self._documents) for _ in numbers]
        self.stored: dict[str, dict[str, Chunk]] = {reads: {} for reads in ("", BEHIND_OTHER, BEHIND_SHUFFLED)}

    def read(self, reads: str, numbers: Sequence[int]) -> list[Chunk]:
        """Return the chunks of a prompt.

        Parameters
        ----------
        reads : str
            What the method reads (`EvalMethod.reads`).
        numbers : sequence of int
            The numbers of the retrieved chunks, in the order of the prompt.
        """
        if reads == BEHIND_OTHER:
            return [self._behind(reads, number, self._other(number)) for number in numbers]
        if reads == BEHIND_SHUFFLED:
            return [self._behind(reads, number, self._shuffled(number)) for number in numbers]
        return [self._own(number) for number in (self._whole(numbers) if reads == DOCUMENTS else numbers)]

    def _own(self, number: int) -> Chunk:
        name, stored = f"chunk {number}", self.stored[""]
        if name not in stored:
            if self._of:
                document = self._of[number]
                members = self._documents[document]
                self._store(stored, f"document {document}", ((f"chunk {member}", member) for member in members))
            else:
                stored[name] = Chunk(self._texts[number], name)
        return stored[name]

    def _behind(self, reads: str, number: int, before: Sequence[int]) -> Chunk:
        """Return a chunk that ends a document of its own, in which certain others stand before it."""
        name, stored = f"{reads} {number}", self.stored[reads]
        if name not in stored:
            self._store(stored, name, [*((f"{name}, {other}", other) for other in before), (name, number)])
        return stored[name]

    def _store(self, stored: dict[str, Chunk], document: str, members: Iterable[tuple[str, int]]) -> None:
        start = 0
        for name, number in members:
            text = self._texts[number]
            stored[name] = Chunk(text, name, document=document, start=start)
            start += len(text) + len(self._separator)

    def _other(self, number: int) -> Sequence[int]:
        document = self._of[number]
        other = (document + 1) % len(self._documents)
        return () if other == document else self._documents[other]

    def _shuffled(self, number: int) -> Sequence[int]:
        """Return the chunks before one in its document in random order; in another than their own where there is one."""
        before = [*range(self._documents[self._of[number]].start, number)]
        rng, mixed = random.Random(number), before
        while len(before) > 1 and mixed == before:
            mixed = rng.sample(before, len(before))
        return mixed

    def _whole(self, numbers: Sequence[int]) -> list[int]:
        """Return the chunks of the documents that chunks come from, in the order in which these are found, until the length is
        full.
        """
        chosen: list[int] = []
        tokens = 0
        for document in dict.fromkeys(self._of[number] for number in numbers):
            members = self._documents[document]
            tokens += sum(self._count(self._texts[member] + self._separator) for member in members)
            if chosen and self._limit is not None and tokens > self._limit:
                break
            chosen += members
        return chosen
