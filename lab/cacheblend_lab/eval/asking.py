"""Asking the questions of one context by every method."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from cacheblend_lab.eval.inquiry import Inquiry, inquire
from cacheblend_lab.eval.journal import Answer, Asked
from cacheblend_lab.eval.methods import NO_CONTEXT, WHOLE_WAYS, EvalMethod, order_methods, parse_method
from cacheblend_lab.eval.retrieve import RetrievalSetting, Retriever
from cacheblend_lab.eval.task import EvalContext, EvalTask, at_least_one
from cacheblend_lab.eval.ways import make_way
from cacheblend_lab.settings import another_engine, engine_settings, settings_of
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import PromptTooLongError, UnsupportedModelError

__all__ = ["Asker", "EvalSetting"]


@dataclass(frozen=True)
class EvalSetting:
    """Settings of an evaluation.

    Attributes
    ----------
    methods : tuple of EvalMethod
        How questions are answered; full prefill is always among them, and first.
    retrieval : RetrievalSetting
        How contexts that are not chunks yet are cut and searched.
    max_new_tokens : int, optional
        Most tokens of an answer, instead of the task's.
    resamples : int
        Bootstrap replicates.
    seed : int
        The bootstrap's draws follow from it.
    together : bool
        Whether the questions of a context are answered in one batch, method by method: sooner, but of methods that are a call of
        the engine the time to the first token is then not known.
    losses : bool
        Whether each method that is a call of the engine also says how likely it finds the right answer. Answering without any
        chunk, which the others are measured against, is then among the methods.
    """

    methods: tuple[EvalMethod, ...]
    retrieval: RetrievalSetting = field(default_factory=RetrievalSetting)
    max_new_tokens: int | None = None
    resamples: int = 2_000
    seed: int = 0
    together: bool = False
    losses: bool = False

    def __post_init__(self) -> None:
        bare = (parse_method(NO_CONTEXT),) if self.losses else ()
        object.__setattr__(self, "methods", order_methods((*bare, *self.methods)))
        at_least_one(max_new_tokens=self.max_new_tokens, resamples=self.resamples)


class Asker:
    """Asks questions by every method, on engines over one model whose stores hold the chunks of the context in question.

    Of the task what stands around chunks and questions is used; not its contexts, metrics and `extract`.
    """

    def __init__(self, engine: BlendEngine, task: EvalTask, setting: EvalSetting) -> None:
        self._engine = engine
        self._task = task
        self._together, self._losses = setting.together, setting.losses
        self._max_new_tokens = setting.max_new_tokens or task.max_new_tokens
        self._retriever = Retriever(engine.tokenizer, setting.retrieval)
        self._engines: dict[str, BlendEngine] = {}
        if engine.unsupported_reason is not None and any(m.way not in WHOLE_WAYS for m in setting.methods):
            raise UnsupportedModelError(
                f"{engine.unsupported_reason}; evaluate it by {', '.join(WHOLE_WAYS)} only, or choose another model"
            )
        self._ways = {method.name: make_way(method, self._engine_for(method)) for method in setting.methods}

    def close(self) -> None:
        """Close the engines that were made for methods; the one that was given stays open."""
        for engine in self._engines.values():
            if engine is not self._engine:
                engine.close()

    def ask(self, context: EvalContext, wanted: Collection[str] | None = None) -> Iterator[Asked]:
        """Ask questions of one context by every method, all or the wanted ones, and forget its chunks.

        A question whose prompt does not fit the model's window is skipped.
        """
        engines = self._engines.values()
        with inquire(
            self._task, context, self._retriever, engines, self._max_new_tokens, wanted, self._losses
        ) as inquiries:
            asked: dict[str, Inquiry] = {}
            for question, inquiry in inquiries:
                if isinstance(inquiry, str):
                    yield Asked(question.id, skipped=inquiry)
                else:
                    asked[question.id] = inquiry
            if self._together and len(asked) > 1:
                try:
                    yield from self._answers(asked)
                    return
                except PromptTooLongError:
                    # One of them is too long, which says nothing of the others.
                    pass
            for name, inquiry in asked.items():
                try:
                    yield from self._answers({name: inquiry})
                except PromptTooLongError as error:
                    yield Asked(name, skipped=str(error))

    def _answers(self, asked: Mapping[str, Inquiry]) -> list[Asked]:
        answers: dict[str, dict[str, Answer | None]] = {question: {} for question in asked}
        for name, way in self._ways.items():
            found = way.answer(list(asked.values()), list(answers.values()))
            for own, answer in zip(answers.values(), found, strict=True):
                own[name] = answer
        return [Asked(question, own) for question, own in answers.items()]

    def _engine_for(self, method: EvalMethod) -> BlendEngine:
        """Return the engine whose settled settings are those of a method.

        A key names KV whatever its codec, so settings that no call can change want a store, and an engine, of their own.
        Documents are read as prompts are written, with the task's separator between their chunks.
        """
        settings = {"self_check": False, "separator": self._task.separator} | method.settings()
        own = settings_of(self._engine)
        asked = engine_settings(own, **settings)
        # Whether the model is checked by itself changes no answer.
        same = asked["config"] == own["config"] and asked["tuning"] == replace(own["tuning"], self_check=False)
        label = "" if same else repr((asked["config"], asked["tuning"]))
        if label not in self._engines:
            self._engines[label] = self._engine if same else another_engine(self._engine, asked)
        return self._engines[label]
