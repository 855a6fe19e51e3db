"""Running one prompt: stored KV, misses, the blended forward, and what to do when a file is damaged."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller import Controller, Plan, make_plan, whole_plan
from cacheblend_rag.encode import Encoder
from cacheblend_rag.engine.conversation import Conversation
from cacheblend_rag.engine.prompt import AssembledPrompt, PromptChunk
from cacheblend_rag.engine.sources import SourceAttention
from cacheblend_rag.engine.taken import Making, Resumption
from cacheblend_rag.engine.turn import turn_of
from cacheblend_rag.errors import ChunkReadError, PromptError, StoreError
from cacheblend_rag.fuse import BlendCache, Repair, Steering
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader, ResumedLayers
from cacheblend_rag.model import Decoder, num_decoder_layers, takes_positions, text_decoder
from cacheblend_rag.report import BlendReport, ChunkReport
from cacheblend_rag.selection import FixedSelection, make_selector
from cacheblend_rag.selection.question import look_layers
from cacheblend_rag.snapkv import Eviction
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.store.clock import steady_s
from cacheblend_rag.store.part import part_of
from cacheblend_rag.store.ram import RamReader

__all__ = ["ROOM_FOR_OUTPUT", "PromptRun", "Runner"]

logger = logging.getLogger(__name__)

# A limit that is meant as "no limit" should not take memory at once.
ROOM_FOR_OUTPUT = 512

_NO_ROWS = torch.empty(0, dtype=torch.int64)


@dataclass
class PromptRun:
    """One prompt on its way through the engine, and the figures found on that way.

    Attributes
    ----------
    prompt : AssembledPrompt
        The prompt.
    config : BlendConfig
        The settings in force.
    started : float
        When the call came, by `time.perf_counter`.
    plan : Plan or None
        How it is prefilled, once that is decided.
    hits : list of bool
        For each chunk, whether its KV was there when the call came: in the store, or at its place in the conversation.
    unreadable : set of str
        Keys of the chunks whose stored KV turned out damaged.
    tiers : list of (str or None)
        For each chunk, where its stored KV is read from; None for a miss.
    encode_s, open_s, wait_s : float
        Seconds spent on encoding misses, on opening stored KV, and, in the forward, on waiting for it.
    load_bytes : int
        Bytes of KV that were loaded.
    forward_started : float
        When the forward began.
    charge : float
        Work done on chunk rows, in decoder-block rows; None when the whole prompt was computed.
    recomputed : torch.Tensor or None
        The chunk rows recomputed by the prefill; None when the whole prompt was computed.
    repaired_tokens : int
        Chunk tokens recomputed while the answer was written.
    rows : torch.Tensor or None
        The chunk rows to recompute, ascending, where no selector is to choose them.
    guard_level : int or None
        Which settings of the online guard these are; None for settings that the guard has nothing to do with.
    guard_action : str or None
        What the guard changed in them.
    kv_bytes, kv_bytes_before : int
        Bytes of the prompt's KV in the cache, and what they would be without eviction.
    evicted_tokens : int
        Context tokens that each head of an evicted layer dropped.
    kept_reason : str or None
        Why layers were kept whole although eviction was asked for.
    encoded : dict of (str, ChunkKV)
        KV of misses that was encoded before the prompt's turn came, by key.
    forward_ended : float or None
        When the prefill ended, where other prompts were prefilled before the first output; None where that follows at once.
    batch_size : int
        Prompts that were decoded together, this one included.
    alone_reason : str or None
        Why it was decoded alone although others were asked with it.
    conversation : Conversation or None
        The conversation that it is a turn of.
    resets : int
        How often that had been reset when the call came.
    resumed : Resumption or None
        What it takes over from its conversation.
    expiry : dict of str to float
        Of a turn of a conversation, when the KV of its chunks is over, by `steady_s` and by their keys.
    output_ids : tuple of int
        What was generated, once that is over.
    sources : SourceAttention or None
        What the answer attended to, where that is asked for.
    wait_until : float or None
        Until when it waits for the model, by `time.perf_counter`; None for as long as it takes.
    """

    prompt: AssembledPrompt
    config: BlendConfig
    started: float
    plan: Plan | None = None
    hits: list[bool] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    tiers: list[str | None] = field(default_factory=list)
    encode_s: float = 0.0
    open_s: float = 0.0
    wait_s: float = 0.0
    load_bytes: int = 0
    forward_started: float = 0.0
    charge: float = 0.0
    recomputed: torch.Tensor | None = None
    repaired_tokens: int = 0
    rows: torch.Tensor | None = None
    guard_level: int | None = None
    guard_action: str | None = None
    kv_bytes: int = 0
    kv_bytes_before: int = 0
    evicted_tokens: int = 0
    kept_reason: str | None = None
    encoded: dict[str, ChunkKV] = field(default_factory=dict)
    forward_ended: float | None = None
    batch_size: int = 1
    alone_reason: str | None = None
    conversation: Conversation | None = None
    resets: int = 0
    resumed: Resumption | None = None
    expiry: dict[str, float] = field(default_factory=dict)
    output_ids: tuple[int, ...] = ()
    sources: SourceAttention | None = None
    wait_until: float | None = None

    @property
    def layout(self) -> PromptLayout:
        """The prompt as it is computed."""
        return self.prompt.layout if self.resumed is None else self.resumed.layout

    def report(
        self, num_layers: int, first_output: float, output_tokens: int, tpot_s: float | None = None
    ) -> BlendReport:
        """Return the figures.

        Parameters
        ----------
        num_layers : int
            Decoder layers of the model.
        first_output : float
            When the first output was there, by `time.perf_counter`.
        output_tokens : int
            Tokens generated.
        tpot_s : float, optional
            Seconds per token after the first.
        """
        assert self.plan is not None
        layout = self.prompt.layout
        context = layout.context_tokens
        resumed_rows = self.layout.resumed_rows
        taken_over = 0 if self.resumed is None else self.resumed.tokens
        if self.recomputed is None:
            rows = layout.context_rows[layout.context_rows >= resumed_rows]
            charged = rows.numel() / max(context, 1)
        else:
            # What was moved within a conversation is blended as chunks are.
            blended = context + taken_over - resumed_rows
            rows, charged = self.recomputed, self.charge / max(blended * num_layers, 1)
        in_chunks = rows[layout.is_chunk[rows]]
        deferred = sum(chunk.deferred for chunk in self.prompt.computed)
        fallback = self.plan.fallback_reason
        if self.prompt.computed and not self.prompt.chunks and fallback:
            if deferred:
                fallback = "all of its chunks are retrieved for the first time"
            elif any(chunk.is_elsewhere for chunk in self.prompt.computed):
                fallback = "none of its chunks stands where it was encoded, and the KV of this model cannot be moved"
        if self.guard_action is not None and not self.config.enabled:
            fallback = self.guard_action
        parts: list[_ReportedPart] = []
        tiers = self.tiers or [None] * len(self.hits)
        for chunk, span, hit, tier in zip(self.prompt.chunks, layout.chunks, self.hits, tiers, strict=True):
            inside = int(((rows >= span.start) & (rows < span.stop)).sum())
            held = span.stop <= resumed_rows
            whole = "the whole prompt was computed" if self.recomputed is None and not held else None
            damaged = chunk.key in self.unreadable and not held
            hit = hit and not damaged
            lost = "its stored KV could not be read" if damaged else "its KV was not stored"
            why = whole or chunk.note or (None if hit or held else lost)
            tier = "conversation" if held else tier
            report = ChunkReport(chunk.id, len(span), hit, inside, why, tier, self._attention(span))
            parts.append(_ReportedPart(span.start, chunk, report, is_miss=not hit))
        for chunk in self.prompt.computed:
            count = len(chunk.part_ids)
            attention = self._attention(ChunkSpan(chunk.row, chunk.row + count, chunk.row))
            report = ChunkReport(chunk.id, count, False, count, chunk.note, attention=attention)
            parts.append(_ReportedPart(chunk.row, chunk, report, is_miss=chunk.deferred))
        chunks, hits, misses = _whole_chunks(parts)
        return BlendReport(
            ttft_s=first_output - self.started,
            load_s=self.open_s + self.wait_s,
            encode_s=self.encode_s,
            recompute_s=(self.forward_ended or first_output) - self.forward_started - self.wait_s,
            prompt_tokens=len(layout),
            context_tokens=context,
            recomputed_tokens=in_chunks.numel(),
            recompute_ratio=1.0 if self.recomputed is None else self.plan.ratio,
            charged_ratio=charged if context else 0.0,
            hits=hits,
            misses=misses,
            selector=self.plan.selector,
            fallback_reason=fallback,
            chunks=chunks,
            output_tokens=output_tokens,
            load_bytes=self.load_bytes,
            repaired_tokens=self.repaired_tokens,
            guard=self.guard_action,
            tpot_s=tpot_s,
            kv_bytes=self.kv_bytes,
            kv_bytes_before=self.kv_bytes_before,
            evicted_tokens=self.evicted_tokens,
            kept_reason=self.kept_reason,
            batch_size=self.batch_size,
            alone_reason=self.alone_reason,
            conversation_tokens=taken_over,
            conversation_recomputed_tokens=rows.numel() - in_chunks.numel(),
        )

    def _attention(self, span: ChunkSpan) -> float | None:
        return None if self.sources is None else self.sources.of(span)


class Runner:
    """Runs prompts on one model and one store, one at a time.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    decoder : Decoder or None
        The model as blending sees it, or None if it cannot be blended.
    unsupported : str or None
        Why it cannot.
    store : KVStore
        Where KV is kept.
    namespace : str
        Where its names are.
    prefix_ids : sequence of int
        The encoding prefix.
    config : BlendConfig
        The engine's settings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        decoder: Decoder | None,
        unsupported: str | None,
        store: KVStore,
        namespace: str,
        prefix_ids: Sequence[int],
        config: BlendConfig,
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._unsupported = unsupported
        self._store = store
        self._namespace = namespace
        self._encoder = None if decoder is None else Encoder(decoder, prefix_ids, config.encode_batch_tokens)
        self._config = config
        self._tenant = config.namespace or ""
        self._num_layers = num_decoder_layers(model)
        self._num_kv_layers = self._num_layers if decoder is None else decoder.num_kv_layers
        self._warned_of_no_hit = False
        self._warned_of_no_sensitivity = False
        self._controller: Controller | None = None
        self.lock = turn_of(model)

    def run(
        self,
        run: PromptRun,
        headroom: int,
        forward: Callable[[BlendCache | None, dict[str, torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        """Call `forward` with the prompt's ids and a cache that makes its first pass over them the blended prefill.

        Parameters
        ----------
        run : PromptRun
            The prompt; its figures are filled in.
        headroom : int
            Tokens that will be generated at most, for which the cache keeps room.
        forward : callable
            Runs the model, with a cache of its own (None) where the model cannot be blended; called again if stored KV turns
            out damaged before its first pass is over.

        Returns
        -------
        torch.Tensor
            What `forward` returned.
        """
        layout = run.prompt.layout
        places = layout.positions if run.prompt.has_positions else None
        inputs = {"input_ids": torch.tensor([layout.token_ids], device=self._model.device)}
        with self.lock.within(run.wait_until), torch.no_grad():
            while True:
                self._note_expiry(run)
                readers = self._prepare(run)
                if readers is None:
                    run.forward_started = time.perf_counter()
                    if self._decoder is None:
                        # Its cache may hold states that ours has no place for.
                        run.kept_reason = None if run.config.kv_capacity is None else self._unsupported
                        return forward(None, inputs | self._unblended(places))
                    cache = BlendCache(self._num_layers)
                    with (
                        self._evicting(run, cache, headroom),
                        self._watching(run, cache),
                        self._decoder.placing(cache, places) as more,
                    ):
                        output = forward(cache, inputs | more)
                    self._remember(run, cache)
                    return output
                assert self._decoder is not None
                try:
                    with (
                        self._steered(run, readers, headroom) as cache,
                        self._evicting(run, cache, headroom),
                        self._watching(run, cache),
                        self._decoder.placing(cache, places) as more,
                    ):
                        output = forward(cache, inputs | more)
                    self._remember(run, cache)
                    return output
                except ChunkReadError as error:
                    # Damaged KV is a miss: it is dropped, and the next round encodes the chunk anew.
                    logger.warning("%s", error)
                    run.unreadable.add(error.key)
                    _quietly(self._store.discard, error.key)

    def _unblended(self, places: Sequence[int] | None) -> dict[str, torch.Tensor]:
        """Return what a model that cannot be blended is called with to put its tokens into their places.

        Raises
        ------
        PromptError
            If it takes no positions.
        """
        if places is None or list(places) == list(range(len(places))):
            return {}
        if not takes_positions(text_decoder(self._model)):
            raise PromptError(
                f"the prompt places its segments, and {type(self._model).__name__} takes no positions; leave positions out"
            )
        return {"position_ids": torch.tensor([list(places)], device=self._model.device)}

    def controller(self) -> Controller:
        """Return the controller that chooses ratios, for a model that can be blended; call it under `lock`."""
        assert self._decoder is not None
        if self._controller is None:
            self._controller = Controller(self._decoder, self._config, self._store)
        return self._controller

    def _prepare(self, run: PromptRun) -> list[KVReader] | None:
        """Decide how a prompt is prefilled; return readers of its chunks' KV, or None where it is computed as a whole."""
        layout, config = run.prompt.layout, run.config
        # After damaged KV this is asked again, and the choice between blending and not may fall otherwise.
        run.resumed = None
        ratio = config.recompute_ratio
        found: dict[str, KVReader | None] = {}
        given = run.rows
        run.plan = whole_plan(config, layout, self._refusal(layout), ratio if given is None else 0.0)
        if run.plan is None and given is not None:
            run.plan = Plan(FixedSelection(given), "given", given.numel() / layout.context_tokens)
            return self._readers(run, self._open_all(run))
        if run.plan is None and ratio == "auto":
            # If not even free loading makes blending pay, nothing need be opened.
            choice = self.controller().choose(config, layout, None)
            if choice.fallback_reason is None:
                found = self._open_all(run)
                opened = [found[chunk.key] for chunk in run.prompt.chunks]
                choice = self.controller().choose(config, layout, [each for each in opened if each is not None])
            ratio = choice.ratio
            if choice.fallback_reason is not None:
                run.plan = Plan(None, "full", fallback_reason=choice.fallback_reason)
            else:
                run.plan = whole_plan(config, layout, None, ratio)
        if run.plan is not None:
            self._resume(run, None)
            if not run.hits:
                held = 0 if run.resumed is None else run.resumed.chunks
                keys = [chunk.key for chunk in run.prompt.chunks[held:]]
                run.hits = [True] * held + self._store.holds(keys)
            return None if run.resumed is None else []
        assert ratio != "auto"
        self._resume(run, Making.of(config, ratio))
        readers = self._readers(run, found or self._open_all(run))
        if run.resumed is not None:
            readers = run.resumed.merge(readers)
        if run.layout.chunks:
            run.plan = make_plan(config, run.layout, self._num_layers, ratio, self._sensitivity(run, readers))
        else:
            run.plan = Plan(FixedSelection(_NO_ROWS), make_selector(config).name, ratio)
        return readers

    def _resume(self, run: PromptRun, asked: Making | None) -> None:
        """Take over what the conversation has computed, if this is a turn of one and blending is on.

        Parameters
        ----------
        run : PromptRun
            The prompt.
        asked : Making or None
            How it is blended; None where it is computed as a whole.
        """
        if run.conversation is None or not run.config.enabled or self._refusal(run.prompt.layout) is not None:
            return
        assert self._decoder is not None
        moves = asked is not None and self._decoder.is_movable
        run.resumed = run.conversation.resume(run.prompt, asked, moves=moves)
        if run.resumed is not None and run.hits:
            # What the conversation has at its place is a hit, whether or not the store was asked first.
            run.hits[: run.resumed.chunks] = [True] * run.resumed.chunks

    def _note_expiry(self, run: PromptRun) -> None:
        """Note until when the KV of a turn's chunks may be used.

        Before it is opened: what expires in between is a miss by then, and lives longer than was noted.
        """
        if run.conversation is None:
            return
        keys = list({chunk.key: None for chunk in (*run.prompt.chunks, *run.prompt.computed)})
        default, now = self._config.ttl_s, steady_s()
        for key, life in zip(keys, self._store.lifetimes(keys), strict=True):
            # A miss is stored for that long, and what is computed with the prompt should live no longer.
            seconds = life if life is not None else (math.inf if default is None else default)
            run.expiry[key] = now + seconds

    def _remember(self, run: PromptRun, cache: BlendCache) -> None:
        """Let the conversation keep what was computed, if it is whole."""
        plan = run.plan
        if (
            run.conversation is None
            or plan is None
            or self._refusal(run.prompt.layout, len(run.output_ids)) is not None
        ):
            return
        # Nothing was computed for a stream that was closed before its turn came.
        layers = cache.kv_layers[: self._num_kv_layers]
        if all(layer.held_tokens and not layer.evicted_tokens for layer in layers):
            run.conversation.keep(
                run.prompt,
                run.output_ids,
                cache.kv(),
                run.resumed,
                None if plan.selection is None else Making.of(run.config, plan.ratio),
                expiry=run.expiry,
                resets=run.resets,
            )

    def _refusal(self, layout: PromptLayout, output_tokens: int = 0) -> str | None:
        """Return why this model cannot be blended, or not on this prompt and an answer of so many tokens."""
        reach = None if self._decoder is None else self._decoder.rope_reach
        end = layout.end_position + output_tokens
        if reach is not None and end >= reach:
            return (
                f"the prompt ends at position {end}, and from {reach} on the rotary frequencies of this model "
                "depend on the length of the prompt"
            )
        return self._unsupported

    def _sensitivity(self, run: PromptRun, readers: Sequence[KVReader]) -> torch.Tensor | None:
        """Return how much each row depends on its neighbours, as `SelectionTask` has it; None where the selector does not ask."""
        selector = make_selector(run.config)
        if not selector.needs_sensitivity:
            return None
        known = [
            (span, reader.sensitivity)
            for span, reader in zip(run.layout.chunks, readers, strict=True)
            if reader.sensitivity is not None
        ]
        if not known and not self._warned_of_no_sensitivity:
            self._warned_of_no_sensitivity = True
            logger.warning(
                "selector=%r goes by what is measured when chunks are added, and of this prompt's %d chunks none was: all their "
                "tokens count the same. Add the chunks again, to an engine made with neighbours=2, or choose another "
                "selector (this is said once)",
                selector.name,
                len(readers),
            )
        if not known:
            return None
        rows = torch.full((len(run.prompt.layout),), torch.nan)
        for span, values in known:
            rows[span.start : span.stop] = torch.tensor(values)
        return rows

    @contextmanager
    def _steered(self, run: PromptRun, readers: Sequence[KVReader], headroom: int) -> Iterator[BlendCache]:
        assert self._decoder is not None and run.plan is not None
        layout = run.layout
        # A prompt that is computed as a whole, but for the rows that its conversation has.
        selection = run.plan.selection or FixedSelection(_NO_ROWS)
        cache = BlendCache(self._num_layers)
        first_layer = 0 if layout.resumed_rows else min(selection.check_layers, default=0)
        capacity = len(layout) + _room(headroom)
        run.forward_started = time.perf_counter()
        threads = run.config.load_threads if run.config.pipeline else 0
        loader = (
            LayerLoader(
                self._decoder,
                layout,
                readers,
                first_layer,
                capacity,
                run.config.prefetch_layers,
                threads,
                run.config.reposition,
            )
            if readers
            else None
        )
        with loader or nullcontext():
            source = loader if run.resumed is None else ResumedLayers(run.resumed.rows, loader, capacity)
            assert source is not None
            steering = Steering(self._decoder, cache, layout, selection, source)
            repair = Repair(self._decoder, cache, layout, steering, run.config) if run.config.repair_ratio else None
            with steering(), nullcontext() if repair is None else repair():
                yield cache
        if loader is not None:
            run.wait_s, run.load_bytes = loader.wait_s, loader.load_bytes
        if run.plan.selection is not None:
            run.charge, run.recomputed = steering.charge, steering.recomputed_rows.cpu()
        if repair is not None:
            run.charge += repair.charge
            run.repaired_tokens = repair.repaired_rows

    def _watching(self, run: PromptRun, cache: BlendCache) -> AbstractContextManager[None]:
        """Note what the answer attends to, where that is asked for."""
        if not run.config.source_attention or self._decoder is None or run.config.kv_capacity is not None:
            return nullcontext()
        run.sources = SourceAttention(self._model, look_layers(run.config, self._num_layers), len(run.prompt.layout))
        return run.sources(cache)

    @contextmanager
    def _evicting(self, run: PromptRun, cache: BlendCache, headroom: int) -> Iterator[None]:
        """Evict context KV during the prefill, where that is asked for, and note what the cache holds after it."""
        length = len(run.prompt.layout)
        if run.config.kv_capacity is None:
            yield
        else:
            selection = None if run.plan is None else run.plan.selection
            twice = selection is not None and bool(selection.look_layers)
            eviction = Eviction(
                self._model, run.config, cache, length, run.prompt.context, headroom, _room(headroom), at_end=twice
            )
            with eviction():
                yield
            run.kept_reason = eviction.kept_reason
        run.evicted_tokens = max(layer.evicted_tokens for layer in cache.kv_layers)
        run.kv_bytes = run.kv_bytes_before = 0
        for layer in cache.kv_layers:
            # What was generated is in the cache too.
            token_bytes = layer.nbytes // max(layer.held_tokens, 1)
            run.kv_bytes += token_bytes * (length - layer.evicted_tokens)
            run.kv_bytes_before += token_bytes * length

    def plan(self, lengths: Sequence[int], placed: Sequence[bool] = ()) -> list[list[int]]:
        """Return the batches in which chunks of these lengths are encoded; see `Encoder.plan`."""
        assert self._encoder is not None
        return self._encoder.plan(lengths, placed)

    def encode(
        self,
        token_ids: Sequence[Sequence[int]],
        places: Sequence[Sequence[int] | None] = (),
        *,
        patient: bool = False,
        until: float | None = None,
    ) -> Iterator[list[tuple[int, ChunkKV]]]:
        """Compute the KV of chunks, giving way to prompts between batches; yields as `Encoder.encode` does.

        Parameters
        ----------
        token_ids : sequence of sequence of int
            Token ids of each chunk.
        places : sequence of (sequence of int or None), optional
            Where its tokens stand; see `Encoder.encode`.
        patient : bool
            Whether all prompts that wait go first, rather than those that came first.
        until : float, optional
            When to give up waiting for the model, by `time.perf_counter`.
        """
        assert self._encoder is not None
        batches = self._encoder.encode(token_ids, places)
        while True:
            with self.lock.after_others() if patient else self.lock.within(until):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def measure(self, kv: ChunkKV, neighbours: Sequence[int], *, patient: bool = False) -> ChunkKV:
        """Return a chunk's KV with how much each token's changes behind other chunks; see `Encoder.sensitivity`.

        Parameters
        ----------
        kv : ChunkKV
            The KV of the chunk alone.
        neighbours : sequence of int
            Token ids of what it is likely to stand behind.
        patient : bool
            Whether all prompts that wait go first, rather than those that came first.
        """
        assert self._encoder is not None
        with self.lock.after_others() if patient else self.lock:
            return kv.measured(self._encoder.sensitivity(kv, neighbours))

    def encode_misses(self, runs: Sequence[PromptRun]) -> None:
        """Encode in one go the chunks of several prompts that have no stored KV, each once, and hand it to those prompts.

        Parameters
        ----------
        runs : sequence of PromptRun
            The prompts, before their prefill. Of those that are computed as a whole nothing is encoded.
        """
        missing: dict[str, list[tuple[PromptRun, PromptChunk]]] = {}
        for run in runs:
            chunks = run.prompt.chunks
            if not chunks or not self._blends(run):
                continue
            run.hits = self._store.holds([chunk.key for chunk in chunks])
            for chunk, hit in zip(chunks, run.hits, strict=True):
                if not hit:
                    missing.setdefault(chunk.key, []).append((run, chunk))
        keys = list(missing)
        started = time.perf_counter()
        texts = [missing[key][0][1] for key in keys]
        places = [chunk.positions for chunk in texts]
        until = min((run.wait_until for run in runs if run.wait_until is not None), default=None)
        for batch in self.encode([chunk.token_ids for chunk in texts], places, until=until) if keys else ():
            for index, kv in batch:
                wanted = missing[keys[index]]
                self._keep([chunk for _, chunk in wanted], kv)
                for run, _ in wanted:
                    run.encoded[keys[index]] = kv
        elapsed = time.perf_counter() - started
        tokens = sum(len(chunk.token_ids) for wanted in missing.values() for _, chunk in wanted)
        for run, chunk in (each for wanted in missing.values() for each in wanted):
            run.encode_s += elapsed * len(chunk.token_ids) / tokens

    def _blends(self, run: PromptRun) -> bool:
        """Return whether a prompt is blended, as far as that is known before its stored KV is opened."""
        config, layout, ratio = run.config, run.prompt.layout, run.config.recompute_ratio
        if whole_plan(config, layout, self._refusal(layout), ratio) is not None:
            return False
        if ratio != "auto":
            return True
        with self.lock.within(run.wait_until):
            return self.controller().choose(config, layout, None).fallback_reason is None

    def _open_all(self, run: PromptRun) -> dict[str, KVReader | None]:
        """Open the stored KV of every chunk, by its key; None where there is none."""
        held = 0 if run.resumed is None else run.resumed.chunks
        chunks = run.prompt.chunks[held:]
        opening = time.perf_counter()
        found = {
            chunk.key: RamReader(run.encoded[chunk.key]) if chunk.key in run.encoded else self._open(chunk)
            for chunk in chunks
        }
        run.open_s += time.perf_counter() - opening
        # After damaged KV the prompt is run again; what was a hit when the call came stays one in the report.
        run.hits = run.hits or [True] * held + [found[chunk.key] is not None for chunk in chunks]
        opened = [found[chunk.key] for chunk in chunks]
        read = (
            None if reader is None or chunk.key in run.encoded else reader.tier
            for chunk, reader in zip(chunks, opened, strict=True)
        )
        run.tiers = [*[None] * held, *read]
        return found

    def _readers(self, run: PromptRun, found: dict[str, KVReader | None]) -> list[KVReader]:
        """Return a reader for every chunk that no conversation has, encoding in one go those that have no stored KV."""
        chunks = run.prompt.chunks[0 if run.resumed is None else run.resumed.chunks :]
        missing = {chunk.key: chunk for chunk in chunks if found[chunk.key] is None}
        if missing:
            started = time.perf_counter()
            keys = list(missing)
            places = [chunk.positions for chunk in missing.values()]
            for batch in self.encode([chunk.token_ids for chunk in missing.values()], places):
                for index, kv in batch:
                    found[keys[index]] = RamReader(kv)
                    self._keep([chunk for chunk in chunks if chunk.key == keys[index]], kv)
            run.encode_s += time.perf_counter() - started
        # Where chunks are encoded when they are used the second time, that is as it should be.
        expected = self._config.encode_on == "second_use"
        if not any(run.hits) and not expected and not self._warned_of_no_hit:
            self._warned_of_no_hit = True
            logger.warning(
                "none of the %d chunks of this prompt was stored, so all of them were encoded first; add chunks before they "
                "are asked for (this is said once)",
                len(chunks),
            )
        return [
            reader if chunk.part is None else part_of(reader, *chunk.part)
            for chunk in chunks
            if (reader := found[chunk.key]) is not None
        ]

    def _keep(self, chunks: Sequence[PromptChunk], kv: ChunkKV) -> None:
        """Store the KV of a miss so that deleting the chunk deletes it: under its name, or else in RAM only.

        A chunk that came with an id nobody knew is named, as if it had been added. A text without an id, or with the id of
        another text, has no name to be deleted by. It is written in the background: the answer does not wait.
        """
        key = chunks[0].key
        new = [chunk.record() for chunk in chunks if chunk.id is not None and chunk.text_hash is not None]
        known = [chunk.id for chunk in chunks if chunk.id is not None and chunk.named]
        owner: dict[str, Any] = {"tenant": self._tenant, "ttl_s": self._config.ttl_s}
        if new or known:
            _quietly(self._store.put_later, key, kv, self._namespace, new, known, **owner)
        else:
            self._store.cache(key, kv, **owner)

    def _open(self, chunk: PromptChunk) -> KVReader | None:
        reader = self._store.open(chunk.key)
        if reader is not None and (reader.token_ids != chunk.token_ids or reader.num_layers != self._num_kv_layers):
            logger.warning(
                "stored KV %s… is not of the chunk it is stored for; it will be computed again", chunk.key[:12]
            )
            _quietly(self._store.discard, chunk.key)
            return None
        return reader


class _ReportedPart(NamedTuple):
    """What is reported of a run of a chunk's tokens. What is computed though its KV may be there is neither hit nor miss."""

    row: int
    chunk: PromptChunk
    report: ChunkReport
    is_miss: bool


def _whole_chunks(parts: Sequence[_ReportedPart]) -> tuple[tuple[ChunkReport, ...], int, int]:
    """Put together what is reported of the parts of chunks: a report of each chunk in prompt order, hits and misses."""
    whole: dict[object, ChunkReport] = {}
    missed: dict[object, bool] = {}
    for part in sorted(parts, key=lambda each: each.row):
        name: object = object() if part.chunk.part is None else part.chunk.key
        missed[name] = missed.get(name, False) or part.is_miss
        report, first = part.report, whole.get(name)
        if first is not None:
            report = replace(
                first,
                tokens=first.tokens + report.tokens,
                hit=first.hit or report.hit,
                recomputed_tokens=first.recomputed_tokens + report.recomputed_tokens,
                reason=first.reason or report.reason,
                tier=first.tier or report.tier,
                attention=None if first.attention is None else first.attention + (report.attention or 0.0),
            )
        whole[name] = report
    return tuple(whole.values()), sum(report.hit for report in whole.values()), sum(missed.values())


def _room(headroom: int) -> int:
    """Return for how many output tokens buffers have room at once; they grow when an answer is longer."""
    return min(headroom, ROOM_FOR_OUTPUT)


def _quietly(write: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Write to the store on the way to an answer, which a store that cannot be written does not prevent."""
    try:
        write(*arguments, **options)
    except StoreError as error:
        logger.warning("the store could not be written: %s", error)
