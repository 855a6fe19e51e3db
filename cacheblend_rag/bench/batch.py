"""A batch of prompts through LangChain against the same prompts one after the other, in alternation."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult

from cacheblend_rag.bench.rounds import in_alternation
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from langchain_cacheblend import BlendLLM

__all__ = ["BatchBench", "BatchRow", "BatchSetting"]

_METHODS = ("one by one", "batch")
_SYLLABLES = ("ba", "den", "fo", "gri", "hal", "ju", "kem", "lo", "mi", "nor", "pa", "ris", "su", "tel", "vo", "wen")


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
        least = {"prompts": 2, "chunks": 1, "chunk_tokens": 16, "question_tokens": 4, "output_tokens": 1, "repeats": 1}
        for name, count in least.items():
            if getattr(self, name) < count:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {count}")


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
        config = BlendConfig(
            enabled=True, min_tokens=0, recompute_ratio=setting.ratio, kv_capacity=None, repair_ratio=0.0
        )
        self.engine = BlendEngine.from_pretrained(setting.model, config=config)
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
            words.append("".join(self._random.choices(_SYLLABLES, k=self._random.randint(1, 3))))
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
        times: dict[str, list[float]] = {method: [] for method in _METHODS}
        answers: dict[str, list[str]] = {}
        reports: dict[str, list[dict[str, Any]]] = {}
        for method, measured in in_alternation(_METHODS, self.setting.repeats, unmeasured=1, progress=progress):
            seen = _Reports()
            config: Any = {"callbacks": [seen]}
            began = time.perf_counter()
            if method == "batch":
                answers[method] = self._llm.batch(self.prompts, config)
            else:
                answers[method] = [self._llm.invoke(prompt, config) for prompt in self.prompts]
            if measured:
                times[method].append(time.perf_counter() - began)
            reports[method] = seen.reports
        alone = times[_METHODS[0]]
        return [
            BatchRow(
                method=method,
                elapsed_s=(elapsed := median(times[method])),
                elapsed_min_s=min(times[method]),
                elapsed_max_s=max(times[method]),
                prompts_per_s=len(self.prompts) / elapsed,
                tokens_per_s=sum(report["output_tokens"] for report in reports[method]) / elapsed,
                speedup=median(other / own for other, own in zip(alone, times[method], strict=True)),
                batch_size=max(report["batch_size"] for report in reports[method]),
                hits=sum(report["hits"] for report in reports[method]),
                equal_answers=sum(map(str.__eq__, answers[method], answers[_METHODS[0]])),
            )
            for method in _METHODS
        ]
