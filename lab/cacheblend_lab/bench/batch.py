"""Prompts through LangChain in one batch, and from callers at the same time, against one after the other, in alternation."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from cacheblend_lab.bench.runner import RoundsBench, median_ratio, say_range
from cacheblend_lab.bench.settings import BatchSetting
from cacheblend_lab.bench.shapes import made_up_word
from cacheblend_lab.settings import engine_settings
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.cli.output import say_seconds
from cacheblend_rag.engine import BlendEngine
from langchain_cacheblend import BlendLLM

__all__ = ["BatchBench", "BatchRow"]

_ALONE, _BATCH, _CALLERS = "one by one", "batch", "callers"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "one by one": ``invoke`` for each prompt. "batch": one ``batch`` of all. "callers": ``invoke`` for all at the same time,
        each in a thread of its own.
    elapsed_s, elapsed_min_s, elapsed_max_s : float
        Median and extremes over the rounds of the time until all answers were there.
    prefill_s, decode_s : float
        Its parts: until answers had their first tokens, and all further ones, what was decoded together counted once.
    prompts_per_s, tokens_per_s : float
        Answers, and their tokens, per second of that median.
    speedup : float
        The time one by one over this one, in the same round; the median of the rounds.
    batch_size : int
        Prompts that were decoded together.
    hits : int
        Chunks of all prompts whose KV was stored.
    equal_answers : int
        Answers that are those of one by one.
    """

    method: str
    elapsed_s: float
    elapsed_min_s: float
    elapsed_max_s: float
    prefill_s: float
    decode_s: float
    prompts_per_s: float
    tokens_per_s: float
    speedup: float
    batch_size: int
    hits: int
    equal_answers: int


class _Reports(BaseCallbackHandler):
    """Collects what each answer cost."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        info = response.generations[0][0].generation_info
        assert info is not None
        self.reports.append(info["blend"])


class _Run(NamedTuple):
    elapsed_s: float
    answers: list[str]
    reports: list[dict[str, Any]]

    @property
    def decode_s(self) -> float:
        written = ((each["tpot_s"] or 0.0, each["output_tokens"] - 1, each["batch_size"]) for each in self.reports)
        return float(sum(tpot_s * tokens / together for tpot_s, tokens, together in written))


class BatchBench(RoundsBench[BatchSetting, str, _Run, BatchRow]):
    """A LangChain model over an engine that has the KV of all chunks; every chunk stands in one prompt only."""

    def __init__(self, setting: BatchSetting) -> None:
        super().__init__(setting)
        settings = engine_settings(enabled=True, recompute_ratio=setting.ratio)
        engine = self.closing.enter_context(BlendEngine.from_pretrained(setting.model, **settings))
        self._llm = BlendLLM(
            model=setting.model,
            engine=engine,
            max_tokens=setting.output_tokens,
            temperature=0,
            # No answer ends early, so that both methods write as much.
            generation_kwargs={"eos_token_id": -1},
        )
        self._random = random.Random(setting.seed)
        self.prompts = []
        for number in range(setting.prompts):
            chunks = [Chunk(self._text(setting.chunk_tokens), f"{number}-{place}") for place in range(setting.chunks)]
            engine.add(chunks)
            self.prompts.append(
                "\n\n".join([*(chunk.text for chunk in chunks), self._text(setting.question_tokens) + "?"])
            )
        self._lengths = [len(engine.prompt_ids(self._llm.blend_prompt(prompt))) for prompt in self.prompts]

    def _text(self, tokens: int) -> str:
        """Return random words, about `tokens` tokens of them."""
        words: list[str] = []
        while True:
            words.append(made_up_word(self._random))
            if len(self._llm.get_token_ids(" ".join(words))) >= tokens:
                return " ".join(words)

    def methods(self) -> list[str]:
        return [_ALONE, _BATCH, _CALLERS]

    def run(self, method: str) -> _Run:
        seen = _Reports()
        config: Any = {"callbacks": [seen]}
        began = time.perf_counter()
        if method == _BATCH:
            answers = self._llm.batch(self.prompts, config)
        elif method == _CALLERS:
            with ThreadPoolExecutor(len(self.prompts)) as pool:
                answers = list(pool.map(lambda prompt: self._llm.invoke(prompt, config), self.prompts))
        else:
            answers = [self._llm.invoke(prompt, config) for prompt in self.prompts]
        return _Run(time.perf_counter() - began, answers, seen.reports)

    def row(self, method: str, runs: Mapping[str, Sequence[_Run]]) -> BatchRow:
        times = [run.elapsed_s for run in runs[method]]
        elapsed_s = median(times)
        last = runs[method][-1]
        return BatchRow(
            method=method,
            elapsed_s=elapsed_s,
            elapsed_min_s=min(times),
            elapsed_max_s=max(times),
            prefill_s=median(run.elapsed_s - run.decode_s for run in runs[method]),
            decode_s=median(run.decode_s for run in runs[method]),
            prompts_per_s=len(self.prompts) / elapsed_s,
            tokens_per_s=sum(report["output_tokens"] for report in last.reports) / elapsed_s,
            speedup=median_ratio([run.elapsed_s for run in runs[_ALONE]], times),
            batch_size=max(report["batch_size"] for report in last.reports),
            hits=sum(report["hits"] for report in last.reports),
            equal_answers=sum(map(str.__eq__, last.answers, runs[_ALONE][-1].answers)),
        )

    def title(self, rows: Sequence[BatchRow]) -> str:
        asked = self.setting
        return (
            f"{asked.model}: {asked.prompts} prompts of {min(self._lengths)} to {max(self._lengths)} tokens, "
            f"{asked.chunks} chunks each, {asked.output_tokens} output tokens, median of {asked.repeats}"
        )

    def cells(self, row: BatchRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "all answers": say_seconds(row.elapsed_s),
            "range": say_range(row.elapsed_min_s, row.elapsed_max_s),
            "prefill": say_seconds(row.prefill_s),
            "decode": say_seconds(row.decode_s),
            "prompts/s": f"{row.prompts_per_s:.2f}",
            "tokens/s": f"{row.tokens_per_s:.0f}",
            "faster": f"{row.speedup:.2f}x",
            "together": row.batch_size,
            "hits": row.hits,
            "same answers": f"{row.equal_answers} of {self.setting.prompts}",
        }

    def about(self) -> dict[str, Any]:
        return {"model": self.setting.model}
