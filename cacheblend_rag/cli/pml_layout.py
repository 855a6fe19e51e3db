"""``cacheblend-rag pml check`` and ``show``: whether a schema is valid, and where its modules stand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption, ModelOption
from cacheblend_rag.cli.output import console, say_bytes, show_table, write_json
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.pml import LaidOutPrompt, LayoutRow, Prompt, Schema

__all__ = ["check", "show"]

_FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A schema.")]
_PromptsOption = Annotated[
    list[Path] | None, typer.Option("--prompt", metavar="FILE", help="A prompt for this schema; may be given again.")
]
_RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="The folder that src= counts from and must not leave; by default the schema's own.",
    ),
]


def check(
    file: _FileArgument,
    prompts: _PromptsOption = None,
    root: _RootOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="Also see whether its chat template, the lengths of arguments and new text, and the model's window allow it.",
        ),
    ] = None,
) -> None:
    """Say whether a schema and prompts for it are valid; if not, in which line and column, and what was expected."""
    schema, read = _read(file, prompts or [], root)
    notes = [
        _say_schema(schema),
        *(f"{path.name}: a prompt with {_count(len(prompt.imports), 'import')}" for path, prompt in read),
    ]
    if model is not None:
        from cacheblend_rag.pml import SchemaLayout, Tokens, lay_out

        with open_engine(model) as engine:
            layout = SchemaLayout(schema, Tokens.of(engine.tokenizer))
            notes[0] += f", {layout.size} positions"
            _check_window(schema.name, layout.size, engine.window)
            for number, (path, prompt) in enumerate(read, 1):
                laid_out = lay_out(layout, prompt)
                _check_window(path.name, laid_out.positions[-1] + 1, engine.window)
                notes[number] += (
                    f", {_count(len(laid_out.token_ids), 'token')}, {laid_out.cached_tokens} of them from kept KV"
                )
    for note in notes:
        typer.echo(note)


def show(
    file: _FileArgument,
    prompts: _PromptsOption = None,
    root: _RootOption = None,
    model: ModelOption = "reference",
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            dir_okay=False,
            writable=True,
            help="Draw it to FILE too; of the last prompt, if one is given.",
        ),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Print where the modules of a schema stand, their tokens and the bytes of their KV; and the same of prompts."""
    from cacheblend_rag.pml import SchemaLayout, Tokens, draw_layout, lay_out, layout_rows, segment_rows

    schema, read = _read(file, prompts or [], root)
    with open_engine(model) as engine:
        token_bytes = engine.decoder.kv_bytes_per_token if engine.decoder is not None else None
        layout = SchemaLayout(schema, Tokens.of(engine.tokenizer))
        title, rows = f"{schema.name}, in tokens of {Path(model).name}", layout_rows(layout)
        _show_rows(title, rows, token_bytes)
        kept = sum(row.cached_tokens for row in rows)
        total = f"{_count(layout.size, 'position')}; {_count(kept, 'token')} of KV"
        console().print(total if token_bytes is None else f"{total}, {say_bytes(kept * token_bytes)}")
        found = [_json_row("schema", row, token_bytes) for row in rows]
        for path, prompt in read:
            laid_out = lay_out(layout, prompt)
            title, rows = f"{path.name}, a prompt for {schema.name}", segment_rows(layout, laid_out)
            _show_rows(title, rows, token_bytes)
            console().print(_say_prompt(laid_out))
            found += [_json_row(path.name, row, token_bytes) for row in rows]
    write_json(json_file, "pml show", found, model=model)
    if svg is not None:
        try:
            svg.write_text(draw_layout(title, rows), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {svg} cannot be written: {error.strerror}") from error


def _read(file: Path, prompts: list[Path], root: Path | None) -> tuple[Schema, list[tuple[Path, Prompt]]]:
    from cacheblend_rag.pml import Schema

    schema = Schema.from_file(file, root=root)
    return schema, [(path, schema.read_prompt(path)) for path in prompts]


def _show_rows(title: str, rows: list[LayoutRow], token_bytes: int | None) -> None:
    scaffolds = any(row.scaffold for row in rows)
    columns = ("", "kind", "positions", "tokens", "cached", "parameters", "bytes") + ("encoded with",) * scaffolds
    lines = []
    for row in rows:
        slots = sum(len(slot) for slot in row.slots)
        kept = row.cached_tokens
        lines.append(
            (
                "  " * row.depth + row.name,
                row.kind,
                f"{row.start}-{row.stop - 1}" if row.stop > row.start else "-",
                row.stop - row.start,
                kept or None,
                slots or None,
                say_bytes(kept * token_bytes) if kept and token_bytes is not None else None,
                *((row.scaffold or None,) * scaffolds),
            )
        )
    show_table(title, columns, lines, text_columns=2)


def _json_row(of: str, row: LayoutRow, token_bytes: int | None) -> dict[str, Any]:
    return {
        "of": of,
        "name": row.name,
        "kind": row.kind,
        "depth": row.depth,
        "start": row.start,
        "stop": row.stop,
        "cached_tokens": row.cached_tokens,
        "cached_bytes": None if token_bytes is None else row.cached_tokens * token_bytes,
        "slots": [[slot.start, slot.stop] for slot in row.slots],
        "scaffold": row.scaffold or None,
    }


def _check_window(name: str, positions: int, window: int | None) -> None:
    if window is not None and positions >= window:
        raise ConfigError(
            f"{name} takes {positions} positions, and the model's window is {window}, one of which is needed for the answer; "
            "make it shorter, or put modules that exclude each other into a union"
        )


def _say_schema(schema: Schema) -> str:
    params = sum(len(module.params) for module in schema.modules.values())
    return (
        f"{schema.name}: a valid schema with {_count(len(schema.modules), 'module')}, {_count(len(schema.unions), 'union')}, "
        f"{_count(params, 'parameter')}"
    )


def _say_prompt(prompt: LaidOutPrompt) -> str:
    return (
        f"{_count(len(prompt.token_ids), 'token')}, {prompt.cached_tokens} from kept KV and "
        f"{len(prompt.token_ids) - prompt.cached_tokens} computed"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
