"""Time to first token behind a reranker, with and without the candidates' KV prefetched while it works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.bench.coldfiles import ColdFolder
from cacheblend_rag.lab.bench.rounds import in_rounds
from cacheblend_rag.lab.bench.setting import ModelSetting, check_least
from cacheblend_rag.lab.bench.shapes import make_model
from cacheblend_rag.lab.bench.times import median_ratio
from cacheblend_rag.lab.bench.words import RandomWords
from cacheblend_rag.report import BlendReport

__all__ = ["PrefetchBench", "PrefetchRow", "PrefetchSetting"]

_METHODS = ("disk", "prefetch", "ram")


@dataclass(frozen=True, slots=True)
class PrefetchSetting(ModelSetting):
    """What is measured; what it shares with other benches is described at `ModelSetting`.

    Each run begins with nothing in the page cache. The reranker's choice follows from the seed, too.

    Attributes
    ----------
    candidates, chunks, chunk_tokens, question_tokens : int
        So many chunks of so many tokens are retrieved, and the reranker chooses some of them, which make the prompt with a
        question of so many tokens.
    reranker_s : float
        Seconds that the reranker takes. It waits, as for an accelerator or another machine; one that computes on this machine's
        cores leaves less of them to reading.
    ratio : float
        The recompute ratio.
    selector : str
        Who chooses what is recomputed.
    folder : Path or None
        Where files are written for the time of the measurement; the system's folder for temporary files by default.
    """

    candidates: int = 12
    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    reranker_s: float = 0.2
    ratio: float = 0.15
    selector: str = "hkvd"
    folder: Path | None = None

    def __post_init__(self) -> None:
        ModelSetting.__post_init__(self)
        check_least(self, 1, "candidates", "chunks", "chunk_tokens", "question_tokens")
        if self.chunks > self.candidates:
            raise ConfigError(f"chunks={self.chunks} cannot be chosen from candidates={self.candidates}")
        if not 0 <= self.reranker_s <= 60:
            raise ConfigError(f"reranker_s={self.reranker_s} must be seconds, from 0 to 60")


@dataclass(frozen=True, slots=True)
class PrefetchRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "disk": the chosen chunks are read when the prompt comes. "prefetch": all candidates are read once they are retrieved.
        "ram": the chosen chunks were in RAM before.
    ttft_s, ttft_min_s, ttft_max_s : float
        Median and extremes over the rounds, from the reranker's answer to the first output id.
    total_s : float
        Median from the retrieval on, with the reranker.
    of_disk : float
        `ttft_s` over that of "disk" in the same round, the median of the rounds.
    load_s : float
        Median of the time in which nothing was computed because KV was not there yet.
    tiers : dict
        How many chunks were read from where, over all rounds.
    """

    method: str
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    total_s: float
    of_disk: float
    load_s: float
    tiers: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Run:
    ttft_s: float
    total_s: float
    report: BlendReport


class PrefetchBench:
    """A model of random weights and the files of its chunks' KV; a context manager that removes them.

    Parameters
    ----------
    setting : PrefetchSetting
        What is measured.

    Raises
    ------
    ConfigError
        If the shape or the selector is unknown, or the prompt does not fit the model's window.
    """

    def __init__(self, setting: PrefetchSetting) -> None:
        self.setting = setting
        self._settings = setting.engine_settings(selector=setting.selector, recompute_ratio=setting.ratio)
        self._model, self._tokenizer = make_model(setting)
        words = RandomWords(self._tokenizer, setting.seed)
        self._disk = ColdFolder(setting.folder)
        chosen = words.choice(setting.candidates, setting.chunks)
        question = words.text(setting.question_tokens)
        candidates = words.chunks(setting.candidates, setting.chunk_tokens)
        self._names = [str(chunk.id) for chunk in candidates]
        self._prompt = BlendPrompt(chunks=[self._names[number] for number in chosen], suffix=question)
        with self._engine() as engine:
            engine.add(candidates)
        self.file_bytes = self._disk.file_bytes

    def cached_share_after_drop(self) -> float | None:
        """Empty the page cache of the files and return what share of them is in it even so; None where that cannot be told."""
        return self._disk.cached_share_after_drop()

    def __enter__(self) -> PrefetchBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._disk.remove()

    def measure(self, progress: Callable[[int, int], None] | None = None) -> list[PrefetchRow]:
        """Run every method once unmeasured, then `repeats` rounds, each beginning with another method.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of finished runs and of all.

        Returns
        -------
        list of PrefetchRow
            "disk", "prefetch" and "ram".
        """
        runs = in_rounds(_METHODS, self._run, self.setting.repeats, progress=progress)
        return [self._row(method, runs[method], runs["disk"]) for method in _METHODS]

    def _engine(self) -> BlendEngine:
        return BlendEngine(self._model, self._tokenizer, store=self._disk.path, **self._settings)

    def _run(self, method: str) -> _Run:
        # A new one each time, that has nothing in RAM.
        with self._engine() as engine:
            if method == "ram":
                engine.prefetch(self._names).wait()
            self._disk.drop_cached()
            retrieved = time.perf_counter()
            if method == "prefetch":
                engine.prefetch(self._names)
            time.sleep(self.setting.reranker_s)
            reranked = time.perf_counter()
            result = engine.prefill(self._prompt)
            # Reading the first output id waits for the device.
            int(result.logits.argmax())
            ended = time.perf_counter()
        return _Run(ended - reranked, ended - retrieved, result.report)

    def _row(self, method: str, runs: Sequence[_Run], from_disk: Sequence[_Run]) -> PrefetchRow:
        times = [run.ttft_s for run in runs]
        tiers: dict[str, int] = {}
        for run in runs:
            for chunk in run.report.chunks:
                tiers[str(chunk.tier)] = tiers.get(str(chunk.tier), 0) + 1
        return PrefetchRow(
            method=method,
            ttft_s=median(times),
            ttft_min_s=min(times),
            ttft_max_s=max(times),
            total_s=median(run.total_s for run in runs),
            of_disk=median_ratio(times, [run.ttft_s for run in from_disk]),
            load_s=median(run.report.load_s for run in runs),
            tiers=tiers,
        )
