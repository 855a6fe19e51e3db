"""Measuring a profile: random tokens through the same parts that serve prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller.policy import StoredKV, Work, blend_s
from cacheblend_rag.controller.profile import (
    BlendCost,
    BlendPoint,
    LoadCost,
    PrefillCost,
    PrefillPoint,
    Profile,
    fit_costs,
    profile_identity,
)
from cacheblend_rag.controller.runs import QUESTION_TOKENS, ScratchKV, TimedRuns
from cacheblend_rag.errors import StoreError
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.model import Decoder
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.probe import OpenProbe, TierProbe

__all__ = ["Measurement"]

_log = logging.getLogger(__name__)

# Far apart: a prompt of some tokens takes as long as one of twice as many, and would say nothing of what longer ones take.
_LENGTHS = (16, 128, 512, 1024, 2048, 4096)
_RATIOS = (0.1, 0.5)
_MOST_RUNS = 5
_SHORT_RUN_S = 0.02
# Shares of the time limit, each spent before the next begins.
_PREFILL_UNTIL, _COMPUTE_UNTIL = 0.3, 0.65
_MOST_LOADED_BYTES = 48 * 1024**2

_Place = TypeVar("_Place")


class Measurement:
    """Measures one model on this machine.

    Parameters
    ----------
    decoder : Decoder
        The model.
    config : BlendConfig
        The settings; selector, check layers and `prefetch_layers` count.
    budget_s : float
        About how many seconds it may take in all. Every point is measured at least once, however long that takes; large
        points, and repetitions, are left out when the time is up.
    progress : callable, optional
        Called with what is measured now.
    """

    def __init__(
        self, decoder: Decoder, config: BlendConfig, budget_s: float, progress: Callable[[str], None] | None = None
    ) -> None:
        self._decoder = decoder
        self._config = config
        self._budget_s = budget_s
        self._say = progress or (lambda _: None)
        self._started = time.perf_counter()
        self._runs = TimedRuns(decoder, config, _LENGTHS[-1])

    @torch.no_grad()
    def profile(self, probes: Sequence[TierProbe]) -> Profile:
        """Measure everything.

        Parameters
        ----------
        probes : sequence of TierProbe
            The tiers; one that cannot be written is left out with a warning.

        Returns
        -------
        Profile
            What was found.
        """
        prefill_points, blend_points = self._compute_points()
        layers = self._runs.selection(self._runs.layout([1]), 0.0).check_layers
        unfitted = Profile(
            identity=profile_identity(self._decoder, self._runs.selector.name, layers),
            num_layers=self._decoder.num_layers,
            prefill=_fit_prefill(prefill_points),
            blend=BlendCost(0.0, 0.0, 0.0, 0.0),
            prefill_points=prefill_points,
            blend_points=blend_points,
            loads=(),
            measured_s=0.0,
        )
        profile = replace(unfitted, blend=_fit_blend(blend_points, unfitted, self._runs.first_layer()))
        return self._loads(profile, probes)

    def _loads(self, profile: Profile, probes: Sequence[TierProbe]) -> Profile:
        for number, probe in enumerate(probes):
            spent = self._spent()
            until = spent + max(self._budget_s - spent, 0.0) / (len(probes) - number)
            try:
                cost = self._load_cost(profile, probe, until)
            except (StoreError, OSError) as error:
                _log.warning("a tier is not measured, it cannot be used now: %s", error)
                continue
            profile = replace(profile, loads=(*profile.loads, cost))
        return replace(profile, measured_s=self._spent())

    def _compute_points(self) -> tuple[tuple[PrefillPoint, ...], tuple[BlendPoint, ...]]:
        """Measure full and blended prefill, in alternation: what slows the machine for a while then slows both."""
        runs = self._runs
        window = self._decoder.window or _LENGTHS[-1]
        lengths = [length for length in _LENGTHS if length <= window]
        if len(lengths) < 2:
            lengths = sorted({max(window // 4, 1), window})
        full: dict[int, list[float]] = {}

        self._say("full prefill")
        runs.full(lengths[0])
        for length in lengths:
            if len(full) >= 2:
                known = max(full)
                if self._spent() + 1.2 * length / known * full[known][0] > self._budget_s * _PREFILL_UNTIL:
                    break
            full[length] = [runs.full(length)]

        # Blending computes few rows: it can be measured at twice the length.
        longest = min(2 * max(full), window)
        shortest = 2 * (QUESTION_TOKENS + 1)
        # The shortest prompt tells what blending costs however little there is to compute, which decides whether it pays.
        usable = sorted({length for length in (shortest, *full, longest) if shortest <= length <= window} or {longest})
        chosen = sorted({usable[0], usable[len(usable) // 2], usable[-1]})
        layouts = {length: runs.layout([max(length - 1 - QUESTION_TOKENS, 1)]) for length in chosen}
        sources = {
            length: ScratchKV(runs.sample.layers, self._decoder, len(layout)) for length, layout in layouts.items()
        }

        def run_blend(place: tuple[int, float]) -> float:
            length, ratio = place
            return runs.blend(layouts[length], ratio, sources[length])

        self._say("blended prefill")
        places = [(length, ratio) for length in chosen for ratio in _RATIOS]
        run_blend(places[0])
        blend = {place: [run_blend(place)] for place in places}
        times: dict[object, list[float]] = dict((*full.items(), *blend.items()))
        self._repeat(
            times,
            lambda place: run_blend(place) if isinstance(place, tuple) else runs.full(place),  # type: ignore[arg-type]
            self._budget_s * _COMPUTE_UNTIL,
        )
        points = []
        for (length, ratio), seconds in blend.items():
            layout = layouts[length]
            rows = len(layout) - layout.context_tokens + round(ratio * layout.context_tokens)
            points.append(BlendPoint(rows, len(layout), min(seconds)))
        return tuple(PrefillPoint(length, min(seconds)) for length, seconds in full.items()), tuple(points)

    def _load_cost(self, profile: Profile, probe: TierProbe, until: float) -> LoadCost:
        per_token = self._decoder.kv_bytes_per_token
        window = self._decoder.window or _LENGTHS[-1]
        most = min(_MOST_LOADED_BYTES // per_token, window - 1 - QUESTION_TOKENS, 2048)
        # The longest is also blended, which a slow model should not have to spend all its time on.
        while most > 64 and blend_s(profile, self._work(most, ()), _RATIOS[0]) > (until - self._spent()) / 4:
            most //= 2
        loadings = [
            self._runs.loading(chunks, max(min(tokens, most // chunks), 1))
            for chunks, tokens in ((1, 64), (8, 32), (2, 1024))
        ]
        reads, sizes, seconds = [], [], []
        for number, loading in enumerate(loadings):
            layout = loading.layout
            with probe(loading.chunks) as open_readers:
                readers = open_readers()
                tier, codec = readers[0].tier, readers[0].codec
                self._say(f"loading from {tier}")
                sizes.append(sum(reader.packed_bytes for reader in readers))
                reads.append(len(readers) * self._decoder.num_kv_layers)
                self._runs.load(layout, readers)
                share = self._spent() + max(until - self._spent(), 0.0) / (2 * (len(loadings) - number))
                seconds.append(self._least(self._runs.load, layout, open_readers, share))
                if number < len(loadings) - 1:
                    continue
                per_read, per_byte = fit_costs(
                    [lambda point: float(point[0]), lambda point: float(point[1])],
                    list(zip(reads, sizes, strict=True)),
                    seconds,
                )
                cost = LoadCost(tier, codec, per_read, per_byte, 1.0, sizes[-1] / layout.context_tokens)
                piped = self._least(
                    partial(self._runs.loaded_blend, ratio=_RATIOS[0]), layout, open_readers, until, most=3
                )
        return replace(cost, overlap=self._overlap(profile, cost, layout, piped))

    def _overlap(self, profile: Profile, cost: LoadCost, layout: PromptLayout, piped_s: float) -> float:
        """Return which share of what could hide behind computing did, in a blended prefill that took `piped_s`."""
        known, context = replace(profile, loads=(cost,)), layout.context_tokens
        stored = StoredKV(cost.tier, cost.codec, len(layout.chunks), round(cost.bytes_per_token * context))
        work = self._work(context, (stored,))
        ideal = blend_s(known, work, _RATIOS[0])
        serial = blend_s(known, replace(work, threaded=False), _RATIOS[0])
        if serial - ideal < 0.02 * serial:
            # Nothing worth hiding at this size; where it is, a loader in its own thread hides most of it.
            return 1.0
        return min(max((serial - piped_s) / (serial - ideal), 0.0), 1.0)

    def _work(self, context: int, stored: tuple[StoredKV, ...]) -> Work:
        """Return a prompt of so many chunk tokens, as `TimedRuns.layout` makes it."""
        tokens, ahead = context + 1 + QUESTION_TOKENS, self._config.prefetch_layers
        return Work(tokens, context, context, self._runs.first_layer(), ahead, True, stored)

    def _spent(self) -> float:
        return time.perf_counter() - self._started

    def _least(
        self,
        run: Callable[[PromptLayout, Sequence[KVReader]], float],
        layout: PromptLayout,
        open_readers: OpenProbe,
        until: float,
        most: int = _MOST_RUNS,
    ) -> float:
        """Return the least disturbed of a run over new readers and its repetitions, as many as fit into the time."""
        times = {None: [run(layout, open_readers())]}
        self._repeat(times, lambda _: run(layout, open_readers()), until, most)
        return min(times[None])

    def _repeat(
        self, times: dict[_Place, list[float]], run: Callable[[_Place], float], until: float, most: int = _MOST_RUNS
    ) -> None:
        """Run every place again, round after round, while another round fits into the time."""
        for _ in range(most - 1):
            expected = sum(max(min(runs), _SHORT_RUN_S) for runs in times.values())
            if self._spent() + expected > until:
                return
            for place, runs in times.items():
                # Short runs are disturbed the most, and cost the least to repeat.
                for _ in range(max(min(int(_SHORT_RUN_S / min(runs)), _MOST_RUNS), 1)):
                    runs.append(run(place))


def _fit_prefill(points: Sequence[PrefillPoint]) -> PrefillCost:
    columns = [lambda _: 1.0, lambda point: point.tokens, lambda point: point.tokens**2]
    return PrefillCost(*fit_costs(columns, points, [point.seconds for point in points]))


def _fit_blend(points: Sequence[BlendPoint], profile: Profile, first_layer: int) -> BlendCost:
    """Fit what the layers behind the first check layer cost; the ones before it are known from full prefill."""
    behind = profile.num_layers - first_layer
    seconds = [
        max(point.seconds - first_layer * profile.layer_s(point.tokens), 0.05 * point.seconds) for point in points
    ]
    columns = [
        lambda _: 1.0,
        lambda point: behind * point.tokens,
        lambda point: behind * point.rows,
        lambda point: behind * point.rows * point.tokens,
    ]
    return BlendCost(*fit_costs(columns, points, seconds))
