"""Whether ``recompute_ratio="auto"`` finds the measured optimum: a grid of tiers and prompts, every setting in alternation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.controller import Profile
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.bench.coldfiles import drop_cached, stored_files, temporary_folder
from cacheblend_rag.lab.bench.rounds import in_rounds
from cacheblend_rag.lab.bench.setting import NO_LIMIT, ModelSetting, check_least
from cacheblend_rag.lab.bench.shapes import make_model
from cacheblend_rag.lab.bench.slow import SlowStore, device_rate
from cacheblend_rag.lab.bench.times import wait_for_device
from cacheblend_rag.lab.bench.words import RandomWords
from cacheblend_rag.lab.settings import engine_settings
from cacheblend_rag.report import BlendReport
from cacheblend_rag.store import KVStore, open_store

__all__ = ["AutoBench", "AutoRow", "AutoRun", "AutoSetting"]


@dataclass(frozen=True, slots=True)
class AutoSetting(ModelSetting):
    """What is measured; what it shares with other benches is described at `ModelSetting`.

    Attributes
    ----------
    tiers : tuple of str
        "ram", "disk" (the page cache dropped before each run), or a rate in MB/s, as in "200MB/s": a slower device, emulated.
    prompts : tuple of (int, int)
        The prompts: so many chunks of so many tokens.
    question_tokens : int
        Tokens of the question behind them.
    ratios : tuple of float
        Fixed ratios measured, those under `quality_ratio` left out.
    quality_ratio : float
        The quality floor r*.
    profile_s : float
        About how long a tier's profile may be measured.
    """

    tiers: tuple[str, ...] = ("ram", "disk", "200MB/s")
    prompts: tuple[tuple[int, int], ...] = ((1, 32), (2, 128), (6, 256), (6, 512))
    question_tokens: int = 32
    ratios: tuple[float, ...] = (0.15, 0.3, 0.5, 0.8)
    quality_ratio: float = 0.15
    repeats: int = field(default=3, kw_only=True)
    profile_s: float = 20.0

    def __post_init__(self) -> None:
        ModelSetting.__post_init__(self)
        check_least(self, 1, "question_tokens")
        if not self.tiers or not self.prompts:
            raise ConfigError("give at least one tier and one prompt to measure")
        for tier in self.tiers:
            device_rate(tier)
        for chunks, tokens in self.prompts:
            if chunks < 1 or tokens < 1:
                raise ConfigError(f"a prompt of {chunks} chunks of {tokens} tokens has none; give at least 1 of each")


@dataclass(frozen=True, slots=True)
class AutoRun:
    """One setting's medians in one cell of the grid; ratio 1 is full prefill, `method` is "full", "blend" or "auto"."""

    tier: str
    chunks: int
    chunk_tokens: int
    method: str
    recompute_ratio: float
    ttft_s: float
    load_s: float


@dataclass(frozen=True, slots=True)
class AutoRow:
    """One cell of the grid.

    Attributes
    ----------
    tier : str
        Where the KV is.
    chunks, chunk_tokens : int
        The prompt.
    best_method : str
        The setting of the least median TTFT among full prefill and the fixed ratios at or above the quality floor.
    best_ttft_s, auto_ttft_s : float
        Its median, and that of "auto".
    auto_choice : str
        What "auto" chose in the last round.
    regret : float
        How much longer "auto" took than the best, as a share of it; negative where it was faster.
    choice_regret : float
        How much longer what "auto" chose took when it was asked for as a fixed setting, between two fixed ratios in proportion:
        0 if it chose the best one. The difference to `regret` is the price of choosing, and the noise of the machine.
    """

    tier: str
    chunks: int
    chunk_tokens: int
    best_method: str
    best_ttft_s: float
    auto_ttft_s: float
    auto_choice: str
    regret: float
    choice_regret: float


class AutoBench:
    """One model of random weights over each of the tiers in turn.

    Parameters
    ----------
    setting : AutoSetting
        What is measured.

    Attributes
    ----------
    runs : list of AutoRun
        Every setting of every cell, once `measure` has returned.
    profiles : dict of str to Profile
        What was measured of each tier.
    """

    def __init__(self, setting: AutoSetting) -> None:
        self.setting = setting
        self.runs: list[AutoRun] = []
        self.profiles: dict[str, Profile] = {}
        self._settings = setting.engine_settings(recompute_ratio="auto", quality_ratio=setting.quality_ratio)
        self._model, self._tokenizer = make_model(setting)

    def measure(self, progress: Callable[[str], None] | None = None) -> list[AutoRow]:
        """Measure every cell.

        Parameters
        ----------
        progress : callable, optional
            Called with what is measured now.

        Returns
        -------
        list of AutoRow
            One for each tier and prompt.
        """
        say = progress or (lambda _: None)
        rows = []
        with temporary_folder(None) as folder:
            for number, tier in enumerate(self.setting.tiers):
                place = Path(folder) / str(number)
                with self._engine(tier, place) as engine:
                    say(f"{tier}: profile")
                    self.profiles[tier] = engine.profile(budget_s=self.setting.profile_s)
                    for chunks, tokens in self.setting.prompts:
                        say(f"{tier}: {chunks} chunks of {tokens} tokens")
                        rows.append(self._cell(engine, tier, place, chunks, tokens))
        return rows

    @contextmanager
    def _engine(self, tier: str, place: Path) -> Iterator[BlendEngine]:
        settings = engine_settings(self._settings, profile_path=place.with_suffix(".profile"))
        rate = device_rate(tier)
        store: KVStore
        if rate is not None:
            store = SlowStore(tier, rate, NO_LIMIT)
        else:
            store = open_store(place if tier == "disk" else None, ram_bytes=0 if tier == "disk" else NO_LIMIT)
        with ExitStack() as stack:
            stack.callback(store.close)
            yield stack.enter_context(BlendEngine(self._model, self._tokenizer, store=store, **settings))

    def _cell(self, engine: BlendEngine, tier: str, place: Path, chunks: int, tokens: int) -> AutoRow:
        words = RandomWords(self._tokenizer, self.setting.seed + 1000 * chunks + tokens)
        added = words.chunks(chunks, tokens)
        engine.add(added)
        # One token before the chunks, so that the first of them is not exact as it is stored: all are candidates.
        prompt = BlendPrompt(
            words.text(1), [str(chunk.id) for chunk in added], words.text(self.setting.question_tokens)
        )
        base = engine.blend
        methods = {("full", 1.0): base.replace(enabled=False)}
        for ratio in self.setting.ratios:
            if self.setting.quality_ratio <= ratio < 1:
                methods["blend", ratio] = base.replace(recompute_ratio=ratio)
        methods["auto", 0.0] = base

        def run(method: tuple[str, float]) -> BlendReport:
            if tier == "disk":
                drop_cached(stored_files(place))
            wait_for_device(self.setting.device)
            # The logits are on the CPU when it returns, so that its time includes the device's work.
            return engine.prefill(prompt, blend=methods[method]).report

        runs = in_rounds(list(methods), run, self.setting.repeats)
        engine.delete([str(chunk.id) for chunk in added])
        here = []
        for (name, ratio), reports in runs.items():
            ttft_s = median(report.ttft_s for report in reports)
            load_s = median(report.load_s for report in reports)
            shown = reports[-1].recompute_ratio if name == "auto" else ratio
            here.append(AutoRun(tier, chunks, tokens, name, shown, ttft_s, load_s))
        self.runs += here
        *fixed, auto = here
        best = min(fixed, key=lambda run: run.ttft_s)
        return AutoRow(
            tier=tier,
            chunks=chunks,
            chunk_tokens=tokens,
            best_method=_called(best),
            best_ttft_s=best.ttft_s,
            auto_ttft_s=auto.ttft_s,
            auto_choice=_called(auto),
            regret=auto.ttft_s / best.ttft_s - 1,
            choice_regret=_fixed_s(fixed, auto.recompute_ratio) / best.ttft_s - 1,
        )


def _fixed_s(fixed: Sequence[AutoRun], ratio: float) -> float:
    """Return the seconds measured of a ratio, between two that were measured in proportion; 1 is full prefill alone."""
    if ratio == 1:
        return next(run.ttft_s for run in fixed if run.method == "full")
    blends = sorted((run.recompute_ratio, run.ttft_s) for run in fixed if run.method == "blend")
    if not blends:
        return min(run.ttft_s for run in fixed)
    return float(np.interp(ratio, [each for each, _ in blends], [seconds for _, seconds in blends]))


def _called(run: AutoRun) -> str:
    return "full" if run.recompute_ratio == 1 else f"blend {run.recompute_ratio:g}"
