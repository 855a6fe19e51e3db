"""Time to first token after a reranker, with and without the candidates' KV prefetched while it works."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from cacheblend_lab.bench.runner import RoundsBench, median_ratio, say_range
from cacheblend_lab.bench.settings import PrefetchSetting
from cacheblend_lab.bench.shapes import RandomWords, make_model
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.report import BlendReport

__all__ = ["PrefetchBench", "PrefetchRow"]


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


class _Run(NamedTuple):
    ttft_s: float
    total_s: float
    report: BlendReport


class PrefetchBench(RoundsBench[PrefetchSetting, str, _Run, PrefetchRow]):
    """A model of random weights and the files of its chunks' KV."""

    def __init__(self, setting: PrefetchSetting) -> None:
        super().__init__(setting)
        self._settings = setting.engine_settings(selector=setting.selector, recompute_ratio=setting.ratio)
        self._model, self._tokenizer = make_model(setting)
        words = RandomWords(self._tokenizer, setting.seed)
        self._cold = self.use_disk(setting.folder)
        chosen = words.choice(setting.candidates, setting.chunks)
        question = words.text(setting.question_tokens)
        candidates = words.chunks(setting.candidates, setting.chunk_tokens)
        self._names = [str(chunk.id) for chunk in candidates]
        self._prompt = BlendPrompt(chunks=[self._names[number] for number in chosen], suffix=question)
        with self._engine() as engine:
            engine.add(candidates)
        self.file_bytes = self._cold.file_bytes

    def _engine(self) -> BlendEngine:
        return BlendEngine(self._model, self._tokenizer, store=self._cold.path, **self._settings)

    def methods(self) -> list[str]:
        return ["disk", "prefetch", "ram"]

    def run(self, method: str) -> _Run:
        # A new one each time, that has nothing in RAM.
        with self._engine() as engine:
            if method == "ram":
                engine.prefetch(self._names).wait()
            self._cold.drop_cached()
            retrieved = time.perf_counter()
            if method == "prefetch":
                engine.prefetch(self._names)
            # The reranker waits, as for an accelerator; one that computes on these cores leaves less of them to reading.
            time.sleep(self.setting.reranker_s)
            reranked = time.perf_counter()
            result = engine.prefill(self._prompt)
            # Reading the first output id waits for the device.
            int(result.logits.argmax())
            ended = time.perf_counter()
        return _Run(ended - reranked, ended - retrieved, result.report)

    def row(self, method: str, runs: Mapping[str, Sequence[_Run]]) -> PrefetchRow:
        times = [run.ttft_s for run in runs[method]]
        return PrefetchRow(
            method=method,
            ttft_s=median(times),
            ttft_min_s=min(times),
            ttft_max_s=max(times),
            total_s=median(run.total_s for run in runs[method]),
            of_disk=median_ratio(times, [run.ttft_s for run in runs["disk"]]),
            load_s=median(run.report.load_s for run in runs[method]),
            tiers=dict(Counter(str(chunk.tier) for run in runs[method] for chunk in run.report.chunks)),
        )

    def title(self, rows: Sequence[PrefetchRow]) -> str:
        asked = self.setting
        return (
            f"{asked.label}: {asked.chunks} of {asked.candidates} chunks of {asked.chunk_tokens} "
            f"tokens ({say_bytes(self.file_bytes)} in all), a reranker of {say_seconds(asked.reranker_s)}, "
            f"median of {asked.repeats}"
        )

    def cells(self, row: PrefetchRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "first token": say_seconds(row.ttft_s),
            "range": say_range(row.ttft_min_s, row.ttft_max_s),
            "of disk": f"{row.of_disk:.2f}x",
            "waited": say_seconds(row.load_s),
            "with reranker": say_seconds(row.total_s),
            "read from": ", ".join(f"{count} {tier}" for tier, count in sorted(row.tiers.items())),
        }

    def facts(self) -> dict[str, Any]:
        return {"file_bytes": self.file_bytes, "cached_share_after_drop": self.cached_share_after_drop()}
