"""Time per output token and KV held, with and without eviction after prefill, in alternation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.bench.rounds import in_rounds
from cacheblend_rag.lab.bench.setting import ModelSetting, check_least
from cacheblend_rag.lab.bench.shapes import make_model
from cacheblend_rag.lab.bench.times import median_ratio
from cacheblend_rag.lab.bench.words import RandomWords
from cacheblend_rag.report import BlendReport

__all__ = ["TPOTBench", "TPOTRow", "TPOTSetting"]

_PREFILLS = ("full", "blend")


@dataclass(frozen=True, slots=True)
class TPOTSetting(ModelSetting):
    """What is measured; what it shares with other benches is described at `ModelSetting`.

    Attributes
    ----------
    chunks, chunk_tokens, question_tokens : int
        The prompt: so many chunks of so many tokens behind the BOS, then the question.
    output_tokens : int
        Tokens generated.
    capacities : tuple of (int or float)
        Context KV that is kept (`BlendConfig.kv_capacity`), each measured beside a cache that keeps all.
    methods : tuple of str
        How the prompt is prefilled: "full", "blend".
    ratio : float
        Recompute ratio of the blend.
    selector : str
        Its selector.
    """

    chunks: int = 6
    chunk_tokens: int = 512
    question_tokens: int = 32
    output_tokens: int = 32
    capacities: tuple[int | float, ...] = (0.25,)
    methods: tuple[str, ...] = _PREFILLS
    ratio: float = 0.15
    selector: str = "hkvd"

    def __post_init__(self) -> None:
        ModelSetting.__post_init__(self)
        check_least(self, 1, "chunks", "chunk_tokens", "question_tokens")
        for method in self.methods or ("",):
            if method not in _PREFILLS:
                raise ConfigError(f"method {method!r} is not measured; choose among {', '.join(_PREFILLS)}")
        if self.output_tokens < 2:
            raise ConfigError(
                f"output_tokens={self.output_tokens} leaves no time between two tokens to measure; give 2 or more"
            )


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


_Method = tuple[str, int | float | None]


class TPOTBench:
    """A model of random weights with its chunks' KV stored; a context manager.

    Parameters
    ----------
    setting : TPOTSetting
        What is measured.

    Raises
    ------
    ConfigError
        If the shape, the selector or a capacity has no meaning, or the prompt does not fit the shape's window.
    """

    def __init__(self, setting: TPOTSetting) -> None:
        self.setting = setting
        settings = setting.engine_settings(selector=setting.selector, recompute_ratio=setting.ratio, kv_capacity=None)
        self._methods: list[_Method] = [
            (method, capacity)
            for method in dict.fromkeys(setting.methods)
            for capacity in (None, *dict.fromkeys(setting.capacities))
        ]
        self._configs = {
            method: settings["blend"].replace(enabled=method[0] == "blend", kv_capacity=method[1])
            for method in self._methods
        }
        model, tokenizer = make_model(setting)
        self.engine = BlendEngine(model, tokenizer, **settings)
        words = RandomWords(tokenizer, setting.seed)
        chunks = words.chunks(setting.chunks, setting.chunk_tokens)
        self.prompt = BlendPrompt(
            chunks=[str(chunk.id) for chunk in chunks], suffix=words.text(setting.question_tokens)
        )
        self.engine.add(chunks)
        self.token_ids = self.engine.prompt_ids(self.prompt)

    def __enter__(self) -> TPOTBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def measure(self, progress: Callable[[int, int], None] | None = None) -> list[TPOTRow]:
        """Run every method once unmeasured, then `repeats` rounds, each beginning with another method.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of finished runs and of all.

        Returns
        -------
        list of TPOTRow
            One for each method, full prefill first, and without eviction before with.
        """
        reports = in_rounds(self._methods, self._run, self.setting.repeats, progress=progress)
        return [_row(method, reports[method], reports[method[0], None]) for method in self._methods]

    def _run(self, method: _Method) -> BlendReport:
        blend = self._configs[method]
        return self.engine.generate(self.prompt, self.setting.output_tokens, blend=blend, do_sample=False).report


def _row(method: _Method, reports: Sequence[BlendReport], whole: Sequence[BlendReport]) -> TPOTRow:
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


def _tpot(report: BlendReport) -> float:
    assert report.tpot_s is not None
    return report.tpot_s
