"""Encoding of chunks by llama.cpp: a document is read once, behind the preamble, and each chunk's cells are copied out.

Between turns others may have the cells; what is read goes on where it parts from what these still hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from cacheblend_gguf.decoding import ROWS
from cacheblend_gguf.llama import Llama
from cacheblend_rag.chunk import context_digest
from cacheblend_rag.encode import ChunkEncoder, Target, kept_of
from cacheblend_rag.errors import CacheBlendError, PromptError
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
                for sequence, indices in reading:
                    # Whoever asks waits for no more than that.
                    ids, most = self.preamble + sequence, ROWS
                    while (there := self._llama.read(ids, most)) < len(ids):
                        yield []
                        if not there:
                            time.sleep(_PAUSE_S)
                        elif self._llama.known(ids) < there:
                            # So that two who read in turns come to an end.
                            most = len(ids)
                    found = [(index, self._take(targets[index])) for index in indices]
                    if sequence is reading[-1][0]:
                        self._llama.keep_reading(len(self.preamble) + len(kept_of(reading, targets)))
                    yield found

    def head(self, token_ids: Sequence[int]) -> ChunkKV:
        if not self._llama.read(tuple(token_ids), len(token_ids)):
            raise CacheBlendError(
                f"answers under way have the cells that the {len(token_ids)} tokens of a prompt's head need; try again"
            )
        return ChunkKV(tuple(token_ids), 0, self._llama.take(0, len(token_ids)))

    def _take(self, target: Target) -> ChunkKV:
        first = len(self.preamble) + len(target.context)
        layers = self._llama.take(first, len(target.token_ids))
        return ChunkKV(target.token_ids, first, layers, context_digest(target.context))
