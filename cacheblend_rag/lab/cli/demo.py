"""``cacheblend-rag demo``: everything at once, on one screen."""

from __future__ import annotations

import time
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, ModelOption, output_option
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    on_interrupt,
    say_seconds,
    write_json,
    write_page,
)

__all__ = ["demo"]


def demo(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", file_okay=False, help="Where Chroma and the KV are kept.")
    ] = Path(".demo"),
    questions: Annotated[int, typer.Option(min=1, help="How many questions.")] = 14,
    retrieved: Annotated[int, typer.Option("--top-k", min=1, help="How many chunks are retrieved for each.")] = 14,
    model: ModelOption = "reference",
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every answer as well.")] = False,
    html_file: Annotated[
        Path | None, output_option("--html", "Write the page of the example's answer to FILE, not into the folder.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Put documents into Chroma through LlamaIndex and LangChain, and answer questions about them in four ways.

    Their KV is computed on the way in. A second run finds everything there and encodes nothing.
    """
    started = time.perf_counter()
    from cacheblend_rag.chunk import BLANK_LINE
    from cacheblend_rag.config import EngineConfig
    from cacheblend_rag.demo.corpus import demo_chunks
    from cacheblend_rag.lab.demo.example import best_example
    from cacheblend_rag.lab.demo.run import METHODS, DemoEngine, demo_frameworks, run_demo, score
    from cacheblend_rag.lab.demo.screen import show_answers, show_demo
    from cacheblend_rag.lab.demo.size import at_real_size
    from cacheblend_rag.reference.prompt import TRAINED_TOKENS

    make_quiet()
    demo_frameworks()
    with (
        on_interrupt(
            lambda: f"what was put into Chroma is kept in {folder} with its KV; the same command goes on from there"
        ),
        console(stderr=True).status("loading the model") as status,
        DemoEngine.from_pretrained(model, store=folder / "kv", config=EngineConfig(separator=BLANK_LINE)) as engine,
    ):
        assert isinstance(engine, DemoEngine)
        ingestions, asked = run_demo(
            folder, engine, questions=questions, retrieved=retrieved, progress=lambda text: status.update(text)
        )
        example = best_example(asked)
        shown = example.asked if example else {each.method: each for each in asked[: len(METHODS)]}
        size = None
        # Another model has a size of its own.
        if model == "reference":
            status.update("the example's documents at the size of a model that people use")
            chunks = demo_chunks(shown["blend"].framework)
            documents = {chunks[place].metadata["document"] for place in shown["blend"].places}
            texts = [chunk.text for chunk in chunks if chunk.metadata["document"] in documents]
            # As many as the reference model is given of them.
            lengths = accumulate(len(engine.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
            texts = [text for text, length in zip(texts, lengths, strict=True) if length <= TRAINED_TOKENS]
            size = at_real_size(engine.tokenizer, texts, shown["blend"].question.text)
        status.stop()
        if verbose:
            show_answers(asked)
        show_demo(ingestions, score(asked), retrieved, example, size)
        write_page(html_file or folder / "answer.html", [shown[method].result for method in ("blend", "full")])
    seconds = time.perf_counter() - started
    console().print(f"[dim]{say_seconds(seconds)} in all; kept in {folder}[/dim]")
    write_json(json_file, "demo", [each.to_dict() for each in asked], model=model, top_k=retrieved, seconds=seconds)
