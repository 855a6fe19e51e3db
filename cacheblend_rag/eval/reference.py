"""The reference model's own held-out questions as a task."""

from __future__ import annotations

from dataclasses import replace

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.eval.metrics import best_exact_match, best_f1
from cacheblend_rag.eval.task import EvalContext, EvalQuestion, EvalTask
from cacheblend_rag.reference.corpus import EVAL_STYLE, eval_examples, value_of
from cacheblend_rag.reference.prompt import DEFAULT_FORMAT, FORMATS

__all__ = ["reference_task"]

_MAX_NEW_TOKENS = 64


def reference_task(
    num_questions: int = 500,
    *,
    min_chunks: int = 12,
    seed: int = 7,
    format: str = DEFAULT_FORMAT,
    people: int | None = None,
    per_context: int = 8,
) -> EvalTask:
    """Return held-out questions about fictional people; names, values and templates are none that training has seen.

    Parameters
    ----------
    num_questions : int
        How many.
    min_chunks : int
        Least chunks of a context.
    seed : int
        The questions follow from it.
    format : str
        How prompts are written (`cacheblend_rag.reference.prompt.FORMATS`).
    people : int, optional
        People of each context: the more, the more chunks, four or five for each. By default as many as in training.
    per_context : int
        Most questions about one context.

    Returns
    -------
    EvalTask
        The chunks as they are, the kinds of `cacheblend_rag.reference.corpus.KINDS`, and exact match and F1 of the value that the
        answer's sentence ends with.

    Raises
    ------
    ConfigError
        If a number is below 1, or there is no such format.
    """
    for name, number in (
        ("num_questions", num_questions),
        ("min_chunks", min_chunks),
        ("people", people),
        ("per_context", per_context),
    ):
        if number is not None and number < 1:
            raise ConfigError(f"{name}={number} must be at least 1")
    if format not in FORMATS:
        raise ConfigError(f"prompt format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    form = FORMATS[format]
    contexts = []
    asked = 0
    style = None if people is None else replace(EVAL_STYLE, people=(people, people))
    for example in eval_examples(num_questions, seed, min_chunks, style, per_context):
        questions = []
        for question in example.questions:
            questions.append(EvalQuestion(f"{seed}-{asked}", question.text, (question.answer,), question.kind))
            asked += 1
        contexts.append(EvalContext(example.chunks, tuple(questions)))
    return EvalTask(
        name="reference",
        contexts=tuple(contexts),
        metrics={"exact_match": best_exact_match, "f1": best_f1},
        head=form.prefix(),
        tail=form.suffix("{question}"),
        separator=form.separator,
        chunked=True,
        max_new_tokens=_MAX_NEW_TOKENS,
        extract=value_of,
    )
