"""Answers of the reference model to held-out questions, by full prefill, plain reuse and blends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from cacheblend_rag.chunk import BlendPrompt, Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, GenerationResult
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.eval.metrics import exact_match, f1_score
from cacheblend_rag.reference.corpus import KINDS, Example, Question, eval_examples, value_of
from cacheblend_rag.reference.prompt import DEFAULT_FORMAT, FORMATS

__all__ = ["Answer", "EvalRow", "EvalSetting", "ReferenceEval", "examples_of", "tabulate"]

_RANDOM = "random"


@dataclass(frozen=True, slots=True)
class EvalSetting:
    """What is evaluated.

    Attributes
    ----------
    num_questions : int
        How many questions.
    min_chunks : int
        Least chunks of a context.
    seed : int
        The questions follow from it.
    ratios : tuple of float
        Recompute ratios.
    selectors : tuple of str
        Selectors evaluated at each ratio, each beside random at the same ratio and at the same charge.
    codecs : tuple of str
        Codecs of the stored KV (`cacheblend_rag.codec.codec_names`). The engine's own holds for every method; each other one
        adds a row for each selector and ratio.
    format : str
        How prompts are written (`cacheblend_rag.reference.prompt.FORMATS`).
    max_new_tokens : int
        Most tokens of an answer; answers end by themselves before that.
    """

    num_questions: int = 500
    min_chunks: int = 12
    seed: int = 7
    ratios: tuple[float, ...] = (0.15, 0.3)
    selectors: tuple[str, ...] = ("hkvd",)
    codecs: tuple[str, ...] = ("native",)
    format: str = DEFAULT_FORMAT
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("num_questions", "min_chunks", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.format not in FORMATS:
            raise ConfigError(f"prompt format {self.format!r} is unknown; choose one of {', '.join(FORMATS)}")


@dataclass(frozen=True, slots=True)
class EvalRow:
    """One method's figures on one kind of question, or on ``all``.

    Attributes
    ----------
    kind : str
        The kind.
    method : str
        "full" and "reuse", or selector and ratio, and codec where it is not the engine's; ``random = hkvd 0.15`` is random at
        the charge of hkvd at 0.15.
    selector : str or None
        The selector.
    recompute_ratio : float or None
        The ratio asked for; where it follows from a charge, its mean.
    equal_to : str or None
        The method whose charge this one was given, question by question.
    codec : str or None
        How the stored KV was packed; None where none was used.
    charged_ratio : float
        Mean work on chunk tokens over (chunk tokens x layers).
    questions : int
        How many.
    exact_match, f1 : float
        Means over the questions, of the value that the answer gives.
    same_as_full : float
        Share of answers that are word for word those of full prefill.
    ttft_s : float
        Median time to the first token.
    """

    kind: str
    method: str
    selector: str | None
    recompute_ratio: float | None
    equal_to: str | None
    codec: str | None
    charged_ratio: float
    questions: int
    exact_match: float
    f1: float
    same_as_full: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    selector: str | None
    ratio: float | None
    equal_to: str | None = None
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, judged; the attributes are those of `EvalRow`."""

    method: str
    kind: str
    recompute_ratio: float | None
    codec: str | None
    charged_ratio: float
    exact_match: bool
    f1: float
    same_as_full: bool
    ttft_s: float


class ReferenceEval:
    """Asks questions by every method, on one engine whose store holds the chunks of the context in question.

    Parameters
    ----------
    engine : BlendEngine
        The engine; its store should be in RAM.
    setting : EvalSetting
        What is evaluated.
    """

    def __init__(self, engine: BlendEngine, setting: EvalSetting) -> None:
        self._engine = engine
        self._setting = setting
        self._form = FORMATS[setting.format]
        own: str = engine.config.ram_codec
        # A key names KV whatever its codec, so each codec has a store, and an engine, of its own on the same model.
        self._engines = {own: engine}
        for codec in dict.fromkeys(setting.codecs):
            if codec != own:
                config = engine.config.replace(ram_codec=codec, self_check=False)
                self._engines[codec] = BlendEngine(engine.model, engine.tokenizer, config=config)
        self._methods = [method for method in _methods(setting) if method.codec != own]
        # Unknown selectors and ratios without meaning are found before the first question.
        self._configs = {method: self._config(method, method.ratio) for method in self._methods}

    def ask(self, example: Example) -> list[Answer]:
        """Ask all questions of one context by every method."""
        chunks = [Chunk(text, f"chunk {number}") for number, text in enumerate(example.chunks)]
        ids = [str(chunk.id) for chunk in chunks]
        try:
            for engine in self._engines.values():
                engine.add(chunks)
            return [answer for question in example.questions for answer in self._ask(ids, question)]
        finally:
            for engine in self._engines.values():
                engine.delete(ids)

    def close(self) -> None:
        """Close the engines that were made for codecs; the one that was given stays open."""
        for engine in self._engines.values():
            if engine is not self._engine:
                engine.close()

    def _ask(self, ids: list[str], question: Question) -> Iterator[Answer]:
        prompt = BlendPrompt(self._form.prefix(), ids, self._form.suffix(question.text), self._form.separator)
        results: dict[str, GenerationResult] = {}
        for method in self._methods:
            ratio = method.ratio
            config = self._configs[method]
            if method.equal_to is not None:
                ratio = min(1.0, results[method.equal_to].report.charged_ratio)
                config = self._config(method, ratio)
            # Greedy, so that an answer depends on the method alone.
            result = self._engine_of(method).generate(
                prompt, max_new_tokens=self._setting.max_new_tokens, config=config, do_sample=False
            )
            results[method.name] = result
            value = value_of(result.text)
            same = result.text == results["full"].text
            exact, overlap = exact_match(value, question.answer), f1_score(value, question.answer)
            charged = result.report.charged_ratio
            codec = None if method.selector is None else self._engine_of(method).config.ram_codec
            yield Answer(method.name, question.kind, ratio, codec, charged, exact, overlap, same, result.report.ttft_s)

    def _config(self, method: _Method, ratio: float | None) -> BlendConfig:
        settings = self._engine_of(method).config
        if method.selector is None:
            return settings.replace(enabled=False)
        blending = {"enabled": True, "min_tokens": 0, "selector": method.selector, "recompute_ratio": ratio or 0.0}
        return settings.replace(**blending)

    def _engine_of(self, method: _Method) -> BlendEngine:
        return self._engine if method.codec is None else self._engines[method.codec]


def examples_of(setting: EvalSetting) -> list[Example]:
    """Return the contexts with their questions."""
    return eval_examples(setting.num_questions, setting.seed, setting.min_chunks)


def tabulate(setting: EvalSetting, answers: Sequence[Answer]) -> list[EvalRow]:
    """Return for each method one row over all questions, and one for each kind; those over all come first."""
    rows = []
    for kind in ("all", *KINDS):
        for method in _methods(setting):
            chosen = [answer for answer in answers if answer.method == method.name and kind in ("all", answer.kind)]
            if chosen:
                rows.append(_row(kind, method, chosen))
    return rows


def _methods(setting: EvalSetting) -> Iterator[_Method]:
    yield _Method("full", None, None)
    yield _Method("reuse", "none", 0.0)
    for ratio in dict.fromkeys(setting.ratios):
        yield _Method(f"{_RANDOM} {ratio:g}", _RANDOM, ratio)
        for selector in dict.fromkeys(setting.selectors):
            if selector == _RANDOM:
                continue
            name = f"{selector} {ratio:g}"
            yield _Method(name, selector, ratio)
            yield _Method(f"{_RANDOM} = {name}", _RANDOM, None, equal_to=name)
            for codec in dict.fromkeys(setting.codecs):
                yield _Method(f"{name}, {codec}", selector, ratio, codec=codec)


def _row(kind: str, method: _Method, answers: Sequence[Answer]) -> EvalRow:
    ratios = [answer.recompute_ratio for answer in answers if answer.recompute_ratio is not None]
    return EvalRow(
        kind=kind,
        method=method.name,
        selector=method.selector,
        recompute_ratio=fmean(ratios) if ratios else None,
        equal_to=method.equal_to,
        codec=answers[0].codec,
        charged_ratio=fmean(answer.charged_ratio for answer in answers),
        questions=len(answers),
        exact_match=fmean(answer.exact_match for answer in answers),
        f1=fmean(answer.f1 for answer in answers),
        same_as_full=fmean(answer.same_as_full for answer in answers),
        ttft_s=median(answer.ttft_s for answer in answers),
    )
