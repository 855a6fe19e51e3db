"""``cacheblend-rag demo``: everything at once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import (
    console,
    make_quiet,
    on_interrupt,
    parse_ratios,
    say_seconds,
    show_table,
    write_json,
)

__all__ = ["demo"]


def demo(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", file_okay=False, help="Where Chroma and the KV are kept.")
    ] = Path(".demo"),
    questions: Annotated[int, typer.Option(min=1, help="How many questions.")] = 12,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each is asked by each method; the median time counts.")
    ] = 3,
    context_chunks: Annotated[
        int, typer.Option(min=1, help="How many chunks each is answered from, rounded up to whole documents.")
    ] = 16,
    ratios: Annotated[str, typer.Option(help="Ratios to blend at beside the default one, comma-separated.")] = "0.15",
    model: ModelOption = "reference",
    json_file: JsonOption = None,
) -> None:
    """Put documents into Chroma through LlamaIndex and LangChain, and answer questions by full prefill and blend.

    Their KV is computed on the way in. A second run finds everything there and encodes nothing.
    """
    others = parse_ratios(ratios)
    from cacheblend_rag.demo.run import DemoEngine, demo_frameworks, run_demo, summarize

    started = time.perf_counter()
    make_quiet()
    demo_frameworks()
    with (
        on_interrupt(
            lambda: f"what was put into Chroma is kept in {folder} with its KV; the same command goes on from there"
        ),
        console(stderr=True).status("loading the model") as status,
        DemoEngine.from_pretrained(model, store=folder / "kv") as engine,
    ):
        assert isinstance(engine, DemoEngine)
        ingestions, rows = run_demo(
            folder,
            engine,
            ratios=others,
            questions=questions,
            rounds=rounds,
            context_chunks=context_chunks,
            progress=lambda text: status.update(text),
        )
    for framework, question in dict.fromkeys((row["framework"], row["question"]) for row in rows):
        chosen = [row for row in rows if (row["framework"], row["question"]) == (framework, question)]
        lines = [
            (
                row["method"],
                row["answer"],
                "yes" if row["match"] else "no",
                say_seconds(row["ttft_s"]),
                f"{row['speedup']:.1f}x",
                None if row["hits"] is None else f"{row['hits']}/{row['chunks']}",
            )
            for row in chosen
        ]
        note = "" if chosen[0]["supported"] else "; not all it needs was retrieved"
        title = f"{framework}: {question} ({chosen[0]['kind']}; {chosen[0]['gold']}{note})"
        show_table(title, ("method", "answer", "right", "first token", "speedup", "hits"), lines, text_columns=2)
    summaries = summarize(rows)
    summary_lines = [
        (
            line["framework"],
            line["method"],
            f"{round(line['match'] * line['questions'])}/{line['questions']}",
            f"{round(line['same_as_full'] * line['questions'])}/{line['questions']}",
            say_seconds(line["ttft_s"]),
            f"{line['speedup']:.1f}x",
            f"{line['charged_ratio']:.2f}",
            None if line["hits"] is None else f"{line['hits']}/{line['chunks']}",
        )
        for line in summaries
    ]
    columns = ("framework", "method", "right", "same as full", "first token", "speedup", "charged", "hits")
    show_table("summary (medians over the questions)", columns, summary_lines, text_columns=2)
    for each in ingestions:
        typer.echo(
            f"{each['framework']}: {each['chunks']} chunks in Chroma, {each['encoded']} encoded in this run, "
            f"{say_seconds(each['seconds'])}"
        )
    seconds = time.perf_counter() - started
    typer.echo(f"{say_seconds(seconds)} in all; kept in {folder}")
    write_json(
        json_file,
        "demo",
        rows,
        model=model,
        context_chunks=context_chunks,
        seconds=seconds,
        ingestion=ingestions,
        summary=summaries,
    )
