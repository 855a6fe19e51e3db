"""Reading one prompt: how it is prefilled, and what to do when a file is damaged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.attachment import Attachment, RunningForward
from cacheblend_rag.engine.decode import Prefilled, last_logits
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.supply import KVSupply
from cacheblend_rag.errors import CacheBlendError, ChunkReadError, ConfigError, PromptError
from cacheblend_rag.fuse import BlendCache, Steering
from cacheblend_rag.fuse.plan import Plan, is_full, make_plan
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import Decoder, num_decoder_layers, takes_positions, text_decoder
from cacheblend_rag.prefixes import PrefixCache, ReusedPrefix, RowsReader, storage_bytes
from cacheblend_rag.selection import FixedSelection, make_selector
from cacheblend_rag.store import KVReader
from cacheblend_rag.trace import LayerTimes
from cacheblend_rag.tuning import Tuning

__all__ = ["ROOM_FOR_OUTPUT", "Runner"]

# A limit that is meant as "no limit" should not take memory at once.
ROOM_FOR_OUTPUT = 512


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

    @contextmanager
    def prefill(self, request: Request, headroom: int, logits_to_keep: int = 1) -> Iterator[Prefilled]:
        """Have the model read a prompt as planned, and have it for the ``with`` block, in which up to `headroom` tokens follow.

        Of a model that cannot be blended, the first forward in the block reads the prompt.
        """
        state = request.state
        with self.scheduler.within(request.patience), torch.no_grad():
            if self._supply.is_closed:
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
                    self._supply.note_unreadable(request, error)
            state.encoded.clear()
            with opened:
                yield prefilled
            if isinstance(prefilled.cache, BlendCache):
                self._note_bytes(request, prefilled.cache)
                self._remember(request, prefilled.cache)

    def _prefill(self, request: Request, headroom: int, logits_to_keep: int, stack: ExitStack) -> Prefilled:
        state = request.state
        ids = torch.tensor([request.prompt.layout.token_ids], device=self._model.device)
        readers = self._prepare(request)
        state.forward_started, state.forward_ended = time.perf_counter(), None
        if self._decoder is None:
            return self._unblended(request, {"input_ids": ids})
        cache, room = BlendCache(self._num_layers), min(headroom, ROOM_FOR_OUTPUT)
        state.charge, state.recomputed, state.layers = 0.0, None, None
        loader = None if readers is None else self._loader(request, self._decoder, readers, room)
        steering = None if loader is None else self._steering(request, self._decoder, cache, loader)
        # At the end, since a device has not computed what is noted, and what was read is kept only then.
        stack.callback(_note_work, request, loader, steering)
        if loader is not None:
            stack.enter_context(loader)
        running = RunningForward(request, self._decoder, cache, steering, headroom, room)
        for each in (*self.attachments,):
            stack.enter_context(each.around(running))
        placed = self._decoder.placing(request.prompt.places)
        inputs = {"input_ids": ids, **placed}
        with nullcontext() if steering is None else steering():
            return Prefilled(inputs, cache, last_logits(self._model, inputs, cache, logits_to_keep))

    def encode_misses(self, requests: Sequence[Request]) -> None:
        """Encode in one go the chunks without stored KV of several prompts, but for those prefilled in full."""
        self._supply.encode_misses([request for request in requests if self._whole_plan(request) is None])

    def alone_reason(self, request: Request) -> str | None:
        """Return why a prompt must be answered alone, as what is attached says, or None."""
        return next(filter(None, (each.alone_reason(request) for each in (*self.attachments,))), None)

    def _unblended(self, request: Request, inputs: dict[str, torch.Tensor]) -> Prefilled:
        """Return how a model that cannot be blended reads a prompt: in full, with its own cache, which may hold states."""
        places = request.prompt.places
        if places is not None and list(places) != list(range(len(places))):
            if not takes_positions(text_decoder(self._model)):
                raise PromptError(
                    f"the prompt has positions, but {type(self._model).__name__} takes none; leave positions out"
                )
            inputs["position_ids"] = torch.tensor([list(places)], device=self._model.device)
        return Prefilled(inputs, None, None)

    def _prepare(self, request: Request) -> dict[int, KVReader] | None:
        """Decide how a prompt is prefilled; return readers of what it takes over, by rows; None for nothing."""
        state = request.state
        state.resumed = None
        state.figures["head_tokens"] = 0
        state.plan = self._whole_plan(request)
        self._resume(request, whole=state.plan is not None)
        if state.plan is not None:
            keys = [chunk.key for chunk in request.waiting if chunk.key not in state.hits]
            self._supply.note_held(request, keys)
            return None if state.resumed is None else dict(state.resumed.readers)
        readers = self._supply.readers(request, self._supply.open_all(request))
        state.plan = make_plan(request.blend, request.layout, self._num_layers)
        return readers if state.resumed is None else {**readers, **state.resumed.readers}

    def _whole_plan(self, request: Request) -> Plan | None:
        """Return the plan of a prompt that is prefilled in full, None of one that is blended."""
        blend, layout = request.blend, request.prompt.layout
        if not blend.enabled:
            return Plan(None, "full")
        refusal = self._refusal(layout) or (None if layout.chunks else "the prompt has no chunks")
        if refusal is not None or is_full(blend):
            return Plan(None, "full", fallback_reason=refusal)
        return None

    def _loader(self, request: Request, decoder: Decoder, readers: Mapping[int, KVReader], room: int) -> LayerLoader:
        """Return what loads the stored rows of a prompt; it raises `ChunkReadError` where they turn out damaged."""
        state = request.state
        assert state.plan is not None
        selection, loaded = state.plan.selection, request.layout
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
            self._tuning.prefetch_layers,
            self._threads,
            state.layers,
        )

    def _steering(self, request: Request, decoder: Decoder, cache: BlendCache, loader: LayerLoader) -> Steering | None:
        """Return what has the prefill compute the selected rows; None where the model just goes on after what is stored."""
        state = request.state
        assert state.plan is not None
        layout, text = request.layout, request.layout.text_rows
        # A prompt that is prefilled in full, but for the rows that it takes over, selects nothing.
        selection = state.plan.selection or FixedSelection(torch.empty(0, dtype=torch.int64))
        goes_on = (
            isinstance(selection, FixedSelection)
            and not selection.rows().numel()
            # All that is computed stands after all that is stored.
            and 0 < int(text[0]) == len(layout) - text.numel()
            and request.prompt.places is None
        )
        if not goes_on or self.alone_reason(request) is not None:
            return Steering(decoder, cache, layout, selection, loader.synchronize)
        state.recomputed = None if state.plan.selection is None else torch.empty(0, dtype=torch.int64)
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
            reader = RowsReader(tuple(layout.token_ids[:rows]), held.kv)
            request.state.resumed = ReusedPrefix(resumed, 0, {0: reader})
        elif head is not None:
            request.state.resumed = ReusedPrefix(resumed, rows, {0: self._supply.head(request, head)})

    def _remember(self, request: Request, cache: BlendCache) -> None:
        """Keep what was computed for the prompts to come, if it is whole."""
        plan = request.state.plan
        if not request.shares or not request.blend.enabled or plan is None:
            return
        layers = cache.kv_layers[: self._supply.num_kv_layers]
        is_whole = not any(layer.evicted_tokens for layer in layers)
        if is_whole and self._refusal(request.prompt.layout, len(request.state.output_ids)) is None:
            ratio = None if plan.selection is None else _effective(request.blend)
            kv, rows = cache.kv(), layers[0].held_tokens
            self._prefixes.keep(request.prompt, request.state.output_ids, ratio, rows, kv, storage_bytes(kv))

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


def _note_work(request: Request, loader: LayerLoader | None, steering: Steering | None) -> None:
    """Note what a prefill loaded and recomputed."""
    state = request.state
    if loader is not None:
        state.wait_s, state.figures["load_bytes"] = loader.wait_s, loader.load_bytes
    if steering is not None and state.plan is not None and state.plan.selection is not None:
        state.charge += steering.charge
        state.recomputed = steering.recomputed_rows.cpu()
