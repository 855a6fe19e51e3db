"""``cacheblend-rag bench batch``: a batch through LangChain against one prompt after the other."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import make_quiet, say_seconds, show_table, write_json
from cacheblend_rag.extras import needs_extra
from cacheblend_rag.lab.cli.bench_output import measuring, say_range
from cacheblend_rag.lab.cli.options import RepeatsOption

__all__ = ["batch"]


def batch(
    model: ModelOption = "reference",
    prompts: Annotated[int, typer.Option(min=2, help="Prompts of the batch.")] = 16,
    chunks: Annotated[int, typer.Option(min=1, help="Stored chunks in each prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="About how many tokens each chunk has.")] = 64,
    question_tokens: Annotated[int, typer.Option(min=4, help="About how many tokens each question has.")] = 16,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32,
    ratio: Annotated[float, typer.Option(help="Recompute ratio.")] = 0.15,
    repeats: RepeatsOption = 5,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the throughput of LangChain's ``batch`` against ``invoke`` for one prompt after the other.

    All chunks are stored. "faster" compares round by round.
    """
    with needs_extra("langchain", "bench batch"):
        from cacheblend_rag.lab.bench.batch import BatchBench, BatchSetting

    make_quiet()
    setting = BatchSetting(
        model=model,
        prompts=prompts,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        output_tokens=output_tokens,
        ratio=ratio,
        repeats=repeats,
        seed=seed,
    )
    with (
        measuring("loading the model and storing the chunks") as progress,
        BatchBench(setting) as bench,
    ):
        rows = bench.measure(progress)
    lines = [
        (
            row.method,
            say_seconds(row.elapsed_s),
            say_range(row.elapsed_min_s, row.elapsed_max_s),
            f"{row.prompts_per_s:.2f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.speedup:.2f}x",
            row.batch_size,
            row.hits,
            f"{row.equal_answers} of {prompts}",
        )
        for row in rows
    ]
    title = (
        f"{model}: {prompts} prompts of {min(bench.prompt_tokens)} to {max(bench.prompt_tokens)} tokens, {chunks} chunks each, "
        f"{output_tokens} output tokens, median of {repeats}"
    )
    columns = ("method", "all answers", "range", "prompts/s", "tokens/s", "faster", "together", "hits", "same answers")
    show_table(title, columns, lines, text_columns=1)
    write_json(json_file, "bench batch", [asdict(row) for row in rows], model=model, setting=asdict(setting))
