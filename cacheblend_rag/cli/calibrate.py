"""``cacheblend-rag calibrate``: the smallest ratio whose answers are full prefill's, on somebody's own documents."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import (
    EmbeddingOption,
    JsonOption,
    SelectorOption,
    StoredModelOption,
    StoreOption,
    in_a_folder,
)
from cacheblend_rag.cli.output import console, parse_ratios, progress_bar, say_seconds, show_table, write_json
from cacheblend_rag.cli.warm import CHUNK_TOKENS, needs_documents, passages_of, warmed

if TYPE_CHECKING:
    from cacheblend_rag.calibration import Calibration
    from cacheblend_rag.config import BlendConfig, EngineConfig
    from cacheblend_rag.documents import Library
    from cacheblend_rag.engine import BlendEngine

__all__ = ["calibrate"]


def calibrate(
    questions: Annotated[
        Path,
        typer.Option(
            "--questions",
            metavar="FILE",
            help='Questions, one a line; in a .jsonl file strings or {"question": "..."}.',
        ),
    ],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH...]",
            exists=True,
            help="Documents, as warm takes them, read into a store that is removed afterwards; by default what was warmed.",
        ),
    ] = None,
    config_file: Annotated[
        Path,
        typer.Option(
            "--config",
            metavar="FILE",
            callback=in_a_folder,
            help="The YAML file of settings to read, and to write the ratio to; made if need be.",
        ),
    ] = Path("blend.yaml"),
    store: StoreOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    embedding: EmbeddingOption = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Most tokens of a passage of PATH; by default {CHUNK_TOKENS}.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many passages each question is answered from.")] = 6,
    selector: SelectorOption = None,
    ratios: Annotated[
        str, typer.Option(help="Recompute ratios below 1 to try, comma-separated.")
    ] = "0,0.02,0.05,0.1,0.15,0.25,0.4,0.6",
    agreement: Annotated[float, typer.Option(help="Least share of answers that are full prefill's, below 1.")] = 0.95,
    confidence: Annotated[float, typer.Option(help="Confidence of that, below 1.")] = 0.95,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 32,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Whether to write the settings.")] = True,
    disable: Annotated[
        bool,
        typer.Option("--disable", help="Write enabled: false if no ratio agrees; by default nothing is written then."),
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Find the smallest recompute ratio whose answers are full prefill's on your own documents and questions, and keep it.

    Exits with 1 if there is none and nothing is written.
    """
    from cacheblend_rag.calibration import calibrate as run
    from cacheblend_rag.calibration import read_questions
    from cacheblend_rag.config import BlendConfig, EngineConfig

    tried = parse_ratios(ratios)
    asked = read_questions(questions)
    if chunk_tokens is not None and not paths:
        raise typer.BadParameter("passages that were warmed have their length", param_hint="--chunk-tokens")
    config = EngineConfig.from_yaml(config_file) if config_file.exists() else EngineConfig()
    blend = BlendConfig.from_yaml(config_file) if config_file.exists() else BlendConfig()
    started = time.perf_counter()
    opened = (
        _read(paths, config, blend, model or "reference", embedding, chunk_tokens or CHUNK_TOKENS)
        if paths
        else warmed(store, model, embedding, config.replace(guard_rate=0.0), blend)
    )
    with opened as (engine, library, name), console(stderr=True).status("calibrating") as status:
        found = run(
            engine,
            [library.prompt(question, library.search(question, top_k)) for question in asked],
            answers=list(asked.values()),
            selector=selector,
            ratios=tried,
            agreement=agreement,
            confidence=confidence,
            max_new_tokens=max_new_tokens,
            progress=status.update,
        )
        embedded = library.embedding.name
    _show(found, time.perf_counter() - started)
    changes = _changes(found, blend, selector, disable)
    if write:
        _write(config_file, changes)
    facts = asdict(found)
    rows, facts["agreement"] = facts.pop("rows"), facts.pop("target")
    write_json(json_file, "calibrate", rows, model=name, embedding=embedded, top_k=top_k, **facts, changes=changes)
    if not changes:
        raise typer.Exit(1)


@contextmanager
def _read(
    paths: list[Path],
    config: EngineConfig,
    blend: BlendConfig,
    model: str,
    embedding: str | None,
    chunk_tokens: int,
) -> Iterator[tuple[BlendEngine, Library, str]]:
    """Read documents into a store that is there for as long as they are asked about."""
    from cacheblend_rag.documents import Embedding, kv_folder, open_library, passage_config

    needs_documents()
    with tempfile.TemporaryDirectory(prefix="cacheblend-calibrate-") as name:
        folder = Path(name)
        # What is removed afterwards should not be left in a remote tier, nor be looked for there.
        quiet = passage_config(config).replace(remote=None, guard_rate=0.0)
        with open_engine(model, store=kv_folder(folder), config=quiet, blend=blend) as engine:
            passages = passages_of(paths, engine, chunk_tokens)
            if not passages:
                raise typer.Exit(1)
            with open_library(folder, engine, Embedding(embedding)) as library:
                with progress_bar("warming") as progress:
                    library.warm(passages, paths, progress=progress)
                yield engine, library, model


def _show(found: Calibration, seconds: float) -> None:
    lines = [
        (
            f"{row.recompute_ratio:g}",
            f"{row.charged_ratio:.3f}",
            row.questions,
            f"{row.agreement:.3f}",
            f"{row.agreement_low:.3f}",
            f"{row.f1:.3f}",
            f"{row.first_token_kl:.3g}",
            f"{row.ttft_ratio:.3f}",
            "yes" if row.reached else "no",
        )
        for row in found.rows
    ]
    columns = ("ratio", "charged", "questions", "agreement", "at least", "F1", "KL", "first token", "reached")
    show_table(f"{found.selector} against full prefill, target {found.target:g}", columns, lines)
    skipped = f"; {found.skipped} more are prefilled in full at any ratio" if found.skipped else ""
    typer.echo(f"{found.questions} questions in {say_seconds(seconds)}{skipped}")
    typer.echo(found.reason)


def _changes(
    found: Calibration, blend: BlendConfig, selector: str | None, disable: bool
) -> dict[str, bool | int | float | str]:
    """Return the settings to write."""
    if found.recompute_ratio is None:
        return {"enabled": False} if disable else {}
    # "auto" chooses ratios from quality_ratio on.
    name = "quality_ratio" if blend.recompute_ratio == "auto" else "recompute_ratio"
    changes: dict[str, bool | int | float | str] = {name: found.recompute_ratio}
    if selector is not None and selector != blend.selector:
        changes["selector"] = selector
    if not blend.enabled:
        changes["enabled"] = True
    return changes


def _write(path: Path, changes: dict[str, bool | int | float | str]) -> None:
    from cacheblend_rag.calibration import write_settings

    if not changes:
        typer.echo(f"nothing is written to {path}; --disable would switch blending off there")
        return
    write_settings(path, changes)
    written = ", ".join(f"{name}: {str(value).lower()}" for name, value in changes.items())
    typer.echo(f"{path} says {written}")
