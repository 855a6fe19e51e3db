"""The reference model's own held-out questions as a task."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cacheblend_lab.eval.metrics import best_exact_match, best_f1
from cacheblend_lab.eval.retrieve import draw_corpora, found_chunks
from cacheblend_lab.eval.task import EvalContext, EvalQuestion, EvalTask, at_least_one
from cacheblend_lab.reference.prompt import DEFAULT_FORMAT, FORMATS, value_of
from cacheblend_lab.training.corpus import (
    EVAL_STYLE,
    Document,
    Example,
    Question,
    eval_examples,
    make_example,
)
from cacheblend_lab.training.paragraphs import Paragraphs
from cacheblend_lab.training.questions import ContextStyle
from cacheblend_rag.documents.embedding import Embedding
from cacheblend_rag.errors import ConfigError

__all__ = ["RETRIEVALS", "reference_task"]

RETRIEVALS = ("reading", "shuffled", "dropped", "ranked")
"""Choices of the context's chunks that a question is answered from, and of their order."""

_MAX_NEW_TOKENS = 64
# Contexts that are drawn to see whether any has enough chunks.
_TRIES = 200
# Share of the chunks that are retrieved where some are not, beside the one that states the answer.
_KEPT = 0.6


def reference_task(
    num_questions: int = 500,
    *,
    min_chunks: int = 10,
    seed: int = 7,
    format: str = DEFAULT_FORMAT,
    people: int | None = None,
    per_context: int = 8,
    style: ContextStyle = EVAL_STYLE,
    retrieval: str = "reading",
    documents: int = 200,
    top_k: int = 12,
    embedding: str | None = None,
) -> EvalTask:
    """Return held-out questions about fictional people; names, values and templates are none that training has seen.

    Parameters
    ----------
    num_questions : int
        How many.
    min_chunks : int
        Minimum chunks of a context.
    seed : int
        The questions follow from it.
    format : str
        How prompts are written (`cacheblend_lab.reference.prompt.FORMATS`).
    people : int, optional
        People of each context: the more, the more chunks, four or five for each. By default as many as in training.
    per_context : int
        Maximum questions about one context.
    style : Style or Paragraphs
        What contexts look like.
    retrieval : str
        What a question is answered from: "reading", all chunks of its context in reading order; "shuffled", all of them in random
        order; "dropped", in order, but two in five were not retrieved, never the one that states the answer; "ranked", the
        nearest of a whole corpus.
    documents : int
        Minimum documents of that corpus. It has many contexts, and further corpora are drawn until there are enough questions.
    top_k : int
        How many chunks are retrieved of it.
    embedding : str, optional
        The sentence-transformers model, hub id or folder, that chunks and questions are compared by there; by default
        all-MiniLM-L6-v2.

    Returns
    -------
    EvalTask
        The chunks as they are, as pieces of their documents, the kinds of `cacheblend_lab.training.questions.KINDS`, and
        exact match and F1 of the value that the answer's sentence ends with.

    Raises
    ------
    ConfigError
        If a number is below 1, no context has that many chunks, there is no such format or retrieval, or the embedding
        model cannot be loaded.
    """
    at_least_one(num_questions=num_questions, min_chunks=min_chunks, people=people)
    at_least_one(per_context=per_context, documents=documents, top_k=top_k)
    if format not in FORMATS:
        raise ConfigError(f"prompt format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if retrieval not in RETRIEVALS:
        raise ConfigError(f"retrieval {retrieval!r} is unknown; choose one of {', '.join(RETRIEVALS)}")
    form = FORMATS[format]
    if people is not None:
        style = replace(style, people=(people, people))
        if isinstance(style, Paragraphs):
            style = replace(style, total=(1, (people + style.firms[1]) * style.chunks[1]))
    rng = random.Random(seed)
    sizes = (len(make_example(rng, style, "held_out", 1).chunks) for _ in range(_TRIES))
    if not any(size >= min_chunks for size in sizes):
        raise ConfigError(f"contexts of at least {min_chunks} chunks are not drawn; give fewer, or more people")
    if retrieval == "ranked":
        corpora = draw_corpora(num_questions, seed, documents, style, min_chunks, per_context)
        finder = Embedding(embedding)
        drawn = (context for corpus in corpora for context in _ranked(corpus, top_k, finder))
    else:
        examples = eval_examples(num_questions, seed, min_chunks, style, per_context)
        drawn = (_given(example, retrieval, f"{seed}:{number}") for number, example in enumerate(examples))
    contexts = []
    asked = 0
    for context in drawn:
        numbered = (replace(question, id=f"{seed}-{asked + n}") for n, question in enumerate(context.questions))
        contexts.append(replace(context, questions=tuple(numbered)))
        asked += len(context.questions)
    return EvalTask(
        name="reference" if retrieval == "reading" else f"reference ({retrieval})",
        contexts=tuple(contexts),
        metrics={"exact_match": best_exact_match, "f1": best_f1},
        head=form.prefix(),
        tail=form.suffix("{question}"),
        separator=form.separator,
        chunked=True,
        max_new_tokens=_MAX_NEW_TOKENS,
        extract=value_of,
    )


def _given(example: Example, retrieval: str, seed: str) -> EvalContext:
    """Return an example whose questions are answered from its own chunks."""
    every = range(len(example.chunks))
    questions = []
    for number, question in enumerate(example.questions):
        rng = random.Random(f"{retrieval}:{seed}:{number}")
        chunks: tuple[int, ...] | None = None
        if retrieval == "shuffled":
            chunks = tuple(rng.sample(every, len(every)))
        elif retrieval == "dropped":
            kept = [rng.random() < _KEPT for _ in every]
            chunks = tuple(chunk for chunk in every if kept[chunk] or chunk == question.source)
        questions.append(_question(question, chunks))
    return EvalContext(example.chunks, tuple(questions), tuple(len(document.chunks) for document in example.documents))


def _ranked(corpus: Sequence[Example], top_k: int, embedding: Embedding) -> Iterator[EvalContext]:
    """Yield the examples of a corpus that are asked about, with the documents that are found for their questions."""
    documents: list[Document] = [document for example in corpus for document in example.documents]
    asked = [question for example in corpus for question in example.questions]
    found = iter(found_chunks(documents, [question.text for question in asked], top_k, embedding))
    for example in corpus:
        if not example.questions:
            continue
        hits = [next(found) for _ in example.questions]
        starts: dict[int, int] = {}
        texts: list[str] = []
        for document in sorted({document for row in hits for document, _ in row}):
            starts[document] = len(texts)
            texts += documents[document].chunks
        questions = [
            _question(question, tuple(starts[document] + chunk for document, chunk in row))
            for question, row in zip(example.questions, hits, strict=True)
        ]
        yield EvalContext(tuple(texts), tuple(questions), tuple(len(documents[document].chunks) for document in starts))


def _question(question: Question, chunks: tuple[int, ...] | None) -> EvalQuestion:
    return EvalQuestion("", question.text, (question.answer,), question.kind, chunks)
