"""``cacheblend-rag ask``: a question about what was warmed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.cli.options import (
    AnswerTokensOption,
    CompareOption,
    JsonOption,
    QuestionArgument,
    RatioOption,
    SelectorOption,
    StoredModelOption,
    StoreOption,
    StreamOption,
    TopKOption,
)
from cacheblend_rag.cli.output import console, print_answer, say_same, say_seconds, show_table, write_json
from cacheblend_rag.cli.warm import warmed

if TYPE_CHECKING:
    from cacheblend_rag.documents.library import Match
    from cacheblend_rag.engine import GenerationResult

__all__ = ["ask"]


def ask(
    question: QuestionArgument,
    store: StoreOption = Path(".cacheblend"),
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
    with warmed(store, model, None, recompute_ratio=ratio, selector=selector) as (engine, library, name):
        found = library.search(question, top_k)
        results = print_answer(engine, library.prompt(question, found), max_new_tokens, stream=stream, compare=compare)
        embedding = library.embedding.name
    _show(found, *results)
    sources = [
        {
            "id": match.passage.id,
            "file": match.passage.source,
            "position": match.passage.position,
            "distance": match.distance,
        }
        for match in found
    ]
    rows = [
        {"question": question, "method": method, "answer": each.text, **each.report.to_dict(), "sources": sources}
        for method, each in zip(("blend", "full"), results, strict=False)
    ]
    write_json(json_file, "ask", rows, model=name, embedding=embedding, top_k=top_k)


def _show(found: list[Match], blend: GenerationResult, full: GenerationResult | None = None) -> None:
    report, screen = blend.report, console()
    screen.print(f"[dim]{report}[/dim]")
    if full is not None:
        faster = full.report.ttft_s / report.ttft_s
        screen.print(
            f"[dim]full prefill: first token after {say_seconds(full.report.ttft_s)}, blend {faster:.1f}x as fast; "
            f"{say_same(blend, full)}[/dim]"
        )
    lines = [
        (
            _short(match.passage.source),
            match.passage.position,
            f"{match.distance:.3f}",
            chunk.tokens,
            chunk.recomputed_tokens,
            "hit" if chunk.hit else chunk.reason or "miss",
        )
        for match, chunk in zip(found, report.chunks, strict=True)
    ]
    show_table("sources", ("file", "passage", "distance", "tokens", "recomputed", "KV"), lines)


def _short(source: str) -> str:
    relative = os.path.relpath(source)
    return source if relative.startswith("..") else relative
