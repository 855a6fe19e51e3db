"""Time to first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from cacheblend_rag.chunk import BlendPrompt, Chunk, FixedText
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.lab.bench.coldfiles import ColdFolder
from cacheblend_rag.lab.bench.rounds import in_rounds
from cacheblend_rag.lab.bench.setting import NO_LIMIT, ModelSetting, check_least
from cacheblend_rag.lab.bench.shapes import make_model
from cacheblend_rag.lab.bench.slow import SlowStore, device_rate
from cacheblend_rag.lab.bench.times import median_ratio, wait_for_device
from cacheblend_rag.lab.bench.words import RandomWords
from cacheblend_rag.lab.eval.prefix import PrefixCache
from cacheblend_rag.lab.settings import engine_settings, settings_of
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import make_selector

__all__ = ["TTFTBench", "TTFTRow", "TTFTSetting"]

_FULL = "full"
_PREFIX_CACHE = "prefix_cache"
_REUSE = "reuse"
_IN_DOCUMENT = "in_document"
_GAPLESS = "gapless"
_NO_PIPELINE = "-no-pipeline"


@dataclass(frozen=True, slots=True)
class TTFTSetting(ModelSetting):
    """What is measured; what it shares with other benches is described at `ModelSetting`.

    Attributes
    ----------
    chunks, chunk_tokens, question_tokens : int
        The prompt: so many chunks of so many tokens behind the BOS, then the question.
    ratios : tuple of float
        Recompute ratios; 0 is plain reuse.
    selectors : tuple of str
        Selectors measured at each ratio above 0.
    tiers : tuple of str
        Where stored KV is read from: "ram", "disk" (with nothing in the page cache), or a rate such as "100MB/s" (a slower
        device, emulated), each with "-no-pipeline" behind it or without.
    head_tokens, separator_tokens : int
        Where one is above 0, plain reuse is measured without gaps, too: behind fixed text of so many tokens, with the engine's
        separator of so many tokens between the chunks.
    folder : Path or None
        Where the disk tier's files are for the time of the measurement; the system's folder for temporary files by default.
    """

    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    ratios: tuple[float, ...] = (0.0, 0.05, 0.15, 0.3)
    selectors: tuple[str, ...] = ("hkvd",)
    tiers: tuple[str, ...] = ("ram",)
    folder: Path | None = None
    head_tokens: int = 0
    separator_tokens: int = 0

    def __post_init__(self) -> None:
        ModelSetting.__post_init__(self)
        check_least(self, 1, "chunks", "chunk_tokens", "question_tokens")
        check_least(self, 0, "head_tokens", "separator_tokens")
        for tier in self.tiers or ("",):
            device_rate(tier.removesuffix(_NO_PIPELINE))


@dataclass(frozen=True, slots=True)
class TTFTRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "full": the model's own forward over the whole prompt. "prefix_cache": its own cache of the first chunk, copied, and its
        forward over the rest. "reuse": stored KV of every chunk, encoded alone, nothing recomputed. "in_document": the same of
        chunks that are the pieces of one document. "gapless": the same behind a fixed head, with separators. "blend": some tokens
        recomputed, of chunks encoded alone.
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
    pipeline : bool or None
        Whether it was read ahead of the computation.
    over_ram : float or None
        `ttft_s` over that of the same method from RAM, with the pipeline on, in the same round; the median of the rounds. None
        where that was not measured.
    of_reuse : float or None
        The speed of "reuse" that is left: its `ttft_s` from the same tier over that of "in_document" or "gapless", in the same
        round; the median of the rounds.
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
    pipeline: bool | None
    over_ram: float | None
    of_reuse: float | None
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
    pipeline: bool | None = None

    @property
    def from_ram(self) -> tuple[str, str | None, float | None, str, bool]:
        """What it is compared with."""
        return self.name, self.selector, self.ratio, "ram", True

    @property
    def reuse(self) -> tuple[str, str | None, float | None, str | None, bool | None] | None:
        """The plain reuse that it is compared with."""
        known = self.name in (_IN_DOCUMENT, _GAPLESS)
        return (_REUSE, self.selector, self.ratio, self.tier, self.pipeline) if known else None


class TTFTBench:
    """A model of random weights with its chunks' KV stored, and everything that is measured on it; a context manager that
    removes the files of the disk tier.

    Parameters
    ----------
    setting : TTFTSetting
        What is measured.

    Raises
    ------
    ConfigError
        If the shape is unknown, or the prompt does not fit its window.
    """

    def __init__(self, setting: TTFTSetting) -> None:
        self.setting = setting
        for name in setting.selectors:
            make_selector(name)
        settings = setting.engine_settings()
        model, tokenizer = make_model(setting)
        self._disk = ColdFolder(setting.folder) if any(tier.startswith("disk") for tier in setting.tiers) else None
        location = None if self._disk is None else self._disk.path
        self.engine = BlendEngine(model, tokenizer, store=location, **settings)
        # The same files, of which nothing is ever kept in RAM, and the same KV from devices that are emulated.
        self._engines = {"ram": self.engine}
        if location is not None:
            self._engines["disk"] = BlendEngine(
                model, tokenizer, store=location, **engine_settings(settings, ram_bytes=0)
            )
        for tier in dict.fromkeys(each.removesuffix(_NO_PIPELINE) for each in setting.tiers):
            rate = device_rate(tier)
            if rate is not None:
                slow = SlowStore(tier, rate, NO_LIMIT)
                self._engines[tier] = BlendEngine(model, tokenizer, store=slow, **settings)
        # Over the same stores, engines that load each layer when it is asked for.
        for label in dict.fromkeys(each for each in setting.tiers if each.endswith(_NO_PIPELINE)):
            other = self._engines[label.removesuffix(_NO_PIPELINE)]
            own = engine_settings(settings_of(other), pipeline=False)
            self._engines[label] = BlendEngine(model, tokenizer, store=other.store, **own)
        words = RandomWords(tokenizer, setting.seed)
        chunks = words.chunks(setting.chunks, setting.chunk_tokens)
        question = words.text(setting.question_tokens)
        self.prompt = BlendPrompt(chunks=[str(chunk.id) for chunk in chunks], suffix=question)
        pieces = [Chunk(chunk.text, f"piece {number}", document="document") for number, chunk in enumerate(chunks)]
        self._prompts = {
            _REUSE: self.prompt,
            _IN_DOCUMENT: BlendPrompt(chunks=[str(piece.id) for piece in pieces], suffix=question),
        }
        for tier, engine in self._engines.items():
            # The disk tier's files are there already; in memory each engine has KV of its own.
            if not tier.startswith("disk"):
                engine.add(chunks)
                if 0 in setting.ratios:
                    engine.add(pieces)
        self._gapless: dict[str, BlendEngine] = {}
        if 0 in setting.ratios and (setting.head_tokens or setting.separator_tokens):
            self._make_gapless(words, chunks, question)
        self.token_ids = self.engine.prompt_ids(self.prompt)
        self._ids = torch.tensor([self.token_ids], device=setting.device)
        # The BOS and the first chunk.
        self._cached_tokens = 1 + setting.chunk_tokens
        self._cached = PrefixCache(model, self.token_ids[: self._cached_tokens])

    def _make_gapless(self, words: RandomWords, chunks: Sequence[Chunk], question: str) -> None:
        """Make engines of another separator over the same stores, with the chunks' KV behind which is the separator's."""
        separator, head = words.text(self.setting.separator_tokens), words.text(self.setting.head_tokens)
        pieces = [Chunk(chunk.text, f"spaced {number}", document="spaced") for number, chunk in enumerate(chunks)]
        prompt = BlendPrompt(FixedText(head), [str(piece.id) for piece in pieces], question, separator)
        self._prompts[_GAPLESS] = prompt
        for tier, engine in self._engines.items():
            settings = engine_settings(settings_of(engine), separator=separator)
            gapless = BlendEngine(engine.model, engine.tokenizer, store=engine.store, **settings)
            self._gapless[tier] = gapless
            if not tier.startswith("disk"):
                gapless.add(pieces)
            # The head is computed and stored by the first prompt that begins with it.
            gapless.prefill(prompt, blend=gapless.blend.replace(selector="none", recompute_ratio=0.0))
            gapless.flush()

    def __enter__(self) -> TTFTBench:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in [*self._gapless.values(), *self._engines.values()]:
            engine.close()
        for engine in self._engines.values():
            engine.store.close()
        if self._disk is not None:
            self._disk.remove()

    def cached_share_after_drop(self) -> float | None:
        """Return which share of the disk tier's files is in memory once they were dropped; None without such files."""
        return None if self._disk is None else self._disk.cached_share_after_drop()

    @property
    def context_tokens(self) -> int:
        """How many tokens the chunks have."""
        return self.setting.chunks * self.setting.chunk_tokens

    def measure(self, progress: Callable[[int, int], None] | None = None) -> list[TTFTRow]:
        """Run every method once unmeasured, then `repeats` rounds, each beginning with another method.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of finished runs and of all.

        Returns
        -------
        list of TTFTRow
            One for each method, full prefill first.
        """
        methods = self._methods()
        runs = in_rounds(methods, self._timed, self.setting.repeats, progress=progress)
        times = {method: [seconds for seconds, _ in runs[method]] for method in methods}
        known = {(m.name, m.selector, m.ratio, m.tier, m.pipeline): times[m] for m in methods}
        return [
            self._row(
                method,
                runs[method],
                times[methods[0]],
                known.get(method.from_ram),
                None if method.reuse is None else known.get(method.reuse),
            )
            for method in methods
        ]

    def _methods(self) -> list[_Method]:
        methods = [_Method(_FULL, None, None, self._full), _Method(_PREFIX_CACHE, None, None, self._prefix_cache)]
        for ratio in dict.fromkeys(self.setting.ratios):
            for selector in dict.fromkeys(self.setting.selectors) if ratio else ("none",):
                for label in dict.fromkeys(self.setting.tiers):
                    tier, pipeline = label.removesuffix(_NO_PIPELINE), not label.endswith(_NO_PIPELINE)
                    for name in ("blend",) if ratio else tuple(self._prompts):
                        run = partial(self._blend, tier, selector, ratio, pipeline, name)
                        methods.append(_Method(name, selector, ratio, run, tier, pipeline))
        return methods

    def _timed(self, method: _Method) -> tuple[float, BlendReport | None]:
        if method.tier == "disk" and self._disk is not None:
            self._disk.drop_cached()
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

    def _blend(self, tier: str, selector: str, ratio: float, pipeline: bool, name: str = _REUSE) -> BlendReport:
        label = tier if pipeline else f"{tier}{_NO_PIPELINE}"
        engine = (self._gapless if name == _GAPLESS else self._engines)[label]
        blend = engine.blend.replace(selector=selector, recompute_ratio=ratio)
        result = engine.prefill(self._prompts.get(name, self.prompt), blend=blend)
        int(result.logits.argmax())
        return result.report

    def _row(
        self,
        method: _Method,
        runs: Sequence[tuple[float, BlendReport | None]],
        full_times: Sequence[float],
        ram_times: Sequence[float] | None,
        reuse_times: Sequence[float] | None,
    ) -> TTFTRow:
        times = [seconds for seconds, _ in runs]
        reports = [report for _, report in runs if report is not None]
        if reports:
            charged = median(report.charged_ratio for report in reports)
        else:
            charged = 1.0 if method.name == _FULL else (self.setting.chunks - 1) / self.setting.chunks
        context, prompt, head = self.context_tokens, len(self.token_ids), int(method.name == _PREFIX_CACHE)
        if reports:
            context, prompt, head = reports[0].context_tokens, reports[0].prompt_tokens, reports[0].head_tokens
        computed = charged * context + prompt - context - head
        return TTFTRow(
            method=method.name,
            selector=method.selector,
            recompute_ratio=method.ratio,
            charged_ratio=charged,
            ttft_s=median(times),
            ttft_min_s=min(times),
            ttft_max_s=max(times),
            speedup=median(full_times) / median(times),
            limit=len(self.token_ids) / computed,
            tier=method.tier,
            pipeline=method.pipeline,
            over_ram=None if ram_times is None else median_ratio(times, ram_times),
            of_reuse=None if reuse_times is None else median_ratio(reuse_times, times),
            load_s=median(report.load_s for report in reports) if reports else None,
            recompute_s=median(report.recompute_s for report in reports) if reports else None,
            load_bytes=round(median(report.load_bytes for report in reports)) if reports else None,
        )
