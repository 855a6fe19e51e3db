"""``cacheblend-rag eval``: how good answers are, one command for each task."""

from __future__ import annotations

import inspect
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from cacheblend_attachments.cli.calibrate import parse_ratios
from cacheblend_lab.cli.eval_output import draw_result, show_result, write_markdown
from cacheblend_lab.cli.eval_tasks import TASKS, TaskMaker, TaskRequest
from cacheblend_lab.cli.figures import draw, figures
from cacheblend_lab.cli.options import CutTokensOption, DrawnSeedOption, FinderOption, command_of, plain_values
from cacheblend_lab.figures import needs_drawing
from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption, MarkdownOption, ModelOption
from cacheblend_rag.cli.output import STANDARD_OUTPUT, on_interrupt, progress_bar, say_seconds, write_json
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_lab.eval import EvalSetting
    from cacheblend_rag.engine import BlendEngine

__all__ = ["eval_app"]

eval_app = typer.Typer(help="Measure how good the answers are.", no_args_is_help=True, rich_markup_mode=None)

_METHODS = "full,prefix,reuse"


def _shared(
    model: ModelOption = "reference",
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, comma-separated: full, prefix, reuse, map_reduce, map_rerank; a selector with a ratio "
            '("hkvd 0.15"), with a charge ("hkvd @0.15"), with settings ("hkvd 0.15 companions=neutral"); "random = hkvd 0.15".'
        ),
    ] = _METHODS,
    selectors: Annotated[
        str, typer.Option(help="Selectors, comma-separated, asked at each ratio and each charge beside random.")
    ] = "hkvd",
    ratios: Annotated[str, typer.Option(help="Recompute ratios, comma-separated; empty for none.")] = "0.15,0.3",
    charges: Annotated[
        str, typer.Option(help="Charges (work on chunk tokens) to find ratios for, comma-separated; none by default.")
    ] = "",
    codecs: Annotated[
        str,
        typer.Option(help="Codecs of stored KV, comma-separated; each adds a row for each selector and ratio."),
    ] = "",
    questions: Annotated[
        int | None, typer.Option(min=1, help="How many questions; by default all of a file, or the task's own number.")
    ] = None,
    seed: DrawnSeedOption = 7,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer; by default the task's.")
    ] = None,
    chunk_tokens: CutTokensOption = 512,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", min=1, help="How many chunks are retrieved, where texts are cut (6 by default) or searched."
        ),
    ] = None,
    embeddings: FinderOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; by default one a core, or one with a GPU.")
    ] = None,
    together: Annotated[
        bool,
        typer.Option(
            "--together/--one-by-one",
            help="Answer the questions of a context in one batch for each method that is a call of the engine: sooner, but then "
            "its times to the first token are not known.",
        ),
    ] = False,
    losses: Annotated[
        bool,
        typer.Option(
            "--losses/--answers-only",
            help="Say how likely each method finds the right answer, and how much of the gap between no context and full prefill "
            "it recovers.",
        ),
    ] = False,
    json_file: JsonOption = None,
    markdown: MarkdownOption = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="DIR",
            file_okay=False,
            help="Draw quality against time to first token into DIR, and for needle what is found by depth and length.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh/--resume",
            help="With --json FILE, answers are kept in FILE with .jsonl after it as they come. --resume goes on from there, "
            "--fresh begins anew.",
        ),
    ] = False,
) -> dict[str, Any]:
    """Return the options that all tasks share."""
    return locals()


def _command(name: str, maker: TaskMaker) -> None:
    """Add a task's command: its own options, then the shared ones."""
    # What makers return is imported when one runs.
    later = {"EvalTask": object}
    signature, hints = inspect.signature(maker), get_type_hints(maker, include_extras=True, localns=later)
    own = [each.replace(annotation=hints[each.name]) for each in list(signature.parameters.values())[1:]]
    hints = get_type_hints(_shared, include_extras=True)
    shared = [each.replace(annotation=hints[each.name]) for each in inspect.signature(_shared).parameters.values()]

    def run(**given: Any) -> None:
        mine = {each.name: given.pop(each.name) for each in own}
        _run(name, maker, mine, given)

    eval_app.command(name)(command_of([*own, *shared], run, maker.__doc__))


for _name, _maker in TASKS.items():
    _command(_name, _maker)


eval_app.command()(figures)
eval_app.command()(draw)


def _run(name: str, maker: TaskMaker, own: dict[str, Any], shared: dict[str, Any]) -> None:
    from cacheblend_lab.eval import default_workers, evaluate
    from cacheblend_lab.settings import engine_settings

    if shared["together"] and shared["plot"] is not None:
        raise ConfigError(
            "--plot draws quality over the time to the first token, which --together leaves unmeasured; leave one of them out"
        )
    if shared["plot"] is not None:
        needs_drawing()
    setting = _setting(shared)
    model, json_file = shared["model"], shared["json_file"]
    journal = None if json_file in (None, STANDARD_OUTPUT) else json_file.with_name(f"{json_file.name}.jsonl")
    opened: list[BlendEngine] = []
    started = time.perf_counter()
    with ExitStack() as stack:

        def engine() -> BlendEngine:
            if not opened:
                opened.append(stack.enter_context(open_engine(model, config=engine_settings()["config"])))
            return opened[0]

        request = TaskRequest(
            shared["questions"],
            shared["seed"],
            shared["chunk_tokens"],
            shared["top_k"],
            shared["embeddings"],
            lambda: engine().tokenizer,
        )
        task = maker(request, **own)
        for metric in task.metrics.values():
            # A package that one needs is found missing before minutes of answering.
            metric("", ("",))
        progress = stack.enter_context(progress_bar("asking"))
        stack.enter_context(
            on_interrupt(
                lambda: (
                    "nothing is kept of it; with --json FILE the same command goes on where it was"
                    if journal is None
                    else f"the answers until now are kept in {journal}; the same command goes on with the rest, without --fresh"
                )
            )
        )
        result = evaluate(
            engine(),
            model,
            task,
            setting,
            workers=shared["workers"] or default_workers(),
            journal=journal,
            fresh=shared["fresh"],
            progress=progress,
        )
    seconds = time.perf_counter() - started
    title = f"{task.name}, {model}"
    show_result(result, title)
    asked = result.questions - sum(result.skipped.values())
    facts = [f"{asked} of {result.questions} questions answered in {say_seconds(seconds)}."]
    if result.resumed:
        facts.append(f"{result.resumed} of them were taken from {journal}; --fresh asks them again.")
    if result.damaged_lines:
        facts.append(
            f"{result.damaged_lines} lines of {journal} could not be read, and their questions were asked again."
        )
    for reason, count in result.skipped.items():
        facts.append(f"{count} skipped: {reason}.")
    facts.append(f"Intervals are 95 %, from {setting.resamples} bootstrap samples of the {result.resampled}.")
    for fact in facts:
        typer.echo(fact)
    # Neither the time nor what was resumed is part of what was found.
    write_markdown(shared["markdown"], result, title, facts[-1 - len(result.skipped) :])
    write_json(
        json_file,
        f"eval {name}",
        [asdict(row) for row in result.rows],
        model=model,
        task=task.name,
        setting=plain_values(own | {key: value for key, value in shared.items() if key not in _PLACES}),
        methods=[method.describe() for method in setting.methods],
        questions=result.questions,
        chunks=task.mean_chunks(setting.retrieval.top_k),
        skipped=result.skipped,
        resampled=result.resampled,
        seconds=seconds,
    )
    # What was found is safe before anything is drawn.
    if shared["plot"] is not None:
        for file in draw_result(shared["plot"], result, title):
            typer.echo(f"drawn: {file}")


_PLACES = ("json_file", "markdown", "plot", "fresh", "workers", "model")


def _setting(shared: dict[str, Any]) -> EvalSetting:
    from cacheblend_lab.eval import EvalSetting, RetrievalSetting, grid_methods, parse_methods
    from cacheblend_lab.eval.methods import split_names

    grid = grid_methods(
        split_names(shared["selectors"]),
        parse_ratios(shared["ratios"]) if shared["ratios"].strip() else (),
        parse_ratios(shared["charges"]) if shared["charges"].strip() else (),
        [codec for codec in split_names(shared["codecs"]) if codec != "native"],
    )
    return EvalSetting(
        methods=(*parse_methods(shared["methods"]), *grid),
        retrieval=RetrievalSetting(shared["chunk_tokens"], shared["top_k"] or 6, shared["embeddings"]),
        max_new_tokens=shared["max_new_tokens"],
        seed=shared["seed"],
        together=shared["together"],
        losses=shared["losses"],
    )
