"""Measuring a profile: random tokens through the same parts that serve prompts."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from cacheblend_attachments.auto.policy import (
    BlendCost,
    LoadCost,
    Point,
    PrefillCost,
    Profile,
    StoredKV,
    Work,
    blend_s,
)
from cacheblend_rag.encode import Encoder, Target
from cacheblend_rag.errors import StoreError
from cacheblend_rag.fuse import BlendCache, LayerSource, Steering
from cacheblend_rag.fuse.plan import check_layers
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import Decoder, model_window
from cacheblend_rag.selection import SelectionTask, Selector
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.tuning import Tuning

__all__ = ["Measurement", "fit_costs", "forget_pages"]

_log = logging.getLogger(__name__)

# Far apart: a prompt of some tokens takes as long as one of twice as many, and would say nothing of what longer ones take.
_LENGTHS = (16, 128, 512, 1024, 2048, 4096)
_QUESTION_TOKENS = 15
_SAMPLE_TOKENS = 8
_RATIOS = (0.1, 0.5)
_MOST_RUNS = 5
_SHORT_RUN_S = 0.02
# Shares of the time limit, each spent before the next begins.
_PREFILL_UNTIL, _COMPUTE_UNTIL = 0.3, 0.65
_MOST_LOADED_BYTES = 48 * 1024**2

_Run: TypeAlias = Callable[[], float]
"""Runs something once and returns its seconds."""


class Measurement:
    """Measures one model, and blending with one selector, on this machine.

    It takes about `budget_s` seconds. Every point is measured at least once, however long that takes; large points, and
    repetitions, are left out when the time is up.
    """

    def __init__(
        self,
        decoder: Decoder,
        tuning: Tuning,
        selector: Selector,
        budget_s: float,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._decoder = decoder
        self._tuning = tuning
        self._selector = selector
        self._budget_s = budget_s
        self._say = progress or (lambda _: None)
        self._started = time.perf_counter()
        self._window = model_window(decoder.model) or _LENGTHS[-1]
        vocabulary = decoder.model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocabulary, (_LENGTHS[-1],), generator=generator).tolist()
        few = Target(tuple(self._ids[1 : 1 + _SAMPLE_TOKENS]))
        [(_, self._sample)] = next(Encoder(decoder, self._ids[:1], _SAMPLE_TOKENS + 1).encode([few]))
        self._first_layer = min(check_layers(selector, decoder.num_layers), default=0)

    @torch.no_grad()
    def profile(self, identity: dict[str, str], samples: Sequence[AbstractContextManager[KVStore]]) -> Profile:
        """Measure everything; a tier that cannot be written is left out with a warning."""
        prefill_points, blend_points = self._compute_points()
        lengths = [point.tokens for point in prefill_points]
        prefill = fit_costs([(1, length, length**2) for length in lengths], [each.seconds for each in prefill_points])
        unknown = BlendCost(0.0, 0.0, 0.0, 0.0)
        layers, first = self._decoder.num_layers, self._first_layer
        profile = Profile(identity, layers, PrefillCost(*prefill), unknown, prefill_points, blend_points, (), 0.0)
        # What the layers before the first check layer cost is known from full prefill.
        after = layers - first
        seconds = [
            max(each.seconds - first * profile.layer_s(each.tokens), 0.05 * each.seconds) for each in blend_points
        ]
        amounts = [
            (1, after * each.tokens, after * each.rows, after * each.rows * each.tokens) for each in blend_points
        ]
        profile = replace(profile, blend=BlendCost(*fit_costs(amounts, seconds)))
        for number, sample in enumerate(samples):
            spent = self._spent()
            until = spent + max(self._budget_s - spent, 0.0) / (len(samples) - number)
            try:
                with sample as store:
                    cost = self._load_cost(profile, store, until)
            except (StoreError, OSError) as error:
                _log.warning("a tier was not measured, because it cannot be used now: %s", error)
                continue
            profile = replace(profile, loads=(*profile.loads, cost))
        return replace(profile, measured_s=self._spent())

    def _compute_points(self) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
        """Measure full and blended prefill, in alternation: what slows the machine for a while then slows both."""
        lengths = [length for length in _LENGTHS if length <= self._window]
        if len(lengths) < 2:
            lengths = sorted({max(self._window // 4, 1), self._window})
        self._say("full prefill")
        self._full(lengths[0])
        full: dict[int, list[float]] = {}
        for length in lengths:
            if len(full) >= 2:
                known = max(full)
                if self._spent() + 1.2 * length / known * full[known][0] > self._budget_s * _PREFILL_UNTIL:
                    break
            full[length] = [self._full(length)]

        # Blending computes few rows: it can be measured at twice the length.
        longest = min(2 * max(full), self._window)
        # The shortest prompt tells what blending costs however little there is to compute, which decides whether it pays.
        shortest = 2 * (_QUESTION_TOKENS + 1)
        usable = sorted(each for each in {shortest, *full, longest} if shortest <= each <= self._window) or [longest]
        self._say("blended prefill")
        blend: list[tuple[PromptLayout, float, _Run, list[float]]] = []
        for length in sorted({usable[0], usable[len(usable) // 2], usable[-1]}):
            layout = self._layout([max(length - 1 - _QUESTION_TOKENS, 1)])
            source = _scratch_kv(self._sample.layers, self._decoder, len(layout))
            for ratio in _RATIOS:
                run = partial(self._timed, partial(self._blend, layout, ratio, source))
                if not blend:
                    run()
                blend.append((layout, ratio, run, [run()]))
        runs = [(partial(self._full, length), times) for length, times in full.items()]
        self._repeat([*runs, *((run, times) for _, _, run, times in blend)], self._budget_s * _COMPUTE_UNTIL)
        points = []
        for layout, ratio, _, times in blend:
            rows = len(layout) - layout.context_tokens + round(ratio * layout.context_tokens)
            points.append(Point(rows, len(layout), min(times)))
        return tuple(Point(length, length, min(times)) for length, times in full.items()), tuple(points)

    def _load_cost(self, profile: Profile, store: KVStore, until: float) -> LoadCost:
        most = min(_MOST_LOADED_BYTES // self._decoder.kv_bytes_per_token, self._window - 1 - _QUESTION_TOKENS, 2048)
        # The longest is also blended, which a slow model should not have to spend all its time on.
        while most > 64 and blend_s(profile, self._work(most, ()), _RATIOS[0]) > (until - self._spent()) / 4:
            most //= 2
        sizes = [(chunks, max(min(tokens, most // chunks), 1)) for chunks, tokens in ((1, 64), (8, 32), (2, 1024))]
        amounts, seconds = [], []
        for left, (chunks, tokens) in zip(range(len(sizes), 0, -1), sizes, strict=True):
            layout = self._layout([tokens] * chunks)
            keys = [f"{left:08x}{number:08x}" for number in range(chunks)]
            for number, key in enumerate(keys):
                store.put(key, self._chunk(number, tokens))
            open_readers = partial(_open_cold, store, keys)
            # It rises to the device by this.
            self._load(layout, open_readers)
            readers = open_readers()
            tier, codec, packed = readers[0].tier, readers[0].codec, sum(each.packed_bytes for each in readers)
            self._say(f"loading from {tier}")
            amounts.append((chunks * self._decoder.num_kv_layers, packed))
            share = self._spent() + max(until - self._spent(), 0.0) / (2 * left)
            seconds.append(self._least(partial(self._load, layout, open_readers), share))
            if left == 1:
                piped_s = self._least(partial(self._load, layout, open_readers, blends=True), until, most=3)
        per_read_s, per_byte_s = fit_costs(amounts, seconds)
        cost = LoadCost(tier, codec, per_read_s, per_byte_s, 1.0, packed / layout.context_tokens)
        # Which share of what could hide behind computing did, in the blended prefill.
        known = replace(profile, loads=(cost,))
        work = self._work(layout.context_tokens, (StoredKV(tier, codec, chunks, packed),))
        ideal_s = blend_s(known, work, _RATIOS[0])
        serial_s = blend_s(known, replace(work, threaded=False), _RATIOS[0])
        if serial_s - ideal_s < 0.02 * serial_s:
            # Nothing worth hiding at this size; where it is, a loader in its own thread hides most of it.
            return cost
        return replace(cost, overlap=min(max((serial_s - piped_s) / (serial_s - ideal_s), 0.0), 1.0))

    def _work(self, context: int, stored: tuple[StoredKV, ...]) -> Work:
        """Return a prompt with `context` chunk tokens, as `_layout` makes it."""
        tokens, ahead = context + 1 + _QUESTION_TOKENS, self._tuning.prefetch_layers
        return Work(tokens, context, context, self._first_layer, ahead, True, stored)

    def _layout(self, chunks: Sequence[int]) -> PromptLayout:
        """Return a prompt of one token, chunks of these numbers of tokens, and a question."""
        spans, place = [], 1
        for tokens in chunks:
            spans.append(ChunkSpan(place, place + tokens, place))
            place += tokens
        length = place + _QUESTION_TOKENS
        ids = (self._ids * (length // len(self._ids) + 1))[:length]
        return PromptLayout(tuple(ids), tuple(range(length)), tuple(spans))

    def _chunk(self, number: int, tokens: int) -> ChunkKV:
        """Return one of several chunks of `tokens` tokens; its KV is the sample's, repeated."""
        sample = self._sample
        ids = tuple(self._ids[1 + number * tokens : 1 + (number + 1) * tokens])
        repeats = -(-len(ids) // len(sample.token_ids))
        layers = [LayerKV(*(t.repeat(1, repeats, 1)[:, : len(ids)].contiguous() for t in kv)) for kv in sample.layers]
        return ChunkKV(ids, sample.start, layers)

    def _full(self, tokens: int) -> float:
        """Prefill the first `tokens` tokens in full; return the seconds."""
        return self._timed(lambda: self._forward(BlendCache(self._decoder.num_layers), self._ids[:tokens]))

    def _load(self, layout: PromptLayout, open_readers: Callable[[], list[KVReader]], *, blends: bool = False) -> float:
        """Load all layers of a prompt, and blend it meanwhile if asked to; return the seconds."""
        readers, decoder, tuning = open_readers(), self._decoder, self._tuning
        first = self._first_layer if blends else 0

        def run() -> None:
            with LayerLoader(
                decoder, layout, readers, first, len(layout), tuning.prefetch_layers, tuning.threads
            ) as loader:
                if blends:
                    self._blend(layout, _RATIOS[0], loader.synchronize)
                else:
                    for layer in range(decoder.num_kv_layers):
                        loader.synchronize(layer)

        return self._timed(run)

    def _blend(self, layout: PromptLayout, ratio: float, source: LayerSource) -> None:
        """Prefill a prompt blended."""
        cache = BlendCache(self._decoder.num_layers)
        task = SelectionTask(layout, self._decoder.num_layers, round(ratio * layout.context_tokens))
        with Steering(self._decoder, cache, layout, self._selector.begin(task), source)():
            self._forward(cache, layout.token_ids)

    def _forward(self, cache: BlendCache, ids: Sequence[int]) -> None:
        rows = torch.tensor([ids], device=self._decoder.device)
        self._decoder.model(input_ids=rows, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def _timed(self, run: Callable[[], None]) -> float:
        device = self._decoder.device

        def synchronize() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - started

    def _spent(self) -> float:
        return time.perf_counter() - self._started

    def _least(self, run: _Run, until: float, most: int = _MOST_RUNS) -> float:
        """Return the least disturbed of a run and its repetitions, as many as fit into the time."""
        times = [run()]
        self._repeat([(run, times)], until, most)
        return min(times)

    def _repeat(self, runs: Sequence[tuple[_Run, list[float]]], until: float, most: int = _MOST_RUNS) -> None:
        """Run everything again and note its times, round after round, while another round fits into the time."""
        for _ in range(most - 1):
            if self._spent() + sum(max(min(times), _SHORT_RUN_S) for _, times in runs) > until:
                return
            for run, times in runs:
                # Short runs are disturbed the most, and cost the least to repeat.
                for _ in range(max(min(int(_SHORT_RUN_S / min(times)), _MOST_RUNS), 1)):
                    times.append(run())


def _open_cold(store: KVStore, keys: Sequence[str]) -> list[KVReader]:
    """Open chunks as they are when no earlier reading has left their files in memory."""
    for file in store.path.rglob("*.safetensors") if store.path else ():
        forget_pages(file)
    readers = [reader for key in keys if (reader := store.open(key)) is not None]
    if len(readers) < len(keys):
        raise StoreError("KV that was just stored is gone")
    return readers


def forget_pages(path: Path) -> None:
    """Have the system drop a file from its page cache, where it offers that (Linux does); it is synced first, or it could not."""
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _scratch_kv(sample: Sequence[LayerKV], decoder: Decoder, rows: int) -> LayerSource:
    """Return a source whose layers, of the sample's shape and dtype, are all in the same memory: they take no time."""
    buffers: dict[tuple[torch.Size, torch.device], LayerKV] = {}
    layers = []
    for device, kv in zip(decoder.devices, sample, strict=True):
        known = (kv.keys.shape, device)
        if known not in buffers:
            buffers[known] = LayerKV(*(t.new_zeros((1, t.shape[0], rows, t.shape[2])).to(device) for t in kv))
        layers.append(buffers[known])
    return layers.__getitem__


def fit_costs(amounts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factor, at least 0, of each term whose amounts sum up to the seconds, with the least squared relative error."""
    weighted = np.array(amounts, dtype=np.float64) / np.maximum(np.array(seconds, dtype=np.float64), 1e-9)[:, None]
    # Terms differ by many powers of ten; the solver wants them alike.
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-30)
    weighted /= scale
    best, best_error = np.zeros(len(scale)), np.inf
    # With at most four terms every set of those that are not zero can be tried.
    for size in range(1, len(scale) + 1):
        for chosen in combinations(range(len(scale)), size):
            part = list(chosen)
            factors = np.linalg.lstsq(weighted[:, part], np.ones(len(weighted)), rcond=None)[0]
            error = float(np.square(weighted[:, part] @ factors - 1).sum())
            if (factors >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(len(scale)), error
                best[part] = factors
    fitted: list[float] = (best / scale).tolist()
    return fitted
