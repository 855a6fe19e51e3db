"""``cacheblend-rag bench``: speed; each command is a module of `cacheblend_lab.bench`, whose `measure` takes its options."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_lab.cli.cluster import cluster
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import console, make_quiet

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure speed: on random weights at the shapes of real models, of the store's index, and of a server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench_app.command("cluster")(cluster)

Shape = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="The model's shape: tiny, smollm2-360m, qwen2-0.5b, gemma-3-1b, phi-3-mini-8-layers, llama-3.2-1b, llama-3.2-3b, "
        "qwen2.5-7b or llama-3.1-8b.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16.")
]
Chunks = Annotated[int, typer.Option("--chunks", min=1, help="Number of chunks.")]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", min=1, help="Tokens of each chunk.")]
QuestionTokens = Annotated[int, typer.Option("--question-tokens", min=1, help="Tokens of the question.")]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="Rounds; each runs every method once. The median counts.")
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Where the measured files are written for the time of the measurement; by default with other temporary files.",
    ),
]


def _run(name: str, json_file: Path | None, **options: Any) -> None:
    """Measure, show the table and write the file."""
    make_quiet()
    module = import_module(f"cacheblend_lab.bench.{name}")
    with console(stderr=True).status("preparing") as status:
        figures = module.measure(**options, say=status.update)
    figures.show()
    if figures.facts.get("still_cached"):
        console().print(
            "files stayed in the page cache when it was emptied: these are not times of the disk", style="yellow"
        )
    figures.write(json_file, f"bench {name}", options)


@bench_app.command()
def ttft(
    shape: Shape = "qwen2-0.5b",
    device: Device = "cpu",
    dtype: Dtype = "",
    chunks: Chunks = 6,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    ratios: Annotated[
        str, typer.Option(help="Recompute ratios, comma-separated; 0 is plain reuse.")
    ] = "0,0.05,0.15,0.3",
    selectors: Annotated[str, typer.Option(help="Selectors to measure at each ratio, comma-separated.")] = "hkvd",
    tiers: Annotated[
        str,
        typer.Option(
            "--tiers",
            "--tier",
            help="Where stored KV is read from, comma-separated: ram, disk (the page cache is emptied of it before each run).",
        ),
    ] = "ram",
    head_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of fixed text before the chunks, for a row of prompts without gaps.")
    ] = 0,
    separator_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the engine's separator between the chunks, for that row.")
    ] = 0,
    folder: Folder = None,
    repeats: Repeats = 5,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation.

    Full prefill is the model's own forward pass over the whole prompt; "prefix_cache" is its own cache of the first chunk.
    "gapless" is plain reuse after a fixed head and with separators, whose KV is stored too; "of_reuse" is how much of the speed
    of plain reuse is left. "charged_ratio" is the work done on chunk tokens, as a share of recomputing them all.
    """
    _run("ttft", **locals())


@bench_app.command()
def encode(
    shape: Shape = "qwen2-0.5b",
    device: Device = "cpu",
    dtype: Dtype = "",
    chunks: Chunks = 64,
    chunk_tokens: ChunkTokens = 512,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the preamble; 1 is a BOS alone.")] = 1,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens encoded in one batch.")] = 4096,
    document_chunks: Annotated[int, typer.Option(min=0, help="Chunks of a document; 0: they are of none.")] = 0,
    folder: Folder = None,
    repeats: Repeats = 3,
    json_file: JsonOption = None,
) -> None:
    """Measure how fast chunks are added, into RAM and into a folder, at once and one by one ("singly"), in alternation.

    They are compared with the model's own batched forward over the same chunks, and with encoding each of them once: "of_forward"
    and "of_once" are the times over those of the same round.
    """
    _run("encode", **locals())


@bench_app.command()
def prefetch(
    shape: Shape = "qwen2-0.5b",
    device: Device = "cpu",
    dtype: Dtype = "",
    candidates: Annotated[int, typer.Option(min=1, help="Number of retrieved chunks.")] = 12,
    chunks: Annotated[int, typer.Option(min=1, help="How many of them the reranker keeps.")] = 6,
    chunk_tokens: ChunkTokens = 512,
    question_tokens: QuestionTokens = 32,
    reranker_ms: Annotated[float, typer.Option(min=0, help="Milliseconds that the reranker takes.")] = 200,
    ratio: Annotated[float, typer.Option(min=0, max=1, help="The recompute ratio.")] = 0.0,
    selector: Annotated[str, typer.Option(help="The selector, where something is recomputed.")] = "hkvd",
    folder: Folder = None,
    repeats: Repeats = 5,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token after a reranker, when the candidates' KV is on disk: read when the prompt comes,
    prefetched while the reranker works, or in RAM before.

    The reranker waits, and computes nothing. The page cache is emptied of the files before each run.
    """
    _run("prefetch", **locals())


@bench_app.command()
def index(
    entries: Annotated[
        str, typer.Option(help="Entries of each store, two a chunk, comma-separated.")
    ] = "10000,100000,1000000",
    json_file: JsonOption = None,
) -> None:
    """Measure the store's index by its number of entries: opening, looking up the 8 chunks of a prompt, memory.

    Each store is measured in a process of its own, with its index in the page cache. Its chunk files are not written.
    """
    _run("index", **locals())


@bench_app.command()
def serve(
    url: Annotated[str, typer.Option(help="The server's address, without /v1.")] = "http://127.0.0.1:8000",
    prompts: Annotated[str, typer.Option(help="What prompts have: documents (names) or text.")] = "documents",
    rates: Annotated[str, typer.Option(help="Requests per second, comma-separated.")] = "0.5,1,2,4",
    seconds: Annotated[float, typer.Option(min=1, help="How long requests arrive at each rate.")] = 60.0,
    corpus: Annotated[int, typer.Option(min=1, help="Chunks of the corpus.")] = 200,
    chunks: Chunks = 10,
    chunk_words: Annotated[int, typer.Option(min=4, help="Words of a chunk.")] = 112,
    zipf: Annotated[float, typer.Option(min=0, help="Zipf exponent of the chunk requests; 0 is uniform.")] = 1.0,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer, whether or not the model ends it (ignore_eos).")
    ] = 32,
    start: Annotated[
        str, typer.Option(metavar="COMMAND", help="Start the server for this measurement, by a shell.")
    ] = "",
    json_file: JsonOption = None,
) -> None:
    """Measure a server under load: Poisson arrivals, prompts of chunks that are drawn from a corpus by Zipf's law.

    Any OpenAI-compatible server can be asked, with the key in OPENAI_API_KEY. With --prompts documents it must be one of this
    project, which gets the corpus first and then names alone; with --prompts text the chunks stand in the prompt.
    """
    _run("serve", **locals())
