"""Test of whether `AutoRatio` finds the measured optimum: a grid of tiers and prompts, every setting in alternation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from cacheblend_attachments import AutoRatio
from cacheblend_attachments.auto import Profile
from cacheblend_lab.bench.runner import Bench, Say, in_rounds, say_nothing, wait_for_device
from cacheblend_lab.bench.settings import NO_LIMIT, AutoSetting, device_rate
from cacheblend_lab.bench.shapes import RandomWords, make_model
from cacheblend_lab.bench.tiers import SlowStore, drop_cached, stored_files, temporary_folder
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.cli.output import say_seconds
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.report import BlendReport
from cacheblend_rag.store import KVStore, open_store

__all__ = ["AutoBench", "AutoRow", "AutoRun"]


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


class AutoBench(Bench[AutoSetting, AutoRow]):
    """One model of random weights over each of the tiers in turn.

    Attributes
    ----------
    runs : list of AutoRun
        Every setting of every cell, once `measure` has returned.
    profiles : dict of str to Profile
        What was measured of each tier.
    """

    text_columns = 3

    def __init__(self, setting: AutoSetting) -> None:
        super().__init__(setting)
        self.runs: list[AutoRun] = []
        self.profiles: dict[str, Profile] = {}
        self._settings = setting.engine_settings()
        self._model, self._tokenizer = make_model(setting)

    def measure(self, say: Say = say_nothing) -> list[AutoRow]:
        rows = []
        with temporary_folder(None) as folder:
            for number, tier in enumerate(self.setting.tiers):
                place = Path(folder) / str(number)
                with self._engine(tier, place) as engine:
                    say(f"measuring {tier}: profile")
                    auto = engine.attach(AutoRatio(self.setting.quality_ratio, path=place.with_suffix(".profile")))
                    self.profiles[tier] = auto.profile(budget_s=self.setting.profile_s)
                    for chunks, tokens in self.setting.prompts:
                        say(f"measuring {tier}: {chunks} chunks of {tokens} tokens")
                        rows.append(self._cell(engine, tier, place, chunks, tokens))
        return rows

    @contextmanager
    def _engine(self, tier: str, place: Path) -> Iterator[BlendEngine]:
        rate = device_rate(tier)
        store: KVStore
        if rate is not None:
            store = SlowStore(tier, rate, NO_LIMIT)
        else:
            store = open_store(place if tier == "disk" else None, ram_bytes=0 if tier == "disk" else NO_LIMIT)
        with closing(store), BlendEngine(self._model, self._tokenizer, store=store, **self._settings) as engine:
            yield engine

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

    def title(self, rows: Sequence[AutoRow]) -> str:
        asked = self.setting
        return f"{asked.label}: auto against the best measured setting, median of {asked.repeats}"

    def cells(self, row: AutoRow) -> dict[str, Any]:
        return {
            "tier": row.tier,
            "best": row.best_method,
            "auto": row.auto_choice,
            "chunks": row.chunks,
            "tokens each": row.chunk_tokens,
            "best first token": say_seconds(row.best_ttft_s),
            "auto's": say_seconds(row.auto_ttft_s),
            "regret": f"{row.regret:+.1%}",
            "of the choice": f"{row.choice_regret:+.1%}",
        }

    def shared(self) -> dict[str, Any]:
        return {}

    def about(self) -> dict[str, Any]:
        runs = [asdict(run) for run in self.runs]
        return super().about() | {
            "runs": runs,
            "profiles": {tier: asdict(each) for tier, each in self.profiles.items()},
        }


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
