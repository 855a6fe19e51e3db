"""Encoding of chunks by llama.cpp: a document is read once, behind the preamble, and each chunk's cells are copied out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from cacheblend_gguf.llama import Llama
from cacheblend_rag.chunk import context_digest
from cacheblend_rag.encode import ChunkEncoder, Reading, Target, kept_of, shared_length
from cacheblend_rag.errors import PromptError
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.model import ModelCard

__all__ = ["LlamaEncoder"]

# How long to leave the model to answers that have the cells which are wanted.
_PAUSE_S = 0.005


class LlamaEncoder(ChunkEncoder):
    """Computes the KV of chunks in one sequence of llama.cpp, when answers leave cells for it.

    A chunk's keys stay as they are where it was read; llama.cpp turns them when it puts them elsewhere.
    """

    def __init__(self, card: ModelCard, preamble: Sequence[int], batch_tokens: int, llama: Llama) -> None:
        super().__init__(card, preamble, batch_tokens)
        self._llama = llama

    def encode(self, targets: Sequence[Target]) -> Iterator[list[tuple[int, ChunkKV]]]:
        if any(target.positions is not None for target in targets):
            raise PromptError(
                "the chunks have positions, as in a schema, but llama.cpp places tokens one after another; "
                "leave their positions out"
            )
        for batch in self.batches(targets):
            for reading in batch:
                length = len(self.preamble) + max(len(sequence) for sequence, _ in reading)
                while not self._llama.make_room(length):
                    yield []
                    time.sleep(_PAUSE_S)
                try:
                    found = self._read(reading, targets)
                finally:
                    # Before anyone else has the model: what is given up after its last batch ends whenever it is collected.
                    self._llama.forget_reading()
                yield found

    def head(self, token_ids: Sequence[int]) -> ChunkKV:
        self._llama.read((*token_ids,), 0)
        try:
            return ChunkKV(tuple(token_ids), 0, self._llama.take(0, len(token_ids)))
        finally:
            self._llama.forget_reading()

    def _read(self, reading: Reading, targets: Sequence[Target]) -> list[tuple[int, ChunkKV]]:
        start = len(self.preamble)
        found = []
        read = self._llama.begin_reading(self.preamble, reading[0][0])
        for sequence, indices in reading:
            known = shared_length(read, sequence)
            self._llama.read(sequence[known:], start + known)
            read = sequence
            for index in indices:
                target = targets[index]
                first = start + len(target.context)
                layers = self._llama.take(first, len(target.token_ids))
                found.append((index, ChunkKV(target.token_ids, first, layers, context_digest(target.context))))
        self._llama.keep_reading(kept_of(reading, targets))
        return found
