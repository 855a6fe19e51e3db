"""The figures of the demonstration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

__all__ = ["DemoRow", "Ingestion", "Summary", "summarize"]


@dataclass(frozen=True, slots=True)
class Ingestion:
    """What putting the documents into one framework's collection took.

    Attributes
    ----------
    framework : str
        Which.
    chunks : int
        Chunks in the collection now.
    encoded : int
        Chunks whose KV was computed for it.
    seconds : float
        Embedding, indexing and encoding.
    """

    framework: str
    chunks: int
    encoded: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One question, asked by one method through one framework.

    Attributes
    ----------
    framework, question, kind, method, answer, gold : str
        What was asked, how, what came back, and the value that is right.
    match : bool
        Whether the answer gives that value.
    same_as_full : bool
        Whether it is word for word the answer of full prefill.
    supported : bool
        Whether all chunks that the question needs were retrieved; without them no method can know.
    ttft_s : float
        Median over the rounds, from handing the framework what was retrieved to the first output id.
    speedup : float
        Full prefill's `ttft_s` over this one.
    hits : int or None
        Chunks served from stored KV; None where none is used.
    chunks : int
        Chunks in the prompt.
    selector : str
        Who chose the recomputed tokens.
    recompute_ratio, charged_ratio : float or None
        The ratio asked for, and the work done on chunk tokens over (chunk tokens x layers).
    prompt_tokens, context_tokens : int
        Tokens of the prompt, and of its chunks.
    """

    framework: str
    question: str
    kind: str
    method: str
    answer: str
    gold: str
    match: bool
    same_as_full: bool
    supported: bool
    ttft_s: float
    speedup: float
    hits: int | None
    chunks: int
    selector: str
    recompute_ratio: float | None
    charged_ratio: float
    prompt_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One method through one framework: shares and medians over the questions."""

    framework: str
    method: str
    questions: int
    match: float
    same_as_full: float
    ttft_s: float
    speedup: float
    charged_ratio: float
    hits: int | None
    chunks: int


def summarize(rows: Sequence[DemoRow]) -> list[Summary]:
    """Return one summary for each framework and method, in the order of the rows."""
    summaries = []
    for framework, method in dict.fromkeys((row.framework, row.method) for row in rows):
        chosen = [row for row in rows if (row.framework, row.method) == (framework, method)]
        summaries.append(
            Summary(
                framework=framework,
                method=method,
                questions=len(chosen),
                match=fmean(row.match for row in chosen),
                same_as_full=fmean(row.same_as_full for row in chosen),
                ttft_s=median(row.ttft_s for row in chosen),
                speedup=median(row.speedup for row in chosen),
                charged_ratio=fmean(row.charged_ratio for row in chosen),
                hits=None if method == "full" else sum(row.hits or 0 for row in chosen),
                chunks=sum(row.chunks for row in chosen),
            )
        )
    return summaries
