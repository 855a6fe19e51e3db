"""Time per output token and KV held, with and without eviction after prefill, in alternation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

from cacheblend_attachments import SnapKV
from cacheblend_lab.bench.runner import RoundsBench, median_ratio, say_range
from cacheblend_lab.bench.settings import TPOTSetting
from cacheblend_lab.bench.shapes import RandomWords, make_model
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.cli.output import say_bytes, say_seconds
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.report import BlendReport

__all__ = ["TPOTBench", "TPOTRow"]


@dataclass(frozen=True, slots=True)
class TPOTRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "full": the whole prompt is computed. "blend": chunks come from stored KV, some of their tokens are recomputed.
    kv_capacity : int, float or None
        How much of the context is kept; None for all of it.
    evicted_tokens : int
        Context tokens that each head dropped.
    kv_bytes : int
        KV of the prompt in the cache while decoding.
    kv_bytes_before : int
        What it is without eviction.
    tpot_s, tpot_min_s, tpot_max_s : float
        Median and extremes over the rounds of the time per output token after the first.
    tpot_speedup : float
        The same method's `tpot_s` without eviction over this one, in the same round; the median of the rounds.
    ttft_s : float
        Median time to the first output id, the eviction included.
    ttft_added : float
        What eviction adds to `ttft_s`, as a share of it, in the same round; the median of the rounds.
    output_tokens : int
        Tokens generated.
    """

    method: str
    kv_capacity: int | float | None
    evicted_tokens: int
    kv_bytes: int
    kv_bytes_before: int
    tpot_s: float
    tpot_min_s: float
    tpot_max_s: float
    tpot_speedup: float
    ttft_s: float
    ttft_added: float
    output_tokens: int


_Method = tuple[str, "int | float | None"]


class TPOTBench(RoundsBench[TPOTSetting, _Method, BlendReport, TPOTRow]):
    """A model of random weights with its chunks' KV stored."""

    text_columns = 2

    def __init__(self, setting: TPOTSetting) -> None:
        super().__init__(setting)
        settings = setting.engine_settings(selector=setting.selector, recompute_ratio=setting.ratio)
        self._blends = {name: settings["blend"].replace(enabled=name == "blend") for name in setting.methods}
        for capacity in setting.capacities:
            SnapKV(capacity)  # one without meaning is found before the model is made
        model, tokenizer = make_model(setting)
        self.engine = self.closing.enter_context(BlendEngine(model, tokenizer, **settings))
        words = RandomWords(tokenizer, setting.seed)
        chunks = words.chunks(setting.chunks, setting.chunk_tokens)
        self.prompt = BlendPrompt(
            chunks=[str(chunk.id) for chunk in chunks], suffix=words.text(setting.question_tokens)
        )
        self.engine.add(chunks)
        self.token_ids = self.engine.prompt_ids(self.prompt)

    def methods(self) -> list[_Method]:
        """Return full prefill and blend, each without eviction before with."""
        return [
            (method, capacity)
            for method in self._blends
            for capacity in (None, *dict.fromkeys(self.setting.capacities))
        ]

    def run(self, method: _Method) -> BlendReport:
        """Generate an answer."""
        with nullcontext() if method[1] is None else closing(self.engine.attach(SnapKV(method[1]))):
            return self.engine.generate(
                self.prompt, self.setting.output_tokens, blend=self._blends[method[0]], do_sample=False
            ).report

    def row(self, method: _Method, runs: Mapping[_Method, Sequence[BlendReport]]) -> TPOTRow:
        """Return a method's figures beside those of the same method without eviction."""
        reports, whole = runs[method], runs[method[0], None]
        times = [_tpot(report) for report in reports]
        ttft_s = [report.ttft_s for report in reports]
        last = reports[-1]
        return TPOTRow(
            method=method[0],
            kv_capacity=method[1],
            evicted_tokens=last.evicted_tokens,
            kv_bytes=last.kv_bytes,
            kv_bytes_before=last.kv_bytes_before,
            tpot_s=median(times),
            tpot_min_s=min(times),
            tpot_max_s=max(times),
            tpot_speedup=median_ratio([_tpot(report) for report in whole], times),
            ttft_s=median(ttft_s),
            ttft_added=median_ratio(ttft_s, [report.ttft_s for report in whole]) - 1,
            output_tokens=last.output_tokens,
        )

    def title(self, rows: Sequence[TPOTRow]) -> str:
        asked = self.setting
        return (
            f"{asked.label}: {asked.chunks} chunks of {asked.chunk_tokens} tokens, a question of "
            f"{asked.question_tokens}, {asked.output_tokens} output tokens, median of {asked.repeats}"
        )

    def cells(self, row: TPOTRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "kept": "all" if row.kv_capacity is None else row.kv_capacity,
            "evicted": row.evicted_tokens,
            "KV": say_bytes(row.kv_bytes),
            "per token": say_seconds(row.tpot_s),
            "range": say_range(row.tpot_min_s, row.tpot_max_s),
            "faster": f"{row.tpot_speedup:.2f}x",
            "first token": say_seconds(row.ttft_s),
            "added": f"{row.ttft_added:+.1%}",
        }

    def shared(self) -> dict[str, Any]:
        return super().shared() | self.facts()

    def facts(self) -> dict[str, Any]:
        return {"prompt_tokens": len(self.token_ids)}


def _tpot(report: BlendReport) -> float:
    assert report.tpot_s is not None
    return report.tpot_s
