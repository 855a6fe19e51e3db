"""Time to first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend_lab.bench.runner import RoundsBench, median_ratio, say_range, wait_for_device
from cacheblend_lab.bench.settings import DEVICE, NO_LIMIT, TTFTSetting, device_rate
from cacheblend_lab.bench.shapes import RandomWords, make_model
from cacheblend_lab.bench.tiers import SlowStore
from cacheblend_lab.settings import EngineSettings, engine_settings, settings_of
from cacheblend_rag.chunk import BlendPrompt, Chunk, FixedText
from cacheblend_rag.cli.output import say_seconds
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import make_selector

__all__ = ["TTFTBench", "TTFTRow"]

_FULL = "full"
_READY = "ready"
_PREFIX_CACHE = "prefix_cache"
_REUSE = "reuse"
_GAPLESS = "gapless"


@dataclass(frozen=True, slots=True)
class TTFTRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "full": the model's own forward over the whole prompt. "prefix_cache": its own cache of the first chunk, copied, and its
        forward over the rest. "ready": its forward over the question, from a cache of all before it, which is not copied.
        "reuse": stored KV of every chunk, nothing recomputed. "gapless": the same after a fixed head, with separators. "blend":
        some tokens recomputed.
    selector : str or None
        Who chose them.
    recompute_ratio : float or None
        The ratio asked for.
    charged_ratio : float
        Work done on chunk tokens over (chunk tokens x layers).
    ttft_s, ttft_min_s, ttft_max_s : float
        Median and extremes over the rounds, from the call to the first output id.
    speedup : float
        Full prefill's `ttft_s` over this one.
    limit : float
        What `speedup` would be if time were proportional to the rows computed in all layers and all else were free.
    tier : str or None
        Where stored KV was read from.
    over_ram : float or None
        `ttft_s` over that of the same method from RAM in the same round; the median of the rounds. None
        where that was not measured.
    of_reuse : float or None
        The speed of "reuse" that "gapless" leaves: its `ttft_s` from the same tier over this, in the same round; the median of
        the rounds.
    of_ready : float or None
        `ttft_s` over that of "ready", in the same round; the median of the rounds. None for what recomputes chunks.
    load_s, recompute_s : float or None
        Medians of the time spent waiting for stored KV, and in the blended forward pass.
    load_bytes : int or None
        Bytes of KV that were loaded.
    """

    method: str
    selector: str | None
    recompute_ratio: float | None
    charged_ratio: float
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    speedup: float
    limit: float
    tier: str | None
    over_ram: float | None
    of_reuse: float | None
    of_ready: float | None
    load_s: float | None
    recompute_s: float | None
    load_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    selector: str | None
    ratio: float | None
    run: Callable[[], BlendReport | None]
    tier: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return self.name, self.selector, self.ratio, self.tier


_Runs = Sequence[tuple[float, BlendReport | None]]


class _PrefixCache:
    """The exact KV of a prompt's first tokens, computed once; every use gets a copy, unless it takes none."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, token_ids: Sequence[int]) -> None:
        self._model = model
        self.token_ids = tuple(token_ids)
        self._cache = DynamicCache(config=model.config)
        ids = torch.tensor([self.token_ids], device=model.device)
        model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def logits(self, rest: torch.Tensor, copies: bool = True) -> torch.Tensor:
        """Return the logits after the prefix and `rest`, ``(vocab,)``; without a copy, the cache is cut back to the prefix."""
        cache = copy.deepcopy(self._cache) if copies else self._cache
        logits: torch.Tensor = self._model(
            input_ids=rest, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        if not copies:
            cache.crop(-rest.shape[1])
        return logits[0, -1]


class TTFTBench(RoundsBench[TTFTSetting, _Method, "tuple[float, BlendReport | None]", TTFTRow]):
    """A model of random weights with its chunks' KV stored."""

    text_columns = 2

    def __init__(self, setting: TTFTSetting) -> None:
        super().__init__(setting)
        for name in setting.selectors:
            make_selector(name)
        settings = setting.engine_settings()
        model, tokenizer = make_model(setting)
        location = (
            self.use_disk(setting.folder).path if any(each.startswith("disk") for each in setting.tiers) else None
        )

        def engine(store: Any, settings: EngineSettings) -> BlendEngine:
            return self.closing.enter_context(BlendEngine(model, tokenizer, store=store, **settings))

        self.engine = engine(location, settings)
        # The same files, of which nothing is ever kept in RAM, and the same KV from devices that are emulated.
        self._engines = {"ram": self.engine}
        if location is not None:
            self._engines["disk"] = engine(location, engine_settings(settings, ram_bytes=0))
        if DEVICE in setting.tiers:
            self._engines[DEVICE] = engine(None, engine_settings(settings, device_bytes=NO_LIMIT))
        for tier in dict.fromkeys(each for each in setting.tiers if each != DEVICE):
            rate = device_rate(tier)
            if rate is not None:
                slow = SlowStore(tier, rate, NO_LIMIT)
                self.closing.callback(slow.close)
                self._engines[tier] = engine(slow, settings)
        words = RandomWords(tokenizer, setting.seed)
        chunks = words.chunks(setting.chunks, setting.chunk_tokens)
        question = words.text(setting.question_tokens)
        self.prompt = BlendPrompt(chunks=[str(chunk.id) for chunk in chunks], suffix=question)
        self._prompts = {_REUSE: self.prompt}
        for tier, each in self._engines.items():
            # The disk tier's files are there already; in memory each engine has KV of its own.
            if not tier.startswith("disk"):
                each.add(chunks)
        self._gapless: dict[str, BlendEngine] = {}
        if 0 in setting.ratios and (setting.head_tokens or setting.separator_tokens):
            self._make_gapless(words, chunks, question)
        self.token_ids = self.engine.prompt_ids(self.prompt)
        self._ids = torch.tensor([self.token_ids], device=setting.device)
        # The BOS and the first chunk.
        self._cached_tokens = 1 + setting.chunk_tokens
        self._cached = _PrefixCache(model, self.token_ids[: self._cached_tokens])
        # Of the prompt without gaps where there is one.
        ready = next(iter(self._gapless.values()), self.engine).prompt_ids(self._prompts.get(_GAPLESS, self.prompt))
        self._ready = _PrefixCache(model, ready[: -setting.question_tokens])

    def _make_gapless(self, words: RandomWords, chunks: Sequence[Chunk], question: str) -> None:
        """Make engines of another separator over the same stores, where each chunk's KV is followed by the separator's."""
        separator, head = words.text(self.setting.separator_tokens), words.text(self.setting.head_tokens)
        pieces = [Chunk(chunk.text, f"spaced {number}") for number, chunk in enumerate(chunks)]
        prompt = BlendPrompt(FixedText(head), [str(piece.id) for piece in pieces], question, separator)
        self._prompts[_GAPLESS] = prompt
        for tier, engine in self._engines.items():
            settings = engine_settings(settings_of(engine), separator=separator)
            gapless = BlendEngine(engine.model, engine.tokenizer, store=engine._store, **settings)
            self._gapless[tier] = self.closing.enter_context(gapless)
            if not tier.startswith("disk"):
                gapless.add(pieces)
            # The head is computed and stored by the first prompt that begins with it.
            gapless.prefill(prompt, blend=gapless.blend.replace(selector="none", recompute_ratio=0.0))
            gapless.flush()

    def methods(self) -> list[_Method]:
        """Return full prefill, the model's own caches, and each ratio by each selector from each tier."""
        own = {_FULL: self._full, _PREFIX_CACHE: self._prefix_cache, _READY: self._after_ready}
        methods = [_Method(name, None, None, run) for name, run in own.items()]
        for ratio in dict.fromkeys(self.setting.ratios):
            for selector in dict.fromkeys(self.setting.selectors) if ratio else ("none",):
                for tier in dict.fromkeys(self.setting.tiers):
                    for name in ("blend",) if ratio else tuple(self._prompts):
                        run = partial(self._blend, tier, selector, ratio, name)
                        methods.append(_Method(name, selector, ratio, run, tier))
        return methods

    def run(self, method: _Method) -> tuple[float, BlendReport | None]:
        """Return the seconds to the first output id, and the engine's report."""
        if method.tier == "disk" and self.disk is not None:
            self.disk.drop_cached()
        wait_for_device(self.setting.device)
        started = time.perf_counter()
        report = method.run()
        # Every method ends by reading the first output id, which waits for the device.
        return time.perf_counter() - started, report

    @torch.no_grad()
    def _full(self) -> None:
        logits = self.engine.model(input_ids=self._ids, use_cache=True, logits_to_keep=1).logits
        int(logits[0, -1].argmax())

    def _prefix_cache(self) -> None:
        int(self._cached.logits(self._ids[:, self._cached_tokens :]).argmax())

    def _after_ready(self) -> None:
        question = self._ids[:, -self.setting.question_tokens :]
        int(self._ready.logits(question, copies=False).argmax())

    def _blend(self, tier: str, selector: str, ratio: float, name: str = _REUSE) -> BlendReport:
        engine = (self._gapless if name == _GAPLESS else self._engines)[tier]
        blend = engine.blend.replace(selector=selector, recompute_ratio=ratio)
        result = engine.prefill(self._prompts.get(name, self.prompt), blend=blend)
        int(result.logits.argmax())
        return result.report

    def row(self, method: _Method, runs: Mapping[_Method, _Runs]) -> TTFTRow:
        """Return a method's figures beside those of full prefill, of the same from RAM, and of plain reuse."""
        times_of = {each.key: [seconds for seconds, _ in found] for each, found in runs.items()}
        times = times_of[method.key]
        full = next(iter(times_of.values()))
        ram = times_of.get((method.name, method.selector, method.ratio, "ram"))
        reuse = times_of.get((_REUSE, *method.key[1:])) if method.name == _GAPLESS else None
        ready = times_of[_READY, None, None, None] if method.tier and not method.ratio else None
        reports = [report for _, report in runs[method] if report is not None]
        if reports:
            charged = median(report.charged_ratio for report in reports)
            context, prompt, head = reports[0].context_tokens, reports[0].prompt_tokens, reports[0].head_tokens
        else:
            rest = self.setting.chunks - 1
            charged = {_FULL: 1.0, _PREFIX_CACHE: rest / self.setting.chunks, _READY: 0.0}[method.name]
            context, prompt, head = self._context_tokens, len(self.token_ids), int(method.name != _FULL)
        computed = charged * context + prompt - context - head
        return TTFTRow(
            method=method.name,
            selector=method.selector,
            recompute_ratio=method.ratio,
            charged_ratio=charged,
            ttft_s=median(times),
            ttft_min_s=min(times),
            ttft_max_s=max(times),
            speedup=median(full) / median(times),
            limit=len(self.token_ids) / computed,
            tier=method.tier,
            over_ram=None if ram is None else median_ratio(times, ram),
            of_reuse=None if reuse is None else median_ratio(reuse, times),
            of_ready=None if ready is None else median_ratio(times, ready),
            load_s=median(report.load_s for report in reports) if reports else None,
            recompute_s=median(report.recompute_s for report in reports) if reports else None,
            load_bytes=round(median(report.load_bytes for report in reports)) if reports else None,
        )

    @property
    def _context_tokens(self) -> int:
        return self.setting.chunks * self.setting.chunk_tokens

    def title(self, rows: Sequence[TTFTRow]) -> str:
        asked = self.setting
        return (
            f"{asked.label}: {asked.chunks} chunks of {asked.chunk_tokens} tokens and a question "
            f"of {asked.question_tokens}, median of {asked.repeats}"
        )

    def cells(self, row: TTFTRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "selector": row.selector,
            "ratio": row.recompute_ratio,
            "tier": row.tier,
            "charged": f"{row.charged_ratio:.3f}",
            "first token": say_seconds(row.ttft_s),
            "range": say_range(row.ttft_min_s, row.ttft_max_s),
            "speedup": f"{row.speedup:.2f}x",
            "limit": f"{row.limit:.1f}x",
            "of limit": f"{row.speedup / row.limit:.2f}",
            "of ram": None if row.over_ram is None else f"{row.over_ram:.2f}x",
            "of reuse": None if row.of_reuse is None else f"{row.of_reuse:.2f}",
            "of ready": None if row.of_ready is None else f"{row.of_ready:.2f}x",
            "waited": None if row.load_s is None else say_seconds(row.load_s),
        }

    def shared(self) -> dict[str, Any]:
        return super().shared() | {"prompt_tokens": len(self.token_ids)}

    def facts(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.token_ids),
            "context_tokens": self._context_tokens,
            "cached_share_after_drop": self.cached_share_after_drop(),
        }
