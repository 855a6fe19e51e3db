"""``cacheblend-rag pml run``: answering a prompt of a schema."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import AnswerTokensOption, CompareOption, JsonOption, ModelOption, StreamOption
from cacheblend_rag.cli.output import console, say_seconds, show_table, write_json

if TYPE_CHECKING:
    from cacheblend_rag.engine import BlendEngine, GenerationResult
    from cacheblend_rag.pml import Prompt

__all__ = ["run"]


def run(
    file: Annotated[Path, typer.Argument(metavar="PROMPT", help='A file that holds <prompt schema="...">.')],
    schema: Annotated[
        Path | None,
        typer.Option(
            "--schema", metavar="FILE", help="The schema; by default the file of its name in the prompt's folder."
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option("--root", metavar="DIR", help="Below which the schema's src= may name files; by default its own."),
    ] = None,
    model: ModelOption = "reference",
    store: Annotated[
        Path | None,
        typer.Option(
            "--store", metavar="DIR", help="Keep the KV of the modules there; by default in RAM for this run."
        ),
    ] = None,
    selector: Annotated[
        str,
        typer.Option(
            help="Which module tokens to recompute: none, as in Prompt Cache, or auto, hkvd, query, a3, "
            "boundary, random, full."
        ),
    ] = "none",
    ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of them, for selectors other than none.")] = 0.15,
    max_new_tokens: AnswerTokensOption = 128,
    compare: CompareOption = False,
    stream: StreamOption = None,
    json_file: JsonOption = None,
) -> None:
    """Load a schema and answer a prompt of it; what has not changed since the last run is taken from the store."""
    from cacheblend_rag.pml import Schema

    of = Schema.from_file(_schema_of(file) if schema is None else schema, root=root)
    prompt = of.read_prompt(file)
    recompute = 0.0 if selector == "none" else ratio
    with open_engine(model, store=store, selector=selector, recompute_ratio=recompute, min_tokens=0) as engine:
        loaded = engine.load_schema(of)
        whole = engine.config.replace(enabled=False)
        if compare:
            # Whoever comes first pays for the first use of the model's kernels.
            engine.generate(prompt, max_new_tokens=1, config=whole, do_sample=False)
        shown = sys.stdout.isatty() if stream is None else stream
        results = {"cached": _answer(engine, prompt, max_new_tokens, shown)}
        if compare:
            results["full"] = engine.generate(prompt, max_new_tokens, config=whole, do_sample=False)
    screen = console()
    screen.print(
        f"[dim]schema {loaded.name}: {loaded.encoded} of {loaded.parts} parts encoded, {loaded.tokens} tokens in all[/dim]"
    )
    for method, result in results.items():
        report = result.report
        how = report.fallback_reason or (
            f"{report.hits} of {report.hits + report.misses} parts from stored KV, {report.recomputed_tokens} of "
            f"{report.context_tokens} tokens recomputed, {report.prompt_tokens - report.context_tokens} new"
        )
        screen.print(f"[dim]{method}: first token after {say_seconds(report.ttft_s)}; {how}[/dim]")
    if compare:
        same = results["full"].text == results["cached"].text
        faster = results["full"].report.ttft_s / results["cached"].report.ttft_s
        screen.print(
            f"[dim]{faster:.1f}x as fast as full prefill; "
            f"{'the same answer' if same else 'its answer: ' + results['full'].text}[/dim]"
        )
    lines = [
        (
            (chunk.id or "").rpartition("/")[2],
            chunk.tokens,
            chunk.recomputed_tokens,
            "hit" if chunk.hit else chunk.reason,
        )
        for chunk in results["cached"].report.chunks
    ]
    show_table("modules", ("module", "tokens", "recomputed", "KV"), lines)
    rows = [{"method": name, "answer": result.text, **result.report.to_dict()} for name, result in results.items()]
    write_json(json_file, "pml run", rows, model=model, schema=loaded.name)


def _schema_of(file: Path) -> Path:
    """Return the file beside a prompt that has the name of its schema.

    Raises
    ------
    PMLError
        If the prompt cannot be read, or there is no such file.
    """
    from cacheblend_rag.pml.parse import parse
    from cacheblend_rag.pml.schema import read_text

    root = parse(read_text(file), file.name)
    name = root.attributes.get("schema", "")
    endings = dict.fromkeys((file.suffix, ".pml", ".xml"))
    # A name is no path: what a prompt says must not lead out of its folder.
    beside = [file.with_name(f"{name}{ending}") for ending in endings] if name and name == Path(name).name else []
    found = next((path for path in beside if path != file and path.is_file()), None)
    if found is None:
        raise root.place.error(
            f"beside the prompt there is no file {' or '.join(path.name for path in beside) or 'of its schema'}; name the "
            "schema's file with --schema FILE"
        )
    return found


def _answer(engine: BlendEngine, prompt: Prompt, max_new_tokens: int, shown: bool) -> GenerationResult:
    if not shown:
        result = engine.generate(prompt, max_new_tokens, do_sample=False)
        typer.echo(result.text)
        return result
    pieces = engine.stream(prompt, max_new_tokens, do_sample=False)
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()
    return pieces.result()
