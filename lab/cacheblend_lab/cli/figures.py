"""``cacheblend-rag eval figures`` and ``eval draw``: the papers' figures, from runs of one's own."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cacheblend_attachments.cli.calibrate import parse_ratios
from cacheblend_lab.cli.eval_tasks import TASKS, TaskRequest
from cacheblend_lab.cli.options import CutTokensOption, DrawnSeedOption, FinderOption, TopKOption
from cacheblend_lab.figures import needs_drawing
from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import progress_bar, say_seconds, show_table, write_json
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_lab.eval.inside_result import InsideResult

__all__ = ["draw", "figures"]

OutOption = Annotated[
    Path, typer.Option("--out", metavar="DIR", file_okay=False, help="The folder for the figures; created if missing.")
]
Ending = Literal["svg", "png", "pdf"]
EndingOption = Annotated[Ending, typer.Option("--format", help="The figures' format.")]
_DIGITS = 6


def figures(
    out: OutOption,
    model: ModelOption = "reference",
    task: Annotated[
        str, typer.Option(help=f"The task whose questions are looked at: {', '.join(TASKS)}.")
    ] = "reference",
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", exists=True, help="The file of a task that is a data set.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="How many questions.")] = 40,
    selectors: Annotated[
        str,
        typer.Option(
            help="Selectors, comma-separated; and oracle_deviation, oracle_attention: the tokens whose KV deviates most, and "
            "those that the question attends to most, both as only full prefill knows them."
        ),
    ] = "hkvd,random,query",
    ratios: Annotated[str, typer.Option(help="Recompute ratios, comma-separated.")] = "0,0.05,0.1,0.15,0.2,0.3,0.5,1",
    shown_ratio: Annotated[
        float | None,
        typer.Option(
            help="The one of them at which overlap and attention loss by layer are drawn; by default the nearest to 0.15."
        ),
    ] = None,
    chunk_tokens: CutTokensOption = 512,
    top_k: TopKOption = 6,
    embeddings: FinderOption = None,
    seed: DrawnSeedOption = 7,
    ending: EndingOption = "svg",
    json_file: JsonOption = None,
) -> None:
    """Draw what blending changes inside the model: CacheBlend's Figures 6, 7 and 8, A3's Figures 2 and 3.

    Every question is prefilled in full, by plain reuse, and by each selector at each ratio; nothing is generated.
    """
    from cacheblend_lab.eval import RetrievalSetting
    from cacheblend_lab.eval.inside_figures import draw_inside
    from cacheblend_lab.eval.inside_result import InsideSetting, look_inside
    from cacheblend_lab.eval.methods import split_names
    from cacheblend_lab.settings import engine_settings

    needs_drawing()
    asked = parse_ratios(ratios)
    setting = InsideSetting(
        tuple(split_names(selectors)),
        asked,
        min(asked, key=lambda ratio: abs(ratio - 0.15)) if shown_ratio is None else shown_ratio,
        RetrievalSetting(chunk_tokens, top_k, embeddings),
    )
    if task not in TASKS:
        raise ConfigError(f"task {task!r} is unknown; choose one of {', '.join(TASKS)}")
    started = time.perf_counter()
    config = engine_settings()["config"]
    with open_engine(model, config=config) as engine, progress_bar("looking") as progress:
        request = TaskRequest(questions, seed, chunk_tokens, top_k, embeddings, lambda: engine.tokenizer)
        made = TASKS[task](request, **_own(task, data))
        result = look_inside(engine, made, setting, progress)
    seconds = time.perf_counter() - started
    title = f"{made.name}, {model}: {len(result.questions)} questions"
    _show(result, title)
    typer.echo(f"{len(result.questions)} questions looked at in {say_seconds(seconds)}.")
    for reason, count in result.skipped.items():
        typer.echo(f"{count} skipped: {reason}.")
    for file in draw_inside(result, model, out, ending):
        typer.echo(f"drawn: {file}")
    write_json(
        json_file,
        "eval figures",
        [_plain(asdict(row)) for row in result.rows],
        model=model,
        task=made.name,
        setting={
            "selectors": list(setting.selectors),
            "ratios": list(setting.ratios),
            "shown_ratio": setting.shown_ratio,
            "seed": seed,
        },
        questions=list(result.questions),
        tokens=list(result.tokens),
        skipped=result.skipped,
        attention_norm=_plain(result.attention_norm),
        kv_deviation=_plain({str(layer): values for layer, values in result.kv_deviation.items()}),
        rank_correlation=_plain({str(layer): asdict(values) for layer, values in result.correlation.items()}),
        overlap={
            "question": result.questions[0],
            "high_attention": result.overlap.high_attention.tolist(),
            "recomputed": {name: tokens.tolist() for name, tokens in result.overlap.recomputed.items()},
        },
        seconds=seconds,
    )


def draw(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", exists=True, dir_okay=False, help="Files of eval TASK --json and bench ttft --json."
        ),
    ],
    out: OutOption,
    methods: Annotated[
        str,
        typer.Option(
            help='Methods to draw, comma-separated ("full,reuse,hkvd 0.15"); by default all that every file has.'
        ),
    ] = "",
    ending: EndingOption = "svg",
) -> None:
    """Draw runs side by side: quality over chunks (CacheBlend, Figure 2), TTFT over length (Prompt Cache, Figure 5).

    Evaluations differ in their number of chunks (--min-chunks, --top-k), runs of bench ttft in --chunks or --chunk-tokens.
    """
    from cacheblend_lab.eval.methods import split_names
    from cacheblend_lab.eval.plots import draw_quality_over_chunks, draw_ttft_over_length
    from cacheblend_lab.eval.runs import read_runs
    from cacheblend_lab.figures import save_figure

    runs = read_runs(files, split_names(methods))
    drawn: dict[str, Any] = {}
    if runs.quality:
        drawn["quality-over-chunks"] = draw_quality_over_chunks(runs.quality, runs.metric)
    if runs.ttft_s:
        drawn["ttft-over-length"] = draw_ttft_over_length(runs.ttft_s)
    for name, figure in drawn.items():
        typer.echo(f"drawn: {save_figure(figure, out / f'{name}.{ending}')}")


def _own(task: str, data: Path | None) -> dict[str, Any]:
    """Return those options of a task's own that are needed here; as a function, a command has plain defaults for the others."""
    names = inspect.signature(TASKS[task]).parameters
    if ("path" in names) != (data is not None):
        raise ConfigError(
            f"task {task!r} is read from a file; name it by --data"
            if "path" in names
            else f"task {task!r} takes no --data"
        )
    # All questions about one context see the same KV: one each says more about the spread.
    needed = {"path": data, "per_context": 1}
    return {name: value for name, value in needed.items() if name in names}


def _show(result: InsideResult, title: str) -> None:
    rows = [
        (
            row.selector,
            f"{row.ratio:g}",
            f"{row.charged_ratio:.3f}",
            f"{row.attention_deviation.median:.3f}",
            f"{row.attention_deviation.low:.3f} to {row.attention_deviation.high:.3f}",
            f"{row.of_reuse:.3f}",
            None if row.hit_rate is None else f"{row.hit_rate:.3f}",
        )
        for row in result.rows
    ]
    columns = ("selector", "ratio", "charged", "attention deviation", "quartiles", "of reuse", "high attention hit")
    show_table(title, columns, rows)
    correlation = [
        (f"{layer}, {layer + 1}", f"{each.median:.3f}", f"{each.low:.3f} to {each.high:.3f}")
        for layer, each in result.correlation.items()
    ]
    if correlation:
        show_table("Rank correlation of KV deviation", ("layers", "median", "quartiles"), correlation)


def _plain(value: Any) -> Any:
    """Return figures as JSON has them, with as many digits as mean something; NaN as null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    return value
