"""``cacheblend-rag eval``: fidelity."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import console, parse_ratios, say_seconds, show_table, write_json

__all__ = ["eval_app"]

eval_app = typer.Typer(help="Measure how good the answers are.", no_args_is_help=True, rich_markup_mode=None)


@eval_app.callback()
def _eval() -> None:
    """Keep `reference` a subcommand though it is the only one."""


@eval_app.command()
def reference(
    questions: Annotated[int, typer.Option(min=1, help="How many questions.")] = 500,
    min_chunks: Annotated[int, typer.Option(min=1, help="Least chunks of a context.")] = 12,
    ratios: Annotated[str, typer.Option(help="Recompute ratios, comma-separated.")] = "0.15,0.3",
    selectors: Annotated[
        str,
        typer.Option(help="Selectors, comma-separated; each stands beside random at equal ratio and at equal charge."),
    ] = "hkvd",
    codecs: Annotated[
        str,
        typer.Option(
            help="How stored KV is packed, comma-separated; each other than native adds a row for each selector and ratio."
        ),
    ] = "native",
    seed: Annotated[int, typer.Option(help="The questions follow from it.")] = 7,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one a core, or one with a GPU.")
    ] = None,
    model: ModelOption = "reference",
    json_file: JsonOption = None,
) -> None:
    """Ask the reference model held-out questions by full prefill, plain reuse and blend: exact match and F1 by kind of question.

    Names, values and templates are none that the model was trained on. "random = hkvd 0.15" is random with as much work as hkvd
    at 0.15 did on that question, its full first layer included.
    """
    from cacheblend_rag.eval import EvalSetting, default_workers, evaluate

    setting = EvalSetting(
        num_questions=questions,
        min_chunks=min_chunks,
        seed=seed,
        ratios=parse_ratios(ratios),
        selectors=tuple(name.strip() for name in selectors.split(",")),
        codecs=tuple(name.strip() for name in codecs.split(",")),
    )
    started = time.perf_counter()
    screen = console(stderr=True)
    with open_engine(model) as engine, screen.status("asking") as status:
        rows = evaluate(
            engine,
            model,
            setting,
            workers=workers or default_workers(),
            progress=lambda done, total: status.update(f"asking, {done} of {total} questions"),
        )
    seconds = time.perf_counter() - started
    kinds = list(dict.fromkeys(row.kind for row in rows))
    by_method = {row.method: [each for each in rows if each.method == row.method] for row in rows}
    for measure, name in (("exact_match", "exact match"), ("f1", "F1")):
        shares = [
            (method, f"{chosen[0].charged_ratio:.3f}", *(f"{getattr(row, measure):.3f}" for row in chosen))
            for method, chosen in by_method.items()
        ]
        show_table(f"{name} by kind of question", ("method", "charged", *kinds), shares)
    lines = [
        (
            method,
            None if chosen[0].recompute_ratio is None else f"{chosen[0].recompute_ratio:.3f}",
            chosen[0].codec,
            f"{chosen[0].charged_ratio:.3f}",
            f"{chosen[0].same_as_full:.3f}",
            say_seconds(chosen[0].ttft_s),
        )
        for method, chosen in by_method.items()
    ]
    show_table("all questions", ("method", "ratio", "codec", "charged", "same as full", "first token"), lines)
    typer.echo(f"{questions} questions in {say_seconds(seconds)}")
    write_json(
        json_file,
        "eval reference",
        [asdict(row) for row in rows],
        model=model,
        setting=asdict(setting),
        seconds=seconds,
    )
