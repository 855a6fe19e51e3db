"""The cache that a prompt's forward runs on, and what is done to the forward while it does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from cacheblend_rag.engine.request import PromptRun
from cacheblend_rag.engine.sources import SourceAttention
from cacheblend_rag.fuse import BlendCache, Repair, Steering
from cacheblend_rag.layout import ChunkSpan
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import Decoder, num_decoder_layers
from cacheblend_rag.selection import FixedSelection, make_selector
from cacheblend_rag.selection.question import look_layers
from cacheblend_rag.snapkv import Eviction
from cacheblend_rag.store import KVReader
from cacheblend_rag.tuning import Tuning

__all__ = ["ROOM_FOR_OUTPUT", "PromptCaches"]

# A limit that is meant as "no limit" should not take memory at once.
ROOM_FOR_OUTPUT = 512

_NO_ROWS = torch.empty(0, dtype=torch.int64)
"""A selection of nothing."""


class PromptCaches:
    """Makes caches for prompts on a model that can be blended.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    decoder : Decoder
        The model as blending sees it.
    tuning : Tuning
        How layers are loaded, and what eviction looks at.
    """

    def __init__(self, model: PreTrainedModel, decoder: Decoder, tuning: Tuning) -> None:
        self._tuning = tuning
        self._model = model
        self._decoder = decoder
        self._num_layers = num_decoder_layers(model)

    @contextmanager
    def open(
        self, run: PromptRun, readers: Sequence[KVReader] | None, headroom: int
    ) -> Iterator[tuple[BlendCache, dict[str, torch.Tensor]]]:
        """Have the model's first forward over a prompt be its prefill, as it is planned, and what follows be decoding.

        Parameters
        ----------
        run : PromptRun
            The prompt; its figures are filled in, most of them at the end.
        readers : sequence of KVReader or None
            The stored KV of its chunks; None where it is computed as a whole.
        headroom : int
            Tokens that will be generated at most, for which the cache keeps room.

        Yields
        ------
        (BlendCache, dict)
            The cache to call the model with, and what else to call it with, to put the tokens into their places.

        Raises
        ------
        ChunkReadError
            Out of the forward, if stored KV turns out damaged.
        """
        with (
            self._whole(run) if readers is None else self._steered(run, readers, headroom) as cache,
            self._evicting(run, cache, headroom),
            self._watching(run, cache),
            self._decoder.placing(cache, run.prompt.places) as more,
        ):
            yield cache, more

    @contextmanager
    def _whole(self, run: PromptRun) -> Iterator[BlendCache]:
        run.timings.forward_started = time.perf_counter()
        yield BlendCache(self._num_layers)

    @contextmanager
    def _steered(self, run: PromptRun, readers: Sequence[KVReader], headroom: int) -> Iterator[BlendCache]:
        assert run.plan is not None
        tuning, layout = self._tuning, run.layout
        # A prompt that is computed as a whole, but for the rows that its conversation has.
        selection = run.plan.selection or FixedSelection(_NO_ROWS)
        cache = BlendCache(self._num_layers)
        first_layer = 0 if layout.resumed_rows else min(selection.check_layers, default=0)
        loaded = layout
        if layout.resumed_rows:
            # They are loaded as chunks are, and nothing else of them is like a chunk.
            assert run.resumed is not None
            loaded = replace(layout, chunks=(ChunkSpan(0, layout.resumed_rows, 0), *layout.chunks))
            readers = [run.head or run.resumed.readers[0], *readers]
        run.timings.forward_started = time.perf_counter()
        with LayerLoader(
            self._decoder,
            loaded,
            readers,
            first_layer,
            len(layout) + _room(headroom),
            tuning.prefetch_layers,
            tuning.threads if tuning.pipeline else 0,
            tuning.reposition,
        ) as loader:
            steering = Steering(self._decoder, cache, layout, selection, loader.synchronize)
            selector = make_selector(run.request.blend.selector)
            repair = Repair(self._decoder, cache, layout, steering, selector) if selector.repair else None
            with steering(), nullcontext() if repair is None else repair():
                yield cache
        run.timings.wait_s, run.timings.load_bytes = loader.wait_s, loader.load_bytes
        if run.plan.selection is not None:
            run.outcome.charge, run.outcome.recomputed = steering.charge, steering.recomputed_rows.cpu()
        if repair is not None:
            run.outcome.charge += repair.charge
            run.outcome.repaired_tokens = repair.repaired_rows

    def _watching(self, run: PromptRun, cache: BlendCache) -> AbstractContextManager[None]:
        """Note what the answer attends to, where that is asked for."""
        if not run.request.blend.source_attention or run.request.blend.kv_capacity is not None:
            return nullcontext()
        sources = SourceAttention(self._model, look_layers(None, self._num_layers), len(run.prompt.layout))
        run.outcome.attention = sources.of
        return sources(cache)

    @contextmanager
    def _evicting(self, run: PromptRun, cache: BlendCache, headroom: int) -> Iterator[None]:
        """Evict context KV during the prefill, where that is asked for, and note what the cache holds after it."""
        length = len(run.prompt.layout)
        if run.request.blend.kv_capacity is None:
            yield
        else:
            selection = None if run.plan is None else run.plan.selection
            twice = selection is not None and bool(selection.look_layers)
            eviction = Eviction(
                self._model,
                run.request.blend.kv_capacity,
                self._tuning,
                cache,
                length,
                run.prompt.context,
                headroom,
                _room(headroom),
                at_end=twice,
            )
            with eviction():
                yield
            run.outcome.kept_reason = eviction.kept_reason
        run.outcome.evicted_tokens = max(layer.evicted_tokens for layer in cache.kv_layers)
        run.outcome.kv_bytes = run.outcome.kv_bytes_before = 0
        for layer in cache.kv_layers:
            # What was generated is in the cache too.
            token_bytes = layer.nbytes // max(layer.held_tokens, 1)
            run.outcome.kv_bytes += token_bytes * (length - layer.evicted_tokens)
            run.outcome.kv_bytes_before += token_bytes * length


def _room(headroom: int) -> int:
    """Return for how many output tokens buffers have room at once; they grow when an answer is longer."""
    return min(headroom, ROOM_FOR_OUTPUT)
