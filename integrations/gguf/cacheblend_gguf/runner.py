"""Answering prompts by llama.cpp: what is stored of each is opened, what is missing is encoded, the rest is decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cacheblend_gguf.decoding import Answering, processors
from cacheblend_gguf.llama import HEAD_CELLS, Llama
from cacheblend_rag.engine import GenerationResult
from cacheblend_rag.engine.decode import Answers, token_ids
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.fuse.plan import Plan, is_full, make_plan
from cacheblend_rag.prefixes import PrefixCache, ReusedPrefix
from cacheblend_rag.store import KVReader
from cacheblend_rag.store.base import part_of

__all__ = ["LlamaRunner"]

_DEFAULT_NEW_TOKENS = 256
_AT_ONCE = 16


class LlamaRunner:
    """Answers the prompts of one engine, as `Many` does, and reads them, as `Runner` does."""

    attachments = ()

    def __init__(self, llama: Llama, supply: KVSupply, prefixes: PrefixCache) -> None:
        self._llama, self._tokenizer, self._supply, self._prefixes = llama, llama.tokenizer, supply, prefixes

    def answer(self, request: Request) -> GenerationResult:
        """Answer a prompt, together with those of other callers."""
        options, left = request.options, self._llama.window - len(request.prompt.layout)
        ends = token_ids(options["eos_token_id"]) if "eos_token_id" in options else self._tokenizer.end_ids
        answers = Answers(self._tokenizer, [request], [min(request.max_new_tokens or _DEFAULT_NEW_TOKENS, left)], ends)
        self._compute(request, answers=answers, processors=processors(options))
        result = answers.result(0, len(self._llama.form.layers))
        assert isinstance(result, GenerationResult)
        return result

    def answer_all(
        self, requests: Sequence[Request], batch_size: int | None, stop: threading.Event
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        """Answer prompts, so many at once; yield each with its answer or its error."""
        self._supply.encode_misses([request for request in requests if _is_blended(request)])
        with ThreadPoolExecutor(min(len(requests) or 1, batch_size or _AT_ONCE)) as pool:
            answers = [pool.submit(self.answer, request) for request in requests]
            for request, answer in zip(requests, answers, strict=True):
                error = answer.exception()
                # Prompts whose turn has not come when all are stopped are left out.
                if error is None or not stop.is_set():
                    yield request, answer.result() if error is None else error  # type: ignore[misc]

    def last_logits(self, request: Request, count: int) -> torch.Tensor:
        """Return the last ``(count, vocab)`` logits of a prompt."""
        return torch.from_numpy(np.stack(self._compute(request, logits_to_keep=count).scores))

    def _compute(self, request: Request, **wanted: Any) -> Answering:
        """Have a prompt answered, or only read; return what came of it."""
        kv_bytes = len(request.prompt.layout) * self._llama.row_bytes
        request.state.figures |= {"kv_bytes": kv_bytes, "kv_bytes_before": kv_bytes}
        while True:
            try:
                answering = Answering(request, self._readers(request), self._prefixes, **wanted)
                self._llama.decoding.answer(answering)
                return answering
            except ChunkReadError as error:
                # What cannot be read is a miss: the next round encodes the chunk anew.
                self._supply.note_unreadable(request, error)

    def _readers(self, request: Request) -> dict[int, KVReader]:
        """Return readers of the rows of a prompt that are stored or kept, by their first; misses are encoded first."""
        state = request.state
        head = self._head(request)
        if not _is_blended(request):
            refusal = "the prompt has no chunks" if request.blend.enabled and not request.prompt.chunks else None
            state.plan, state.recomputed = Plan(None, "full", fallback_reason=refusal), None
            self._supply.note_held(request, [chunk.key for chunk in request.prompt.chunks])
            return head
        found = self._supply.open_all(request)
        num_layers = len(self._llama.form.layers)
        state.plan = make_plan(request.blend, request.prompt.layout, num_layers)
        assert state.plan.selection is not None
        rows = state.recomputed = state.plan.selection.rows()
        state.charge = float(rows.numel() * num_layers)
        readers = self._supply.readers(request, found)
        for chunk in request.waiting:
            reader = readers.pop(chunk.start)
            self._check_place(chunk.key, reader, chunk.first)
            # Of its first tokens the stored rows are left out.
            count = int(((rows >= chunk.start) & (rows < chunk.stop)).sum())
            if count < len(chunk):
                readers[chunk.start + count] = part_of(reader, count, len(chunk)) if count else reader
        return {**readers, **head}

    def _check_place(self, key: str, reader: KVReader, first: int) -> None:
        """Raise `ChunkReadError` if KV was not computed behind the preamble and what its key says, as far as can be seen."""
        start, behind = reader.start - first, len(self._supply.encoder.preamble)
        if start != behind if not reader.context else not behind < start < self._llama.window:
            raise ChunkReadError(key, f"it was computed at position {reader.start}, where it cannot have been")

    def _head(self, request: Request) -> dict[int, KVReader]:
        """Return a reader of the prompt's fixed head by its first row, where it has one and blending is on."""
        request.state.resumed, request.state.figures["head_tokens"] = None, 0
        head, layout = request.prompt.head, request.prompt.layout
        if not request.blend.enabled or head is None or head.rows > HEAD_CELLS:
            return {}
        own = layout if _is_blended(request) else replace(layout, chunks=())
        request.state.resumed = ReusedPrefix(replace(own, resumed_rows=head.rows), head.rows)
        return {0: self._supply.head(request, head)}


def _is_blended(request: Request) -> bool:
    return not is_full(request.blend) and bool(request.prompt.chunks)
