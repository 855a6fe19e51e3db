"""Running one prompt: how it is prefilled, the forward, and what to do when a file is damaged."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.attachment import Attachment, RunningForward
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import ChunkReadError, ConfigError, PromptError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.plan import Plan, is_full, make_plan
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import Decoder, num_decoder_layers, takes_positions, text_decoder
from cacheblend_rag.prefixes import PrefixCache, ReusedPrefix, reader_of, storage_bytes
from cacheblend_rag.selection import FixedSelection, make_selector
from cacheblend_rag.store import KVReader
from cacheblend_rag.trace import LayerTimes
from cacheblend_rag.tuning import Tuning

__all__ = ["ROOM_FOR_OUTPUT", "Forward", "Runner"]

# A limit that is meant as "no limit" should not take memory at once.
ROOM_FOR_OUTPUT = 512

Forward: TypeAlias = Callable[[BlendCache | None, dict[str, torch.Tensor]], torch.Tensor]
"""Runs the model on a prompt's ids, over a cache, or over the model's own (None) if it cannot be blended."""


class Runner:
    """Runs prompts on one model and one store, one at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder | None,
        unsupported: str | None,
        supply: KVSupply,
        tuning: Tuning,
        prefixes: PrefixCache,
    ) -> None:
        self._model, self._decoder, self._unsupported = model, decoder, unsupported
        self._supply, self._prefixes = supply, prefixes
        self._tuning = tuning
        self._num_layers = num_decoder_layers(model)
        self._threads = tuning.threads
        self.scheduler = supply.scheduler
        self.attachments: list[Attachment] = []

    def run(self, request: Request, headroom: int, forward: Forward) -> torch.Tensor:
        """Return what `forward` does with the prompt's ids and a cache that makes its first pass the blended prefill."""
        ids = torch.tensor([request.prompt.layout.token_ids], device=self._model.device)
        with self.scheduler.within(request.patience), torch.no_grad():
            if self._supply.is_closed:
                raise ConfigError("this engine was closed before the prompt's turn came; make a new one")
            # Its misses may have been encoded by now, with those of other prompts.
            request.queue_s += request.note("queue", request.ready) - request.encode_s
            while True:
                try:
                    readers = self._prepare(request)
                    request.forward_started = time.perf_counter()
                    if self._decoder is None:
                        # Its cache may hold states that ours has no place for.
                        return forward(None, {"input_ids": ids, **self._unblended(request.prompt.places)})
                    return self._forward(request, self._decoder, readers, headroom, ids, forward)
                except ChunkReadError as error:
                    # What cannot be read is a miss: the next round encodes the chunk anew.
                    self._supply.note_unreadable(request, error)

    def encode_misses(self, requests: Sequence[Request]) -> None:
        """Encode in one go the chunks without stored KV of several prompts, but for those prefilled in full."""
        self._supply.encode_misses([request for request in requests if self._whole_plan(request) is None])

    def alone_reason(self, request: Request) -> str | None:
        """Return why a prompt must be answered alone, as what is attached says, or None."""
        return next(filter(None, (each.alone_reason(request) for each in (*self.attachments,))), None)

    def _unblended(self, places: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """Return what puts the tokens of a model that cannot be blended into their places; refuse where nothing does."""
        if places is None or list(places) == list(range(len(places))):
            return {}
        if not takes_positions(text_decoder(self._model)):
            raise PromptError(
                f"the prompt has positions, but {type(self._model).__name__} takes none; leave positions out"
            )
        return {"position_ids": torch.tensor([list(places)], device=self._model.device)}

    def _prepare(self, request: Request) -> dict[int, KVReader] | None:
        """Decide how a prompt is prefilled; return readers of what it takes over, by rows; None for nothing."""
        request.resumed = None
        request.figures["head_tokens"] = 0
        request.plan = self._whole_plan(request)
        self._resume(request, whole=request.plan is not None)
        if request.plan is not None:
            keys = [chunk.key for chunk in request.waiting if chunk.key not in request.hits]
            self._supply.note_held(request, keys)
            return None if request.resumed is None else dict(request.resumed.readers)
        readers = self._supply.readers(request, self._supply.open_all(request))
        request.plan = make_plan(request.blend, request.layout, self._num_layers)
        return readers if request.resumed is None else {**readers, **request.resumed.readers}

    def _whole_plan(self, request: Request) -> Plan | None:
        """Return the plan of a prompt that is prefilled in full, None of one that is blended."""
        blend, layout = request.blend, request.prompt.layout
        if not blend.enabled:
            return Plan(None, "full")
        refusal = self._refusal(layout) or (None if layout.chunks else "the prompt has no chunks")
        if refusal is not None or is_full(blend):
            return Plan(None, "full", fallback_reason=refusal)
        return None

    def _forward(
        self,
        request: Request,
        decoder: Decoder,
        readers: Mapping[int, KVReader] | None,
        headroom: int,
        ids: torch.Tensor,
        forward: Forward,
    ) -> torch.Tensor:
        """Have the model's first forward be the prompt's prefill, as planned; `ChunkReadError` if stored KV turns out damaged."""
        assert request.plan is not None
        tuning, room = self._tuning, min(headroom, ROOM_FOR_OUTPUT)
        cache = BlendCache(self._num_layers)
        steering = loader = None
        request.charge, request.recomputed, request.layers = 0.0, None, None
        with ExitStack() as stack:
            if readers is not None:
                # A prompt that is prefilled in full, but for the rows that it takes over, selects nothing.
                selection = request.plan.selection or FixedSelection(torch.empty(0, dtype=torch.int64))
                loaded, first_layer = request.layout, min(selection.check_layers, default=0)
                if loaded.resumed_rows:
                    # They are loaded as chunks are, and nothing else of them is like a chunk.
                    loaded = replace(loaded, chunks=(ChunkSpan(0, loaded.resumed_rows, 0), *loaded.chunks))
                    first_layer = 0
                request.layers = LayerTimes()
                loader = LayerLoader(
                    decoder,
                    loaded,
                    [readers[span.start] for span in loaded.chunks],
                    first_layer,
                    len(loaded) + room,
                    tuning.prefetch_layers,
                    self._threads,
                    request.layers,
                )
                stack.enter_context(loader)
                text = request.layout.text_rows
                # All that is computed stands after all that is stored.
                goes_on = (
                    isinstance(selection, FixedSelection)
                    and not selection.rows().numel()
                    and 0 < int(text[0]) == len(request.layout) - text.numel()
                    and request.prompt.places is None
                )
                if goes_on and self.alone_reason(request) is None:
                    # Nothing has to be steered: the model goes on after its cache, as it does when it decodes.
                    request.recomputed = None if request.plan.selection is None else torch.empty(0, dtype=torch.int64)
                    cache.expect(int(text[0]), decoder.num_kv_layers, loader.synchronize)
                else:
                    steering = Steering(decoder, cache, request.layout, selection, loader.synchronize)
                    stack.enter_context(steering())
            running = RunningForward(request, decoder, cache, steering, headroom, room)
            for each in (*self.attachments,):
                stack.enter_context(each.around(running))
            output = forward(cache, {"input_ids": ids, **decoder.placing(request.prompt.places)})
        if loader is not None:
            request.wait_s, request.figures["load_bytes"] = loader.wait_s, loader.load_bytes
        if steering is not None and request.plan.selection is not None:
            request.charge += steering.charge
            request.recomputed = steering.recomputed_rows.cpu()
        self._note_bytes(request, cache)
        self._remember(request, cache)
        return output

    def _note_bytes(self, request: Request, cache: BlendCache) -> None:
        """Note what the cache holds of the prompt, which an attachment may have cut."""
        length = len(request.prompt.layout)
        # What was generated is in the cache too.
        sizes = [(layer.nbytes // max(layer.held_tokens, 1), layer.evicted_tokens) for layer in cache.kv_layers]
        request.figures["evicted_tokens"] = max(evicted for _, evicted in sizes)
        request.figures["kv_bytes"] = sum(token_bytes * (length - evicted) for token_bytes, evicted in sizes)
        request.figures["kv_bytes_before"] = sum(token_bytes * length for token_bytes, _ in sizes)

    def _resume(self, request: Request, *, whole: bool) -> None:
        """Take over the fixed head or what an earlier prompt shares, of a prompt that is prefilled in full if `whole`."""
        blend, layout, head = request.blend, request.prompt.layout, request.prompt.head
        if not blend.enabled or self._refusal(layout) is not None:
            return
        rows = 0 if head is None else head.rows
        found = (
            self._prefixes.find(request.prompt, None if whole else _effective(blend), rows) if request.shares else None
        )
        if found is None and head is None:
            return
        held, rows = found or (None, rows)
        chunks = () if whole else tuple(span for span in layout.chunks if span.start >= rows)
        resumed = replace(layout, chunks=chunks, resumed_rows=rows)
        if held is not None:
            reader = reader_of(tuple(layout.token_ids[:rows]), held.kv)
            request.resumed = ReusedPrefix(resumed, 0, {0: reader})
        elif head is not None:
            request.resumed = ReusedPrefix(resumed, rows, {0: self._supply.head(request, head)})

    def _remember(self, request: Request, cache: BlendCache) -> None:
        """Keep what was computed for the prompts to come, if it is whole."""
        plan = request.plan
        if not request.shares or not request.blend.enabled or plan is None:
            return
        # Nothing was computed for a stream that was closed before its turn came.
        layers = cache.kv_layers[: self._supply.num_kv_layers]
        is_whole = all(layer.held_tokens and not layer.evicted_tokens for layer in layers)
        if is_whole and self._refusal(request.prompt.layout, len(request.output_ids)) is None:
            ratio = None if plan.selection is None else _effective(request.blend)
            kv, rows = cache.kv(), layers[0].held_tokens
            self._prefixes.keep(request.prompt, request.output_ids, ratio, rows, kv, storage_bytes(kv))

    def _refusal(self, layout: PromptLayout, output_tokens: int = 0) -> str | None:
        """Return why this model cannot be blended, or not on this prompt and an answer of that many tokens."""
        reach = None if self._decoder is None else self._decoder.rope_reach
        if reach is not None and (end := layout.end_position + output_tokens) >= reach:
            return (
                f"the prompt ends at position {end}, and from {reach} on this model's rotary frequencies "
                "depend on the length of the prompt"
            )
        return self._unsupported


def _effective(blend: BlendConfig) -> float:
    """Return the ratio of what is recomputed, whatever was asked for."""
    return 0.0 if make_selector(blend.selector).name == "none" else blend.recompute_ratio
