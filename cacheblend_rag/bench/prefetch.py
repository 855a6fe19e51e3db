"""Time to first token behind a reranker, with and without the candidates' KV prefetched while it works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import TracebackType

import torch

from cacheblend_rag.bench.coldfiles import cached_share, drop_cached, stored_files
from cacheblend_rag.bench.rounds import in_alternation
from cacheblend_rag.bench.shapes import random_model, shape_config, word_tokenizer
from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import BlendReport

__all__ = ["PrefetchBench", "PrefetchRow", "PrefetchSetting"]

_METHODS = ("disk", "prefetch", "ram")


@dataclass(frozen=True, slots=True)
class PrefetchSetting:
    """What is measured.

    Attributes
    ----------
    shape : str
        The model's shape (`cacheblend_rag.bench.SHAPES`).
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
    repeats : int
        Measured rounds; each runs every method once, with nothing in the page cache.
    device, dtype : str
        Where the model runs, and the dtype of its weights.
    folder : Path or None
        Where files are written for the time of the measurement; the system's folder for temporary files by default.
    seed : int
        Seed of weights, tokens and the reranker's choice.
    """

    shape: str
    candidates: int = 12
    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    reranker_s: float = 0.2
    ratio: float = 0.15
    selector: str = "hkvd"
    repeats: int = 5
    device: str = "cpu"
    dtype: str = "float32"
    folder: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("candidates", "chunks", "chunk_tokens", "question_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
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
        shape = shape_config(setting.shape)
        self._config = BlendConfig(
            enabled=True,
            min_tokens=0,
            dtype=setting.dtype,
            device=setting.device,
            recompute_ratio=setting.ratio,
            selector=setting.selector,
            # All candidates fit, whatever the environment says.
            ram_bytes=2**63 - 1,
            self_check=False,
            strict=True,
        )
        dtype = self._config.torch_dtype()
        assert dtype is not None
        self._model = random_model(shape, device=setting.device, dtype=dtype, seed=setting.seed)
        vocabulary = int(shape.get_text_config().vocab_size)
        self._tokenizer = word_tokenizer(vocabulary)
        generator = torch.Generator().manual_seed(setting.seed)

        def words(count: int) -> str:
            drawn = torch.randint(1, vocabulary, (count,), generator=generator).tolist()
            return " ".join(f"t{number}" for number in drawn)

        self._temporary = TemporaryDirectory(prefix="cacheblend-bench-", dir=setting.folder, ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name) / "kv"
        self._names = [f"chunk {number}" for number in range(setting.candidates)]
        chosen = torch.randperm(setting.candidates, generator=generator)[: setting.chunks].tolist()
        self._prompt = BlendPrompt(
            chunks=[self._names[number] for number in chosen], suffix=words(setting.question_tokens)
        )
        with self._engine() as engine:
            engine.add(Chunk(words(setting.chunk_tokens), name) for name in self._names)
        self.files = stored_files(self._folder)
        self.file_bytes = sum(file.stat().st_size for file in self.files)
        drop_cached(self.files)
        self.cached_share_after_drop = cached_share(self.files)

    def __enter__(self) -> PrefetchBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._temporary.cleanup()

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
        runs: dict[str, list[_Run]] = {method: [] for method in _METHODS}
        for method, measured in in_alternation(_METHODS, self.setting.repeats, unmeasured=1, progress=progress):
            run = self._run(method)
            if measured:
                runs[method].append(run)
        return [self._row(method, runs[method], runs["disk"]) for method in _METHODS]

    def _engine(self) -> BlendEngine:
        return BlendEngine(self._model, self._tokenizer, config=self._config, store=self._folder)

    def _run(self, method: str) -> _Run:
        # A new one each time, that has nothing in RAM.
        with self._engine() as engine:
            if method == "ram":
                engine.prefetch(self._names).wait()
            drop_cached(self.files)
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
            of_disk=median(own.ttft_s / disk.ttft_s for own, disk in zip(runs, from_disk, strict=True)),
            load_s=median(run.report.load_s for run in runs),
            tiers=tiers,
        )
