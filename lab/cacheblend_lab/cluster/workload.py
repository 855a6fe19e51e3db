"""Requests that a cluster gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cacheblend_lab.cluster.popularity import Popularity
from cacheblend_rag.errors import ConfigError

__all__ = ["Asked", "Workload"]

# Draws of documents after which those that are still the same are taken next to each other.
_REDRAWS = 20


@dataclass(frozen=True)
class Asked:
    """Requests, one a row: the documents of each, and the chunks, by number, with the document of each."""

    documents: NDArray[np.int64]
    chunks: NDArray[np.int64]
    chunk_documents: NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """A corpus, and prompts over it.

    A prompt has chunks of a few documents, as a retriever finds them: documents by Zipf's law, in each of them neighbouring
    chunks.

    Attributes
    ----------
    corpus_chunks, chunks_per_document : int
        The corpus.
    chunk_tokens : int
        Tokens of a chunk.
    zipf : float
        How unequally documents are asked for.
    chunks, documents : int
        Chunks of a prompt, and how many documents they are of.
    question_tokens, output_tokens : int
        Tokens of a prompt beside its chunks, and of an answer.
    """

    corpus_chunks: int = 10_000_000
    chunks_per_document: int = 20
    chunk_tokens: int = 256
    zipf: float = 0.85
    chunks: int = 8
    documents: int = 2
    question_tokens: int = 64
    output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in ("corpus_chunks", "chunks_per_document", "chunk_tokens", "chunks", "documents", "output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.chunks % self.documents or self.chunks // self.documents > self.chunks_per_document:
            raise ConfigError(
                f"{self.chunks} chunks a prompt do not come in equal parts from {self.documents} documents of "
                f"{self.chunks_per_document} chunks"
            )
        if self.corpus_documents < self.documents:
            raise ConfigError(f"a prompt of {self.documents} documents cannot be drawn from {self.corpus_documents}")

    @property
    def corpus_documents(self) -> int:
        """Documents of the corpus."""
        return max(self.corpus_chunks // self.chunks_per_document, 1)

    @property
    def run_chunks(self) -> int:
        """Neighbouring chunks that a prompt takes of one document."""
        return self.chunks // self.documents

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.chunks * self.chunk_tokens + self.question_tokens

    @cached_property
    def popularity(self) -> Popularity:
        """Popularity of the documents."""
        return Popularity(self.corpus_documents, self.zipf)

    @cached_property
    def kv_rates(self) -> NDArray[np.float64]:
        """How often a request has each KV of one document of each group of `popularity`.

        For each group, the KV of the document's chunks behind others, then their KV as a prompt's first chunk.
        """
        starts = self.chunks_per_document - self.run_chunks + 1
        begins = np.zeros(self.chunks_per_document)
        begins[:starts] = 1 / starts
        has = np.convolve(begins, np.ones(self.run_chunks))[: self.chunks_per_document]
        shares = self.popularity.shares[:, None]
        first = shares * begins
        return np.hstack([(1 - (1 - shares) ** self.documents) * has - first, first])

    def draw(self, rng: np.random.Generator, count: int) -> Asked:
        """Return `count` requests."""
        documents = self.popularity.draw(rng, count * self.documents).reshape(count, self.documents)
        for _ in range(_REDRAWS):
            again = _repeated(documents)
            if not again.any():
                break
            documents[again] = self.popularity.draw(rng, int(again.sum()))
        while (again := _repeated(documents)).any():
            documents[again] = (documents[again] + 1) % self.corpus_documents
        starts = rng.integers(self.chunks_per_document - self.run_chunks + 1, size=documents.shape)
        first = documents * self.chunks_per_document + starts
        chunks = (first[:, :, None] + np.arange(self.run_chunks)).reshape(count, self.chunks)
        return Asked(documents, chunks, np.repeat(documents, self.run_chunks, axis=1))


def _repeated(rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return where a number stands in its row a second time."""
    again = np.zeros(rows.shape, dtype=bool)
    for place in range(1, rows.shape[1]):
        again[:, place] = (rows[:, :place] == rows[:, place : place + 1]).any(axis=1)
    return again
