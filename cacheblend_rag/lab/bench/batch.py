"""A batch of prompts through LangChain against the same prompts one after the other, in alternation."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.lab.bench.rounds import in_rounds
from cacheblend_rag.lab.bench.setting import check_least
from cacheblend_rag.lab.bench.times import median_ratio
from cacheblend_rag.lab.bench.words import made_up_word
from cacheblend_rag.lab.settings import engine_settings
from langchain_cacheblend import BlendLLM

__all__ = ["BatchBench", "BatchRow", "BatchSetting"]

_METHODS = ("one by one", "batch")


@dataclass(frozen=True, slots=True)
class BatchSetting:
    """What is measured.

    Attributes
    ----------
    model : str
        A Hugging Face id, a folder, or "reference".
    prompts : int
        Prompts of the batch.
    chunks, chunk_tokens, question_tokens : int
        Each prompt: so many stored chunks of about so many tokens, and a question; every chunk stands in one prompt only.
    output_tokens : int
        Tokens of each answer.
    ratio : float
        Recompute ratio.
    repeats : int
        Measured rounds; each runs every method once.
    seed : int
        Seed of the texts.
    """

    model: str = "reference"
    prompts: int = 16
    chunks: int = 6
    chunk_tokens: int = 64
    question_tokens: int = 16
    output_tokens: int = 32
    ratio: float = 0.15
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        # A chunk is recognised by its first characters, and a question should not look like the next one.
        check_least(self, 16, "chunk_tokens")
        check_least(self, 4, "question_tokens")
        check_least(self, 2, "prompts")
        check_least(self, 1, "chunks", "output_tokens", "repeats")


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "one by one": ``invoke`` for each prompt. "batch": one ``batch`` of all.
    elapsed_s, elapsed_min_s, elapsed_max_s : float
        Median and extremes over the rounds of the time until all answers were there.
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


@dataclass(frozen=True, slots=True)
class _Run:
    elapsed_s: float
    answers: list[str]
    reports: list[dict[str, Any]]


class BatchBench:
    """A LangChain model over an engine that has the KV of all chunks; a context manager.

    Parameters
    ----------
    setting : BatchSetting
        What is measured.

    Raises
    ------
    ConfigError
        If there is no such model.
    PromptTooLongError
        If a prompt does not fit the model's window.
    """

    def __init__(self, setting: BatchSetting) -> None:
        self.setting = setting
        settings = engine_settings(
            enabled=True,
            recompute_ratio=setting.ratio,
            kv_capacity=None,
            repair=0.0,
        )
        self.engine = BlendEngine.from_pretrained(setting.model, **settings)
        self._llm = BlendLLM(
            model=setting.model,
            engine=self.engine,
            max_tokens=setting.output_tokens,
            temperature=0,
            # No answer ends early, so that both methods write as much.
            generation_kwargs={"eos_token_id": -1},
        )
        self._random = random.Random(setting.seed)
        self.prompts = []
        for number in range(setting.prompts):
            chunks = [Chunk(self._text(setting.chunk_tokens), f"{number}-{place}") for place in range(setting.chunks)]
            self.engine.add(chunks)
            self.prompts.append(
                "\n\n".join([*(chunk.text for chunk in chunks), self._text(setting.question_tokens) + "?"])
            )
        self.prompt_tokens = [len(self.engine.prompt_ids(self._llm.blend_prompt(prompt))) for prompt in self.prompts]

    def _text(self, tokens: int) -> str:
        """Return random words, about so many tokens of them."""
        words: list[str] = []
        while True:
            words.append(made_up_word(self._random))
            if len(self._llm.get_token_ids(" ".join(words))) >= tokens:
                return " ".join(words)

    def __enter__(self) -> BatchBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def measure(self, progress: Callable[[int, int], None] | None = None) -> list[BatchRow]:
        """Run every method once unmeasured, then `repeats` rounds, each beginning with another method.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of finished runs and of all.

        Returns
        -------
        list of BatchRow
            One by one, then the batch.
        """
        runs = in_rounds(_METHODS, self._run, self.setting.repeats, progress=progress)
        return [self._row(method, runs[method], runs[_METHODS[0]]) for method in _METHODS]

    def _run(self, method: str) -> _Run:
        seen = _Reports()
        config: Any = {"callbacks": [seen]}
        began = time.perf_counter()
        if method == "batch":
            answers = self._llm.batch(self.prompts, config)
        else:
            answers = [self._llm.invoke(prompt, config) for prompt in self.prompts]
        return _Run(time.perf_counter() - began, answers, seen.reports)

    def _row(self, method: str, runs: Sequence[_Run], alone: Sequence[_Run]) -> BatchRow:
        times = [run.elapsed_s for run in runs]
        elapsed_s = median(times)
        last = runs[-1]
        return BatchRow(
            method=method,
            elapsed_s=elapsed_s,
            elapsed_min_s=min(times),
            elapsed_max_s=max(times),
            prompts_per_s=len(self.prompts) / elapsed_s,
            tokens_per_s=sum(report["output_tokens"] for report in last.reports) / elapsed_s,
            speedup=median_ratio([run.elapsed_s for run in alone], times),
            batch_size=max(report["batch_size"] for report in last.reports),
            hits=sum(report["hits"] for report in last.reports),
            equal_answers=sum(map(str.__eq__, last.answers, alone[-1].answers)),
        )
