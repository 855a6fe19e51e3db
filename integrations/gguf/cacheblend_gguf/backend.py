"""Backend of llama.cpp: what is stored of each is opened, what is missing is encoded, the rest is decoded."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from cacheblend_gguf.decoding import Answering, processors
from cacheblend_gguf.encoding import LlamaEncoder
from cacheblend_gguf.llama import HEAD_CELLS, Llama
from cacheblend_rag.config import BlendConfig, Tuning
from cacheblend_rag.engine import GenerationResult
from cacheblend_rag.engine.backend import Backend
from cacheblend_rag.engine.decode import Outputs, token_ids
from cacheblend_rag.engine.lookup import Pace
from cacheblend_rag.engine.request import Request
from cacheblend_rag.errors import ChunkReadError, ConfigError
from cacheblend_rag.model import ModelCard
from cacheblend_rag.selection import make_selection, make_selector
from cacheblend_rag.store import KVReader, part_of

__all__ = ["LlamaBackend"]

_DEFAULT_NEW_TOKENS = 256
_AT_ONCE = 16


class LlamaBackend(Backend):
    """A model that llama.cpp runs, and answers all callers of together."""

    def __init__(self, llama: Llama, tuning: Tuning) -> None:
        self.llama, self.tokenizer, self.window, self.window_hint = (
            llama,
            llama.tokenizer,
            llama.window,
            llama.window_hint,
        )
        self.name, self.scheduler, self.shelf = str(llama.path), llama.scheduler, llama.kept
        self.num_layers = self.num_kv_layers = len(llama.form.layers)
        self.num_embeddings = len(llama.tokenizer)
        # Its sizes, in bytes, are all that is asked of a model elsewhere.
        shapes = tuple((1, keys.nbytes, values.nbytes) for keys, values in llama.form.layers)
        self.form = self._card = ModelCard("", llama.window, torch.uint8, shapes, (None,) * len(shapes))
        self._encode_batch_tokens = tuning.encode_batch_tokens
        llama.decoding.pace = Pace(tuning.lookup_tokens)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.llama.tokenizer.end_ids

    def identity(self, *, private: bool) -> str:
        return uuid.uuid4().hex if private else self.llama.digest()

    def encoder(self, preamble: tuple[int, ...]) -> LlamaEncoder:
        return LlamaEncoder(self._card, preamble, self._encode_batch_tokens, self.llama)

    def cut(self, kv: Any, rows: int) -> Any:
        return self.llama.cut(kv, rows)

    def check_blend(self, blend: BlendConfig) -> None:
        selector = make_selector(blend.selector).name
        if not blend.is_full and blend.recompute_ratio > 0 and selector != "boundary":
            raise ConfigError(
                f"the selector {selector} chooses single tokens to recompute, and llama.cpp computes runs of them; give "
                'selector="boundary", which takes the first tokens of each chunk, or use the model with transformers'
            )

    def check_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        if max_new_tokens is not None and (not isinstance(max_new_tokens, int) or max_new_tokens < 1):
            raise ConfigError(f"max_new_tokens={max_new_tokens!r} leaves nothing to generate; give 1 or more")
        given = {name: value for name, value in options.items() if value is not None}
        processors(given)
        return given

    def answer(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        if len(requests) == 1:
            yield requests[0], self._answer(requests[0])
            return
        if wanted := [request for request in requests if _is_blended(request)]:
            wanted[0].supply.encode_misses(wanted)
        with ThreadPoolExecutor(min(len(requests) or 1, batch_size or _AT_ONCE)) as pool:
            yield from zip(requests, pool.map(self._answer, requests), strict=True)

    def _answer(self, request: Request) -> GenerationResult | Exception:
        """Answer a prompt, together with those of other callers."""
        options, left = request.options, self.llama.window - len(request.prompt.layout)
        ends = token_ids(options["eos_token_id"]) if "eos_token_id" in options else self.end_ids
        outputs = Outputs(self.tokenizer, [request], [min(request.max_new_tokens or _DEFAULT_NEW_TOKENS, left)], ends)
        try:
            self._compute(request, outputs=outputs, processors=processors(options))
        except Exception as error:  # handed to who asked
            return error
        return outputs.result(0, self.num_layers)

    def last_logits(self, request: Request, count: int) -> torch.Tensor:
        return torch.from_numpy(np.stack(self._compute(request, logits_to_keep=count).scores))

    def _compute(self, request: Request, **wanted: Any) -> Answering:
        """Have a prompt answered, or only read; return what came of it."""
        kv_bytes = len(request.prompt.layout) * self.llama.row_bytes
        request.state.figures |= {"kv_bytes": kv_bytes, "kv_bytes_before": kv_bytes}
        while True:
            try:
                answering = Answering(request, self._readers(request), **wanted)
                self.llama.decoding.answer(answering)
                return answering
            except ChunkReadError as error:
                # What cannot be read is a miss: the next round encodes the chunk anew.
                request.supply.note_unreadable(request, error)

    def _readers(self, request: Request) -> dict[int, KVReader]:
        """Return readers of the rows of a prompt that are stored or kept, by their first; misses are encoded first."""
        state = request.state
        head = self._head(request)
        if not _is_blended(request):
            state.fallback_reason = request.chunkless if request.blend.enabled else None
            state.selection = state.recomputed = None
            request.supply.note_held(request, [chunk.key for chunk in request.prompt.chunks])
            return head
        readers = request.supply.readers(request)
        state.selection = make_selection(request.blend, request.prompt.layout, self.num_layers)
        rows = state.recomputed = state.selection.rows
        assert rows is not None
        state.charge = float(rows.numel() * self.num_layers)
        for chunk in request.waiting:
            reader = readers.pop(chunk.start)
            self._check_place(request, chunk.key, reader, chunk.first)
            # Of its first tokens the stored rows are left out.
            count = int(((rows >= chunk.start) & (rows < chunk.stop)).sum())
            if count < len(chunk):
                readers[chunk.start + count] = part_of(reader, count, len(chunk)) if count else reader
        return {**readers, **head}

    def _check_place(self, request: Request, key: str, reader: KVReader, first: int) -> None:
        """Raise `ChunkReadError` if KV was not computed behind the preamble and what its key says, as far as can be seen."""
        start, behind = reader.start - first, len(request.supply.encoder.preamble)
        if start != behind if not reader.context else not behind < start < self.llama.window:
            raise ChunkReadError(key, f"it was computed at position {reader.start}, where it cannot have been")

    def _head(self, request: Request) -> dict[int, KVReader]:
        """Return a reader of the prompt's fixed head by its first row, where it has one and blending is on."""
        request.resume(0)
        request.state.figures["head_tokens"], head = 0, request.prompt.head
        if not request.blend.enabled or head is None or head.rows > HEAD_CELLS:
            return {}
        request.resume(head.rows, whole=not _is_blended(request), is_head=True)
        return {0: request.supply.head(request, head)}


def _is_blended(request: Request) -> bool:
    return not request.blend.is_full and bool(request.prompt.chunks)
