"""``cacheblend-rag inspect``: a page that shows what answering a question did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import (
    AnswerTokensOption,
    LibraryOption,
    QuestionArgument,
    RatioOption,
    SelectorOption,
    StoredModelOption,
    TopKOption,
    output_option,
)
from cacheblend_rag.cli.output import console, print_answer
from cacheblend_rag.cli.warm import warmed
from cacheblend_rag.errors import ConfigError

__all__ = ["inspect"]


def inspect(
    question: QuestionArgument,
    folder: LibraryOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    top_k: TopKOption = 6,
    ratio: RatioOption = None,
    selector: SelectorOption = None,
    max_new_tokens: AnswerTokensOption = 128,
    html_file: Annotated[Path, output_option("--html", "Where the page is written.")] = Path("inspect.html"),
    full: Annotated[bool, typer.Option("--full", help="Also answer by full prefill, and show both.")] = False,
    attention: Annotated[
        bool, typer.Option("--attention", help="Show the share of the answer's attention that went to each passage.")
    ] = False,
) -> None:
    """Answer a question as ask does, and write a page that shows what happened to every token and where the time went."""
    from cacheblend_attachments.inspector import inspector_page
    from cacheblend_attachments.sources import SourceAttention

    with warmed(folder, model, None, recompute_ratio=ratio, selector=selector) as (engine, library, _):
        if attention:
            engine.attach(SourceAttention())
        prompt = library.prompt(question, library.search(question, top_k))
        if not full:
            # The first request pays for the first use of the model's kernels, which a page is not about.
            engine.generate(prompt, 1, blend=engine.blend.replace(enabled=False))
        results = print_answer(engine, prompt, max_new_tokens, stream=None, compare=full)
        page = inspector_page(engine, *(each.report for each in results))
    try:
        html_file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {html_file} cannot be written: {error.strerror}") from error
    console().print(f"the page is {html_file}: open it in a browser", soft_wrap=True, markup=False)
