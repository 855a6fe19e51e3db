"""``cacheblend-rag ask`` and ``chat``: questions about what was warmed."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.markup import escape

from cacheblend_rag.cli.options import (
    AnswerTokensOption,
    CompareOption,
    JsonOption,
    LibraryOption,
    QuestionArgument,
    RatioOption,
    SelectorOption,
    StoredModelOption,
    StreamOption,
    TopKOption,
)
from cacheblend_rag.cli.output import console, print_answer, say_same, say_seconds, show_table, write_json
from cacheblend_rag.cli.warm import warmed
from cacheblend_rag.errors import CacheBlendError

__all__ = ["ask", "chat"]


def ask(
    question: QuestionArgument,
    folder: LibraryOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    top_k: TopKOption = 6,
    ratio: RatioOption = None,
    selector: SelectorOption = None,
    max_new_tokens: AnswerTokensOption = 128,
    compare: CompareOption = False,
    stream: StreamOption = None,
    json_file: JsonOption = None,
) -> None:
    """Answer a question from the warmed documents, by blended prefill."""
    with warmed(folder, model, None, recompute_ratio=ratio, selector=selector) as (engine, library, name):
        found = library.search(question, top_k)
        results = print_answer(engine, library.prompt(question, found), max_new_tokens, stream=stream, compare=compare)
        embedding = library.embedding.name
    blend, screen = results[0], console()
    screen.print(f"[dim]{blend.report}[/dim]")
    for full in results[1:]:
        first_s = full.report.ttft_s
        screen.print(
            f"[dim]full prefill: first token after {say_seconds(first_s)}, blend {first_s / blend.report.ttft_s:.1f}x as "
            f"fast; {say_same(blend, full)}[/dim]"
        )
    lines = [
        (
            os.path.relpath(str(match.chunk.document)),
            match.chunk.start,
            f"{match.distance:.3f}",
            used.tokens,
            used.recomputed_tokens,
            "hit" if used.hit else used.reason or "miss",
        )
        for match, used in zip(found, blend.report.chunks, strict=True)
    ]
    show_table("sources", ("file", "begins at", "distance", "tokens", "recomputed", "KV"), lines)
    sources = [
        {"id": match.chunk.id, "file": match.chunk.document, "start": match.chunk.start, "distance": match.distance}
        for match in found
    ]
    rows = [
        {"question": question, "method": method, "answer": each.text, **each.report.to_dict(), "sources": sources}
        for method, each in zip(("blend", "full"), results, strict=False)
    ]
    write_json(json_file, "ask", rows, model=name, embedding=embedding, top_k=top_k)


def chat(
    folder: LibraryOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    top_k: TopKOption = 6,
    ratio: RatioOption = None,
    selector: SelectorOption = None,
    max_new_tokens: AnswerTokensOption = 128,
) -> None:
    """Answer questions from the warmed documents, as `ask` does, with a model that is loaded once.

    Each is answered on its own: what was asked before is not part of it. Ctrl-D ends.
    """
    import readline  # noqa: F401  # which lines are edited and recalled by

    with warmed(folder, model, None, recompute_ratio=ratio, selector=selector) as (engine, library, name):
        typer.echo(f"{name}, {len(library)} passages in {folder}; ask, or end with Ctrl-D", err=True)
        while (question := _asked()) is not None:
            try:
                found = library.search(question, top_k)
                [result] = print_answer(
                    engine, library.prompt(question, found), max_new_tokens, stream=True, compare=False
                )
            except CacheBlendError as error:
                typer.echo(f"error: {error}", err=True)
                continue
            files = dict.fromkeys(os.path.relpath(str(match.chunk.document)) for match in found)
            console().print(f"[dim]{result.report}; from {escape(', '.join(files))}[/dim]")


def _asked() -> str | None:
    """Return the next line that is not blank, or None at the end."""
    try:
        while not (line := input("> ").strip()):
            pass
    except EOFError:
        print()
        return None
    return line
