"""Backend of models of transformers: one prompt is read at a time, blended where it can be."""

from __future__ import annotations

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.encode import Encoder
from cacheblend_rag.engine.attachment import Attachment, RunningForward
from cacheblend_rag.engine.backend import Backend
from cacheblend_rag.engine.batch import Batcher
from cacheblend_rag.engine.decode import ROOM_FOR_OUTPUT, Prefilled, checked_options, end_ids, last_logits
from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.engine.seeded import seeded
from cacheblend_rag.errors import CacheBlendError, ChunkReadError, ConfigError, UnsupportedModelError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.selfcheck import check_blending
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import (
    Decoder,
    WeightsWatch,
    inspect_model,
    model_fingerprint,
    model_window,
    num_decoder_layers,
    placing,
    unwrapped,
)
from cacheblend_rag.prefixes import PrefixCache, RowsReader, cut_layers, storage_bytes
from cacheblend_rag.selection import FixedSelection, SelectionTask, is_full, make_selection, make_selector
from cacheblend_rag.store import KVReader
from cacheblend_rag.trace import LayerTimes
from cacheblend_rag.tuning import Tuning

__all__ = ["TransformersBackend", "engine_identity", "look_at_model"]

logger = logging.getLogger(__name__)
# Of each model, what all engines over it keep of earlier prompts.
_shelves: WeakKeyDictionary[PreTrainedModel, WeakSet[PrefixCache]] = WeakKeyDictionary()


class TransformersBackend(Backend):
    """A Hugging Face causal language model in this process."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, tuning: Tuning, *, strict: bool = False) -> None:
        self.model, self.tokenizer, self.tuning = model.eval(), tokenizer, tuning
        self.name = getattr(model, "name_or_path", "") or type(model).__name__
        self.window = model_window(model)
        self.scheduler = scheduler_of(model)
        self.decoder, self.reason = self.inspect(strict)
        self.form, self.num_layers = self.decoder, num_decoder_layers(model)
        self.num_kv_layers = self.num_layers if self.decoder is None else self.decoder.num_kv_layers
        embedding: Any = unwrapped(model).get_input_embeddings()
        self.num_embeddings = embedding.weight.shape[0]
        self.shelf = _shelves.setdefault(unwrapped(model), WeakSet())
        self.attachments: list[Attachment] = []
        self._weights = WeightsWatch(model)
        self._batcher = Batcher(self)

    def inspect(self, strict: bool) -> tuple[Decoder | None, str | None]:
        """Return the model as blending sees it, or None and why it cannot be blended; `strict` raises that."""
        return look_at_model(self.model, strict=strict, self_check=self.tuning.self_check)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return end_ids(self.model)

    def identity(self, *, private: bool) -> str:
        # In a store that this engine alone sees, a random one does as well, and no weights need be read.
        return uuid.uuid4().hex if private else engine_identity(self.model, self.tokenizer)

    def encoder(self, preamble: tuple[int, ...]) -> Encoder | None:
        return None if self.decoder is None else Encoder(self.decoder, preamble, self.tuning.encode_batch_tokens)

    def check_model(self) -> None:
        self._weights.check()

    def check_blend(self, blend: BlendConfig) -> None:
        decoder, selector = self.decoder, make_selector(blend.selector)
        # A model whose configuration names no layers is never blended.
        if decoder is not None or self.num_layers:
            selector.validate(self.num_layers)
        if decoder is None or not blend.enabled:
            return
        layers = selector.begin(SelectionTask(PromptLayout((0,), (0,), ()), self.num_layers, 0)).check_layers
        for layer in layers:
            if layer >= decoder.num_kv_layers:
                raise ConfigError(
                    f"check layer {layer} of {type(self.model).__name__} has no KV of its own to compare, as all its layers from "
                    f"{decoder.num_kv_layers} on; choose earlier check_layers"
                )
        if selector.needs_attention and not decoder.shows_attention:
            raise ConfigError(
                f"selector {selector.name!r} needs the question's attention, which {type(self.model).__name__} does not show; "
                "choose hkvd"
            )

    def check_options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        return seeded(checked_options(self.model, max_new_tokens, options), self.model.generation_config)

    def cut(self, kv: Any, rows: int) -> Any:
        return cut_layers(kv, rows)

    def answer(
        self, requests: Sequence[Request], batch_size: int | None = None
    ) -> Iterator[tuple[Request, GenerationResult | Exception]]:
        return self._batcher.answer(requests, batch_size)

    def last_logits(self, request: Request, count: int) -> torch.Tensor:
        with self.prefill(request, 0, count) as read:
            logits = read.logits
            if logits is None:
                logits = last_logits(self.model, read.inputs, read.cache, count)
            return logits.cpu()

    @contextmanager
    def prefill(self, request: Request, headroom: int, logits_to_keep: int = 1) -> Iterator[Prefilled]:
        """Have the model read a prompt as planned, and have it for the ``with`` block, in which up to `headroom` tokens follow.

        Of a model that cannot be blended, the first forward in the block reads the prompt.
        """
        state = request.state
        with self.scheduler, torch.no_grad():
            if self.supply.is_closed:
                raise ConfigError("this engine was closed before the prompt's turn came; make a new one")
            if request.is_given_up:
                raise CacheBlendError("the answer was cancelled before it began; try again")
            # Its misses may have been encoded by now, with those of other prompts.
            state.queue_s += state.note("queue", request.ready) - state.encode_s
            while True:
                try:
                    with ExitStack() as stack:
                        prefilled = self._prefill(request, headroom, logits_to_keep, stack)
                        opened = stack.pop_all()
                    break
                except ChunkReadError as error:
                    # What cannot be read is a miss: the next round encodes the chunk anew.
                    self.supply.note_unreadable(request, error)
            state.encoded.clear()
            with opened:
                yield prefilled
            if isinstance(prefilled.cache, BlendCache):
                self._note_bytes(request, prefilled.cache)
                self._remember(request, prefilled.cache)

    def _prefill(self, request: Request, headroom: int, logits_to_keep: int, stack: ExitStack) -> Prefilled:
        state = request.state
        ids = torch.tensor([request.prompt.layout.token_ids], device=self.model.device)
        readers = self._prepare(request)
        state.forward_started, state.forward_ended = time.perf_counter(), None
        if self.decoder is None:
            return self.read_whole(request, {"input_ids": ids})
        cache, room = BlendCache(self.num_layers), min(headroom, ROOM_FOR_OUTPUT)
        state.charge, state.recomputed, state.layers = 0.0, None, None
        loader = None if readers is None else self._loader(request, self.decoder, readers, room)
        steering = None if loader is None else self._steering(request, self.decoder, cache, loader)
        # At the end, since a device has not computed what is noted, and what was read is kept only then.
        stack.callback(_note_work, request, loader, steering)
        if loader is not None:
            stack.enter_context(loader)
        running = RunningForward(request, self.decoder, cache, steering, headroom, room)
        for each in (*self.attachments,):
            stack.enter_context(each.around(running))
        inputs = {"input_ids": ids, **placing(self.model, request.prompt.places)}
        with nullcontext() if steering is None else steering():
            return Prefilled(inputs, cache, last_logits(self.model, inputs, cache, logits_to_keep))

    def encode_misses(self, requests: Sequence[Request]) -> None:
        """Encode in one go the chunks without stored KV of several prompts, but for those prefilled in full."""
        self.supply.encode_misses([request for request in requests if not self._is_whole(request)[0]])

    def alone_reason(self, request: Request) -> str | None:
        """Return why a prompt must be answered alone, as what is attached says, or None."""
        return next(filter(None, (each.alone_reason(request) for each in (*self.attachments,))), None)

    def read_whole(self, request: Request, inputs: dict[str, torch.Tensor]) -> Prefilled:
        """Return how a model that cannot be blended reads a prompt: in full, with its own cache, which may hold states."""
        places = request.prompt.places
        if places is None or list(places) == list(range(len(places))):
            return Prefilled(inputs, None, None)
        return Prefilled(inputs | placing(self.model, places), None, None)

    def _prepare(self, request: Request) -> dict[int, KVReader] | None:
        """Decide how a prompt is prefilled; return readers of what it takes over, by rows; None for nothing."""
        state = request.state
        state.figures["head_tokens"], state.selection = 0, None
        whole, state.fallback_reason = self._is_whole(request)
        readers = self._resume(request, whole=whole)
        if whole:
            keys = [chunk.key for chunk in request.waiting if chunk.key not in state.hits]
            self.supply.note_held(request, keys)
            return readers or None
        found = self.supply.readers(request, self.supply.open_all(request))
        state.selection = make_selection(request.blend, request.layout, self.num_layers)
        return {**found, **readers}

    def _is_whole(self, request: Request) -> tuple[bool, str | None]:
        """Return whether a prompt is prefilled in full, and why, if blending was asked for."""
        if not request.blend.enabled:
            return True, None
        refusal = self._refusal(request.prompt.layout) or request.chunkless
        return refusal is not None or is_full(request.blend), refusal

    def _loader(self, request: Request, decoder: Decoder, readers: Mapping[int, KVReader], room: int) -> LayerLoader:
        """Return what loads the stored rows of a prompt; it raises `ChunkReadError` where they turn out damaged."""
        state = request.state
        selection, loaded = state.selection, request.layout
        first_layer = min(() if selection is None else selection.check_layers, default=0)
        if loaded.resumed_rows:
            # They are loaded as chunks are, and nothing else of them is like a chunk.
            loaded = replace(loaded, chunks=(ChunkSpan(0, loaded.resumed_rows, 0), *loaded.chunks))
            first_layer = 0
        state.layers = LayerTimes()
        return LayerLoader(
            decoder,
            loaded,
            [readers[span.start] for span in loaded.chunks],
            first_layer,
            len(loaded) + room,
            self.tuning.prefetch_layers,
            self.tuning.threads,
            state.layers,
        )

    def _steering(self, request: Request, decoder: Decoder, cache: BlendCache, loader: LayerLoader) -> Steering | None:
        """Return what has the prefill compute the selected rows; None where the model just goes on after what is stored."""
        state = request.state
        layout, text = request.layout, request.layout.text_rows
        # A prompt that is prefilled in full, but for the rows that it takes over, selects nothing.
        selection = state.selection or FixedSelection(torch.empty(0, dtype=torch.int64))
        goes_on = (
            isinstance(selection, FixedSelection)
            and not selection.rows().numel()
            # All that is computed stands after all that is stored.
            and 0 < int(text[0]) == len(layout) - text.numel()
            and request.prompt.places is None
        )
        if not goes_on or self.alone_reason(request) is not None:
            return Steering(decoder, cache, layout, selection, loader.synchronize)
        state.recomputed = None if state.selection is None else torch.empty(0, dtype=torch.int64)
        cache.expect(int(text[0]), decoder.num_kv_layers, loader.synchronize)
        return None

    def _note_bytes(self, request: Request, cache: BlendCache) -> None:
        """Note what the cache holds of the prompt, which an attachment may have cut."""
        length = len(request.prompt.layout)
        # What was generated is in the cache too.
        sizes = [(layer.nbytes // max(layer.held_tokens, 1), layer.evicted_tokens) for layer in cache.kv_layers]
        request.state.figures["evicted_tokens"] = max(evicted for _, evicted in sizes)
        request.state.figures["kv_bytes"] = sum(token_bytes * (length - evicted) for token_bytes, evicted in sizes)
        request.state.figures["kv_bytes_before"] = sum(token_bytes * length for token_bytes, _ in sizes)

    def _resume(self, request: Request, *, whole: bool) -> dict[int, KVReader]:
        """Return a reader of the fixed head or of what an earlier prompt shares with one, prefilled in full if `whole`."""
        request.resume(0)
        blend, layout, head = request.blend, request.prompt.layout, request.prompt.head
        if not blend.enabled or self._refusal(layout) is not None:
            return {}
        rows = 0 if head is None else head.rows
        found = (
            self.prefixes.find(request.prompt, None if whole else _effective(blend), rows) if request.shares else None
        )
        if found is not None:
            held, rows = found
            request.resume(rows, whole=whole)
            return {0: RowsReader(tuple(layout.token_ids[:rows]), held.kv)}
        if head is None:
            return {}
        request.resume(rows, whole=whole, is_head=True)
        return {0: self.supply.head(request, head)}

    def _remember(self, request: Request, cache: BlendCache) -> None:
        """Keep what was computed for the prompts to come, if it is whole."""
        if not request.shares or not request.blend.enabled:
            return
        layers = cache.kv_layers[: self.num_kv_layers]
        is_whole = not any(layer.evicted_tokens for layer in layers)
        if is_whole and self._refusal(request.prompt.layout, len(request.state.output_ids)) is None:
            ratio = None if request.state.selection is None else _effective(request.blend)
            kv, rows = cache.kv(), layers[0].held_tokens
            self.prefixes.keep(request.prompt, request.state.output_ids, ratio, rows, kv, storage_bytes(kv))

    def _refusal(self, layout: PromptLayout, output_tokens: int = 0) -> str | None:
        """Return why this model cannot be blended, or not on this prompt and an answer of that many tokens."""
        reach = None if self.decoder is None else self.decoder.rope_reach
        if reach is not None and (end := layout.end_position + output_tokens) >= reach:
            return (
                f"the prompt ends at position {end}, and from {reach} on this model's rotary frequencies "
                "depend on the length of the prompt"
            )
        return self.reason


def _effective(blend: BlendConfig) -> float:
    """Return the ratio of what is recomputed, whatever was asked for."""
    return 0.0 if make_selector(blend.selector).name == "none" else blend.recompute_ratio


def _note_work(request: Request, loader: LayerLoader | None, steering: Steering | None) -> None:
    """Note what a prefill loaded and recomputed."""
    state = request.state
    if loader is not None:
        state.wait_s, state.figures["load_bytes"] = loader.wait_s, loader.load_bytes
    if steering is not None and state.selection is not None:
        state.charge += steering.charge
        state.recomputed = steering.recomputed_rows.cpu()


def look_at_model(model: PreTrainedModel, *, strict: bool, self_check: bool) -> tuple[Decoder | None, str | None]:
    """Return the model as blending sees it, or None and why it cannot be blended; `strict` raises that."""
    try:
        # Another engine may be at work on it.
        with scheduler_of(model):
            decoder = inspect_model(model)
            if self_check:
                check_blending(decoder)
    except UnsupportedModelError as error:
        if strict:
            raise
        logger.warning("%s; its prompts are prefilled in full", error)
        return None, str(error)
    return decoder, None


def engine_identity(model: PreTrainedModel, tokenizer: Any) -> str:
    """Return a digest of a model's weights and a tokenizer's vocabulary and rules: 32 hexadecimal digits."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.blake2b(f"{model_fingerprint(model)}|{rules}".encode(), digest_size=16).hexdigest()
