"""Tasks of ``cacheblend-rag eval``, each with its own options, beside those that all tasks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from cacheblend_attachments.cli.calibrate import parse_ratios
from cacheblend_lab.cli.options import parse_counts, parse_names

if TYPE_CHECKING:
    from cacheblend_lab.eval import EvalTask

__all__ = ["TASKS", "TaskMaker", "TaskRequest"]


@dataclass(frozen=True)
class TaskRequest:
    """Shared options of the tasks.

    Attributes
    ----------
    questions : int or None
        How many questions at most; None for the task's own number.
    seed : int
        What is drawn follows from it.
    chunk_tokens : int
        Most tokens of a chunk.
    top_k : int or None
        How many chunks are retrieved for a question; None for the task's own number.
    embedding : str or None
        The model that they are found by; None for the default one.
    tokenizer : callable
        Loads the model and returns its tokenizer; a task that does without finds its mistakes before that.
    """

    questions: int | None
    seed: int
    chunk_tokens: int
    top_k: int | None
    embedding: str | None
    tokenizer: Callable[[], Any]


TaskMaker: TypeAlias = Callable[..., "EvalTask"]
"""Takes a `TaskRequest` and options of its own, annotated as typer takes them; its docstring is the command's help."""

FileArgument = Annotated[
    Path, typer.Argument(metavar="PATH", exists=True, help="The data set's file, in its public format.")
]


def reference(
    request: TaskRequest,
    min_chunks: Annotated[int, typer.Option(min=1, help="Minimum chunks of a context.")] = 10,
    people: Annotated[
        int | None,
        typer.Option(min=1, help="People of a context, each in four or five chunks; by default as in training."),
    ] = None,
    per_context: Annotated[int, typer.Option(min=1, help="Maximum questions about one context.")] = 8,
    format: Annotated[
        str, typer.Option("--format", help="How prompts are written; chat is the project's own.")
    ] = "chat",
    retrieval: Annotated[
        str,
        typer.Option(
            help="What is answered from: all chunks in reading order (reading) or not (shuffled), in order with two in five "
            "missing (dropped), or the twelve (--top-k) nearest of a whole corpus (ranked)."
        ),
    ] = "reading",
    documents: Annotated[int, typer.Option(min=1, help="Minimum documents of that corpus.")] = 200,
) -> EvalTask:
    """Held-out questions about fictional people, for the reference model: exact match and F1 by kind of question.

    The model was not trained on these names, values and templates.
    """
    from cacheblend_lab.eval import reference_task

    return reference_task(
        request.questions or 500,
        min_chunks=min_chunks,
        seed=request.seed,
        format=format,
        people=people,
        per_context=per_context,
        retrieval=retrieval,
        documents=documents,
        top_k=request.top_k or 12,
        embedding=request.embedding,
    )


def qa(request: TaskRequest, path: FileArgument) -> EvalTask:
    """Your own questions, as JSON Lines: the share of the answers that hold the right one, F1 and exact match."""
    return _data_set("qa", request, path)


def musique(request: TaskRequest, path: FileArgument) -> EvalTask:
    """MuSiQue, questions over several passages: F1."""
    return _data_set("musique", request, path)


def wikimqa(request: TaskRequest, path: FileArgument) -> EvalTask:
    """2WikiMQA, questions over several passages: F1."""
    return _data_set("2wikimqa", request, path)


def samsum(
    request: TaskRequest,
    path: FileArgument,
    examples: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False, help="The file of the examples.")
    ] = None,
) -> EvalTask:
    """SAMSum, summaries of dialogues after examples: Rouge-L."""
    return _data_set("samsum", request, path, examples=examples)


def multinews(request: TaskRequest, path: FileArgument) -> EvalTask:
    """Multi-News, summaries of several articles: Rouge-L."""
    return _data_set("multinews", request, path)


def longbench(
    request: TaskRequest,
    path: FileArgument,
    subtask: Annotated[
        str | None, typer.Option(help="Which subtask, where PATH is a folder or a file of another name.")
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole-documents",
            help="Give the model all documents, each as one chunk, instead of cutting and searching them; with the method "
            "prompt_cache that is Prompt Cache's own evaluation. Examples and code are packed into chunks as ever.",
        ),
    ] = False,
) -> EvalTask:
    """A subtask of LongBench, by its own metric."""
    return _data_set("longbench", request, path, subtask=subtask, whole=whole)


def ruler(
    request: TaskRequest,
    subtasks: Annotated[
        str | None, typer.Option(help="Subtasks, comma-separated; by default the eleven of A3's Table 5.")
    ] = None,
    context_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of the chunks of a text together.")] = 4096,
) -> EvalTask:
    """RULER, generated: the share of the answers that are found. --questions counts those of each subtask."""
    from cacheblend_lab.eval.generated import RULER_SUBTASKS, ruler_task

    return ruler_task(
        request.tokenizer(),
        subtasks=RULER_SUBTASKS if subtasks is None else parse_names(subtasks),
        num_questions=request.questions or 100,
        context_tokens=context_tokens,
        chunk_tokens=request.chunk_tokens,
        seed=request.seed,
    )


def needle(
    request: TaskRequest,
    lengths: Annotated[str, typer.Option(help="Maximum tokens of a text's chunks together, comma-separated.")] = (
        "1024,2048,3072,4096"
    ),
    depths: Annotated[str, typer.Option(help="Where the needle stands, from 0 to 1, comma-separated.")] = (
        "0,0.25,0.5,0.75,1"
    ),
    across: Annotated[
        bool, typer.Option("--across", help="Let the needle's key end one chunk and its value begin the next.")
    ] = False,
) -> EvalTask:
    """A needle in a haystack, generated: what is found by depth and length. --questions counts those of each pair."""
    from cacheblend_lab.eval.generated import needle_task

    return needle_task(
        request.tokenizer(),
        depths=parse_ratios(depths),
        lengths=parse_counts(lengths),
        num_per_cell=request.questions or 5,
        seed=request.seed,
        chunk_tokens=request.chunk_tokens,
        across=across,
    )


def _data_set(name: str, request: TaskRequest, path: Path, **options: Any) -> EvalTask:
    from cacheblend_lab.eval.datasets import load_task

    return load_task(name, path, limit=request.questions, **options)


TASKS: dict[str, TaskMaker] = {
    "qa": qa,
    "reference": reference,
    "musique": musique,
    "2wikimqa": wikimqa,
    "samsum": samsum,
    "multinews": multinews,
    "longbench": longbench,
    "ruler": ruler,
    "needle": needle,
}
"""Every task by the name of its command."""
