"""Output of the commands: plain messages, times, and the JSON file; sizes are said by rich."""

from __future__ import annotations

import json
import logging
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.filesize import decimal as say_bytes
from rich.markup import escape
from rich.table import Table

from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.chunk import BlendPrompt
    from cacheblend_rag.engine import BlendEngine, GenerationResult

__all__ = [
    "console",
    "make_quiet",
    "on_interrupt",
    "print_answer",
    "progress_bar",
    "say_bytes",
    "say_same",
    "say_seconds",
    "show_table",
    "write_json",
]

_LINE_S = 5.0
_PACKAGES = "cacheblend-rag torch transformers chromadb sentence-transformers llama-index-core langchain-core".split()


def console(*, stderr: bool = False) -> Console:
    """Return a console on the stream as it is now; a terminal's width where there is one, else wide enough for every table."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 160, highlight=False)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show how far a command is, in lines; yields what is called with the number of things done and of all."""
    started = said_at = time.monotonic()
    most = -1

    def tell(done: int, total: int) -> None:
        nonlocal most, said_at
        now, is_first = time.monotonic(), most < 0
        # After a change, things that were done are done again.
        if done > most and (is_first or done >= total or now - said_at > _LINE_S):
            after = f" after {say_seconds(now - started)}" if done else ""
            typer.echo(f"{label}: {done} of {total}{after}", err=True)
            said_at = now
        most = max(most, done)

    yield tell


@contextmanager
def on_interrupt(say: Callable[[], str]) -> Iterator[None]:
    """Exit with 130 where Ctrl-C ends the block, and say what is done and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped: {say()}", err=True)
        raise typer.Exit(130) from None


def make_quiet() -> None:
    """Keep progress bars and notes of the model libraries out of the output; warnings of this package stay."""
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    # Where it is installed, it tells of kernels that it would like to have.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def say_seconds(seconds: float) -> str:
    """Return a duration as people write it: ``"12 ms"``, ``"3.4 s"``, ``"2 min 05 s"``."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def print_answer(
    engine: BlendEngine,
    prompt: BlendPrompt,
    max_new_tokens: int,
    *,
    stream: bool | None,
    compare: bool,
    **generation_kwargs: Any,
) -> list[GenerationResult]:
    """Answer a prompt and print the answer, word by word if `stream`, or where it is None and this is a terminal."""
    full = generation_kwargs | {"blend": engine.blend.replace(enabled=False)}
    if compare:
        # The first call pays for the first use of the model's kernels.
        engine.generate(prompt, 1, **full)
    if sys.stdout.isatty() if stream is None else stream:
        pieces = engine.stream(prompt, max_new_tokens, **generation_kwargs)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
        result = pieces.result()
    else:
        result = engine.generate(prompt, max_new_tokens, **generation_kwargs)
        print(result.text)
    return [result, engine.generate(prompt, max_new_tokens, **full)] if compare else [result]


def say_same(result: GenerationResult, full: GenerationResult) -> str:
    """Return whether full prefill gives the same answer, and if not, which."""
    return "the same answer" if full.text == result.text else f"its answer: {full.text}"


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, text_columns: int = 1) -> None:
    """Print a table under its title; the first `text_columns` columns are text, the others numbers; None is shown as a dash."""
    drawn = Table(header_style="bold", show_header=any(columns))
    for number, name in enumerate(columns):
        drawn.add_column(name, justify="left" if number < text_columns else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*("-" if cell is None else escape(str(cell)) for cell in row))
    screen = console()
    screen.print(escape(title), style="bold", soft_wrap=True)
    screen.print(drawn)


def write_json(path: Path | None, command: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Write a command's rows and other facts, if a file was asked for; a key that a row lacks is null."""
    if path is None:
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    whole = {
        "command": command,
        # Figures are shared: where files are kept is private.
        "arguments": [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]],
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "machine": _machine(),
        **facts,
        "rows": [{key: row.get(key) for key in keys} for row in rows],
    }
    try:
        path.write_text(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def _machine() -> dict[str, Any]:
    import torch

    processor = None
    with suppress(OSError):
        processor = re.search(r"(?m)^model name\s*: *(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "system": platform.platform(),
        "processor": processor[1].strip() if processor else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
    }
