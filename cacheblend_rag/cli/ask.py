"""``cacheblend-rag ask``: a question about what was warmed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import AnswerTokensOption, CompareOption, JsonOption, StoreOption, StreamOption
from cacheblend_rag.cli.output import console, print_answer, say_seconds, show_table, write_json
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.documents import Match
    from cacheblend_rag.engine import GenerationResult

__all__ = ["ask"]


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    store: StoreOption = Path(".cacheblend"),
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Hugging Face id or folder; by default what the store was warmed with."
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many passages to answer from.")] = 6,
    ratio: Annotated[
        str | None, typer.Option(help='Share of the passages\' tokens to recompute, 0 to 1, or "auto".')
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(help="Which tokens to recompute: auto, hkvd, query, a3, boundary, random, none, full."),
    ] = None,
    max_new_tokens: AnswerTokensOption = 128,
    compare: CompareOption = False,
    stream: StreamOption = None,
    json_file: JsonOption = None,
) -> None:
    """Answer a question from what was warmed, by blended prefill."""
    from cacheblend_rag.chunk import Chunk
    from cacheblend_rag.documents import (
        Embedding,
        Library,
        LibrarySettings,
        is_library,
        kv_folder,
        passage_config,
        question_prompt,
        reading_order,
    )

    if not question.strip():
        raise typer.BadParameter("the question is empty", param_hint="QUESTION")
    known = LibrarySettings.load(store)
    if known is None or not is_library(store):
        raise ConfigError(f"nothing was warmed into {store}; run: cacheblend-rag warm PATH --store {store}")
    name = model or known.model
    folder, config = kv_folder(store), passage_config()
    with open_engine(name, store=folder, config=config, recompute_ratio=ratio, selector=selector) as engine:
        with Library(store, engine, Embedding(known.embedding)) as library:
            if not len(library):
                raise ConfigError(f"{store} holds no passages; run: cacheblend-rag warm PATH --store {store}")
            found = reading_order(library.search(question, top_k))
        prompt = question_prompt(
            engine.tokenizer, question, [Chunk(match.passage.text, match.passage.id) for match in found]
        )
        if compare:
            # Whoever comes first pays for the first use of the model's kernels.
            engine.generate(prompt, max_new_tokens=1, config=engine.config.replace(enabled=False))
        results = {"blend": print_answer(engine, prompt, max_new_tokens, stream)}
        if compare:
            plain = engine.config.replace(enabled=False)
            results["full"] = engine.generate(prompt, max_new_tokens=max_new_tokens, config=plain)
    _show(results, found)
    if name == "reference":
        console().print(
            "[dim]the reference model reads the sentences of its own corpus only; for files of yours: "
            "cacheblend-rag warm PATH --model NAME[/dim]"
        )
    rows = [_row(method, question, result, found) for method, result in results.items()]
    write_json(json_file, "ask", rows, model=name, embedding=known.embedding, top_k=top_k)


def _show(results: dict[str, GenerationResult], found: list[Match]) -> None:
    report = results["blend"].report
    screen = console()
    screen.print(f"[dim]first token after {say_seconds(report.ttft_s)}; {_work(results['blend'])}[/dim]")
    if "full" in results:
        full = results["full"]
        same = "the same answer" if full.text == results["blend"].text else f"its answer: {full.text}"
        faster = full.report.ttft_s / report.ttft_s
        screen.print(
            f"[dim]full prefill: first token after {say_seconds(full.report.ttft_s)}, blend {faster:.1f}x as fast; {same}[/dim]"
        )
    lines = []
    for match, chunk in zip(found, report.chunks, strict=True):
        state = "hit" if chunk.hit else chunk.reason or "miss"
        lines.append(
            (
                _short(match.passage.source),
                match.passage.position,
                f"{match.distance:.3f}",
                chunk.tokens,
                chunk.recomputed_tokens,
                state,
            )
        )
    show_table("sources", ("file", "passage", "distance", "tokens", "recomputed", "KV"), lines)


def _work(result: GenerationResult) -> str:
    report = result.report
    if report.fallback_reason is not None:
        return f"prefilled as a whole: {report.fallback_reason}"
    return (
        f"{report.recomputed_tokens} of {report.context_tokens} passage tokens recomputed ({report.selector}, "
        f"{report.charged_ratio:.1%} of the work), {report.hits} of {report.hits + report.misses} passages from stored KV"
    )


def _short(source: str) -> str:
    relative = os.path.relpath(source)
    return source if relative.startswith("..") else relative


def _row(method: str, question: str, result: GenerationResult, found: list[Match]) -> dict[str, Any]:
    report = result.report
    row = {"question": question, "method": method, "answer": result.text, **report.to_dict()}
    row["sources"] = [
        {
            "id": match.passage.id,
            "file": match.passage.source,
            "position": match.passage.position,
            "distance": match.distance,
        }
        for match in found
    ]
    return row
