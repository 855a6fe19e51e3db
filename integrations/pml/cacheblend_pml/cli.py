"""``cacheblend-rag pml``: schemas and prompts in the prompt markup language."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import (
    AnswerTokensOption,
    CompareOption,
    JsonOption,
    ModelOption,
    StreamOption,
)
from cacheblend_rag.cli.output import console, print_answer, say_bytes, say_same, show_table, write_json
from cacheblend_rag.errors import PromptTooLongError

__all__ = ["pml_app"]

pml_app = typer.Typer(
    help="Prompts made of reusable modules, in the prompt markup language.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="The folder that src= is relative to and must not leave; by default the schema's own.",
    ),
]


@pml_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A schema.")],
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompt", metavar="FILE", help="A prompt for this schema; may be repeated.")
    ] = None,
    root: _RootOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Also check it against this model's chat template, window, and the lengths of arguments and new text, and print "
            "its positions, tokens and KV bytes, and the tokens of the prompts.",
        ),
    ] = None,
) -> None:
    """Check whether a schema and its prompts are valid; if not, show the line, the element, and what was expected."""
    from cacheblend_pml import Schema, SchemaLayout, Tokens, lay_out

    schema = Schema.from_file(file, root=root)
    read = [(path, schema.read_prompt(path)) for path in prompts or []]
    params = sum(len(module.params) for module in schema.modules.values())
    counts = (len(schema.modules), "module"), (len(schema.unions), "union"), (params, "parameter")
    typer.echo(f"{schema.name}: a valid schema with {', '.join(_count(*each) for each in counts)}")
    for path, prompt in read:
        typer.echo(f"{path.name}: a prompt with {_count(len(prompt.imports), 'import')}")
    if model is None:
        return
    with open_engine(model) as engine:
        token_bytes = engine.decoder.kv_bytes_per_token if engine.decoder is not None else None
        layout, window = SchemaLayout(schema, Tokens.of(engine.tokenizer)), engine.window
    _check_window(schema.name, layout.size, window)
    kept = sum(map(len, layout.spans))
    total = f"{schema.name}: {_count(layout.size, 'position')}; {_count(kept, 'token')} of KV"
    typer.echo(total if token_bytes is None else f"{total}, {say_bytes(kept * token_bytes)}")
    for path, prompt in read:
        placed = lay_out(layout, prompt)
        _check_window(path.name, placed.positions[-1] + 1, window)
        tokens, cached = len(placed.token_ids), placed.cached_tokens
        typer.echo(f"{path.name}: {_count(tokens, 'token')}, {cached} from kept KV and {tokens - cached} computed")


@pml_app.command()
def run(
    file: Annotated[Path, typer.Argument(metavar="PROMPT", help='A file with <prompt schema="...">.')],
    model: ModelOption,
    schema: Annotated[
        Path | None,
        typer.Option(
            "--schema", metavar="FILE", help="The schema; by default the file of its name in the prompt's folder."
        ),
    ] = None,
    root: _RootOption = None,
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="DIR", help="Keep the KV of the modules there; by default in RAM for this run."
        ),
    ] = None,
    selector: Annotated[
        str,
        typer.Option(help="Which module tokens to recompute: boundary, hkvd, a3 or random."),
    ] = "boundary",
    ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share of them; 0 recomputes nothing, as in Prompt Cache.")
    ] = 0,
    max_new_tokens: AnswerTokensOption = 128,
    compare: CompareOption = False,
    stream: StreamOption = None,
    json_file: JsonOption = None,
) -> None:
    """Load a schema and answer a prompt of it; KV that is unchanged since the last run comes from the store."""
    from cacheblend_pml import Schema, Schemas
    from cacheblend_pml.read import schema_beside

    of = Schema.from_file(schema_beside(file) if schema is None else schema, root=root)
    prompt = of.read_prompt(file)
    with open_engine(model, store=store, selector=selector, recompute_ratio=ratio) as engine:
        schemas = Schemas(engine)
        loaded, blend = schemas.load(of), schemas.prompt(prompt)
        answers = print_answer(engine, blend, max_new_tokens, stream=stream, compare=compare, do_sample=False)
    results = dict(zip(("cached", "full"), answers, strict=False))
    notes = [f"schema {loaded.name}: {loaded.encoded} of {loaded.parts} parts encoded, {loaded.tokens} tokens in all"]
    notes += [f"{method}: {result.report}" for method, result in results.items()]
    if compare:
        cached, full = answers
        faster = full.report.ttft_s / cached.report.ttft_s
        notes.append(f"{faster:.1f}x as fast as full prefill; {say_same(cached, full)}")
    for note in notes:
        console().print(f"[dim]{note}[/dim]")
    lines = [
        ((part.id or "").rpartition("/")[2], part.tokens, part.recomputed_tokens, "hit" if part.hit else part.reason)
        for part in answers[0].report.chunks
    ]
    show_table("modules", ("module", "tokens", "recomputed", "KV"), lines)
    rows = [{"method": name, "answer": result.text, **result.report.to_dict()} for name, result in results.items()]
    write_json(json_file, "pml run", rows, model=model, schema=loaded.name)


def _check_window(name: str, positions: int, window: int | None) -> None:
    if window is not None and positions >= window:
        raise PromptTooLongError(
            f"{name} takes {positions} positions, and the model's window is {window}, one of which is needed for the answer; "
            "make it shorter, or put modules that exclude each other into a union"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
