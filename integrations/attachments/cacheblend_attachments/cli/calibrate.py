"""``cacheblend-rag calibrate``: the cheapest settings that keep what full prefill knows, on a user's own documents."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import (
    EmbeddingOption,
    JsonOption,
    LibraryOption,
    SelectorOption,
    StoredModelOption,
)
from cacheblend_rag.cli.output import console, progress_bar, say_seconds, show_table, write_json
from cacheblend_rag.cli.warm import CHUNK_TOKENS, needs_documents, texts_of, warmed
from cacheblend_rag.documents.settings import kv_folder
from cacheblend_rag.documents.splitter import cut
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lexer import lexer_of

if TYPE_CHECKING:
    from cacheblend_attachments.calibration import Calibration
    from cacheblend_rag.chunk import BlendPrompt
    from cacheblend_rag.config import BlendConfig, EngineConfig
    from cacheblend_rag.documents.library import Library
    from cacheblend_rag.engine import BlendEngine

__all__ = ["calibrate", "parse_ratios", "read_questions"]

_PASSAGES = 16
"""Passages that are asked how they go on."""
_FIRST_WORDS, _MOST_WORDS = 12, 72
"""Words of a passage that a question quotes, and of which the answer is the rest."""


def parse_ratios(text: str) -> tuple[float, ...]:
    """Return the numbers of a comma-separated list of recompute ratios."""
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{text!r} has a part that is not a number; write ratios like 0,0.05,0.15,0.3") from None


def calibrate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH...]",
            exists=True,
            help="Documents, as for warm, read into a temporary store; by default the warmed ones.",
        ),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help='Questions, ten or more, one a line; in a .jsonl file strings or {"question": "...", "answer": "..."}. By '
            "default how passages of the documents go on.",
        ),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", exists=True, dir_okay=False, help="Settings, as YAML.")
    ] = None,
    folder: LibraryOption = Path(".cacheblend"),
    model: StoredModelOption = None,
    embedding: EmbeddingOption = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Maximum tokens of a passage of PATH; by default {CHUNK_TOKENS}.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, help="How many passages each question is answered from.")] = 6,
    selector: SelectorOption = None,
    ratios: Annotated[str, typer.Option(help="Recompute ratios below 1 to try, comma-separated.")] = "0,0.05,0.15,0.3",
    target: Annotated[
        float, typer.Option(help="Share of the gap between no documents (0) and full prefill (1) to recover.")
    ] = 0.95,
    json_file: JsonOption = None,
) -> None:
    """Find the cheapest settings that keep full prefill's quality on your own model and documents, and print them as YAML.

    Exits with 1 if nothing is found.
    """
    from cacheblend_attachments.calibration import calibrate as run
    from cacheblend_rag.config import BlendConfig, EngineConfig

    tried = parse_ratios(ratios)
    asked = None if questions is None else read_questions(questions)
    if chunk_tokens is not None and not paths:
        raise typer.BadParameter("warmed passages already have a length", param_hint="--chunk-tokens")
    config = EngineConfig() if config_file is None else EngineConfig.from_yaml(config_file)
    blend = BlendConfig() if config_file is None else BlendConfig.from_yaml(config_file)
    if paths and model is None:
        raise typer.BadParameter("name the model that is to read PATH", param_hint="--model")
    started = time.perf_counter()
    opened = (
        _read(paths, config, blend, model, embedding, chunk_tokens or CHUNK_TOKENS)
        if paths and model is not None
        else warmed(folder, model, embedding, config, blend)
    )
    with opened as (engine, library, name), console(stderr=True).status("calibrating") as status:
        embedded = library.embedding.name
        pairs = _continued(library, top_k) if asked is None else _asked(library, asked, top_k)
        found = run(
            engine,
            [prompt for prompt, _ in pairs],
            answers=[answer for _, answer in pairs],
            selector=selector,
            ratios=tried,
            target=target,
            progress=status.update,
        )
    _show(found, time.perf_counter() - started)
    changes: dict[str, bool | float | str] = {}
    if found.recompute_ratio is not None:
        changes["recompute_ratio"] = found.recompute_ratio
        if not blend.enabled:
            changes["enabled"] = True
        if selector not in (None, blend.selector):
            changes["selector"] = selector
    facts = asdict(found)
    rows = facts.pop("rows")
    write_json(
        json_file, "calibrate", list(rows), model=name, embedding=embedded, top_k=top_k, **facts, changes=changes
    )
    if not changes:
        raise typer.Exit(1)
    typer.echo(f"settings:\n{yaml.safe_dump(changes, sort_keys=False)}", nl=False)


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
    texts, _ = texts_of(paths)
    from cacheblend_rag.documents.embedding import Embedding
    from cacheblend_rag.documents.library import open_library, passage_config

    needs_documents()
    with tempfile.TemporaryDirectory(prefix="cacheblend-calibrate-") as name:
        folder = Path(name)
        # What is removed afterwards should not be left in a remote tier, nor be looked for there.
        quiet = passage_config(config).replace(remote=None)
        with open_engine(model, store=kv_folder(folder), config=quiet, blend=blend) as engine:
            passages = cut(texts, lexer_of(engine.tokenizer).count, chunk_tokens)
            with open_library(folder, engine, Embedding(embedding)) as library:
                with progress_bar("warming") as progress:
                    library.warm(passages, paths, progress=progress)
                yield engine, library, model


def _asked(library: Library, questions: dict[str, str | None], top_k: int) -> list[tuple[BlendPrompt, str | None]]:
    """Return a prompt for each question, with the right answer where it is known."""
    return [
        (library.prompt(question, library.search(question, top_k)), answer) for question, answer in questions.items()
    ]


def _continued(library: Library, top_k: int) -> list[tuple[BlendPrompt, str | None]]:
    """Return prompts that ask how passages go on, which stand for questions, and the words that they go on with."""
    long = [passage for passage in library.passages() if len(passage.text.split()) >= 3 * _FIRST_WORDS]
    if not long:
        raise ConfigError(f"no passage has {3 * _FIRST_WORDS} words or more; give questions, by --questions")
    pairs: list[tuple[BlendPrompt, str | None]] = []
    for passage in long[:: max(1, len(long) // _PASSAGES)][:_PASSAGES]:
        words = passage.text.split()
        first, rest = " ".join(words[:_FIRST_WORDS]), " ".join(words[_FIRST_WORDS:_MOST_WORDS])
        near = [match for match in library.search(first, top_k + 1) if match.chunk.id != passage.id]
        question = f"How does the passage go on that begins with “{first}”?"
        pairs.append((library.prompt(question, near[:top_k]), rest))
    return pairs


def _show(found: Calibration, seconds: float) -> None:
    lines = [
        (
            f"{row.recompute_ratio:g}",
            f"{row.charged_ratio:.3f}",
            f"{row.loss:.3f}",
            f"{row.recovered:.3f}",
            f"{row.recovered_low:.3f} to {row.recovered_high:.3f}",
            f"{row.ttft_ratio:.3f}",
        )
        for row in found.rows
    ]
    columns = ("ratio", "charged", "loss", "recovered", "95 % interval", "first token")
    show_table(f"recomputed by {found.selector}", columns, lines)
    skipped = f"; {found.skipped} more are prefilled in full at any ratio" if found.skipped else ""
    typer.echo(
        f"{found.questions} questions in {say_seconds(seconds)}{skipped}. Loss by full prefill {found.full_loss:.3f}, without "
        f"documents {found.bare_loss:.3f} nats a token"
    )
    typer.echo(found.reason)


def read_questions(path: Path) -> dict[str, str | None]:
    """Read questions, one a line, and the right answers where they are given.

    A line of a ``.jsonl`` file is a string, or an object with `question` and perhaps `answer`, a text or a number. UTF-8.
    `ConfigError` if the file cannot be read, a line is none of this, or there is no question.
    """
    try:
        # Not splitlines, which also splits at characters that may stand inside a JSON string.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"questions file {path} cannot be read: {error}") from error
    questions: dict[str, str | None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        given: Any = line
        if path.suffix.lower() == ".jsonl":
            try:
                given = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"line {number} of {path} is not JSON ({error})") from error
        given = given if isinstance(given, dict) else {"question": given}
        question, answer = given.get("question"), given.get("answer")
        if not isinstance(question, str) or not question.strip():
            raise ConfigError(f'line {number} of {path} holds no question; write {{"question": "..."}} or a string')
        # What other programs keep there, a list for example, is no single right answer.
        questions[question.strip()] = str(answer) if isinstance(answer, str | int | float) else None
    if not questions:
        raise ConfigError(f"questions file {path} holds no question; write one per line")
    return questions
