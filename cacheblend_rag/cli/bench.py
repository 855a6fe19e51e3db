"""``cacheblend-rag bench``: speed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from cacheblend_rag.cli.bench_encode import encode
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import console, make_quiet, parse_ratios, say_bytes, say_seconds, show_table, write_json

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure speed on random weights at the shapes of real models.", no_args_is_help=True, rich_markup_mode=None
)


bench_app.command()(encode)


@bench_app.command()
def ttft(
    shape: Annotated[
        str, typer.Option(help="tiny, smollm2-360m, qwen2-0.5b, llama-3.2-1b, qwen2.5-7b or llama-3.1-8b.")
    ] = "qwen2-0.5b",
    chunks: Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")] = 512,
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question.")] = 32,
    ratios: Annotated[
        str, typer.Option(help="Recompute ratios, comma-separated; 0 is plain reuse.")
    ] = "0,0.05,0.15,0.3",
    selectors: Annotated[str, typer.Option(help="Selectors to measure at each ratio, comma-separated.")] = "hkvd",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every method once. The median counts.")] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure the time to the first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation.

    Full prefill is the model's own forward pass over the whole prompt; "prefix_cache" is its own cache of the first chunk.
    "limit" is the speedup if computing rows were all that took time.
    """
    from cacheblend_rag.bench import TTFTBench, TTFTSetting

    make_quiet()
    setting = TTFTSetting(
        shape=shape,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        question_tokens=question_tokens,
        ratios=parse_ratios(ratios),
        selectors=tuple(name.strip() for name in selectors.split(",")),
        repeats=repeats,
        device=device,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        seed=seed,
    )
    screen = console(stderr=True)
    with screen.status("making the model and its chunks") as status:
        bench = TTFTBench(setting)
        rows = bench.measure(lambda done, total: status.update(f"measuring, {done} of {total}"))
    lines = [
        (
            row.method,
            row.selector,
            row.recompute_ratio,
            f"{row.charged_ratio:.3f}",
            say_seconds(row.ttft_s),
            f"{say_seconds(row.ttft_min_s)} to {say_seconds(row.ttft_max_s)}",
            f"{row.speedup:.2f}x",
            f"{row.limit:.1f}x",
        )
        for row in rows
    ]
    title = (
        f"{shape}, {setting.dtype} on {device}: {chunks} chunks of {chunk_tokens} tokens and a question of {question_tokens}, "
        f"median of {repeats}"
    )
    columns = ("method", "selector", "ratio", "charged", "first token", "range", "speedup", "limit")
    show_table(title, columns, lines, text_columns=2)
    facts = asdict(setting) | {"prompt_tokens": len(bench.token_ids), "context_tokens": bench.context_tokens}
    shared = {"shape": shape, "device": device, "dtype": setting.dtype, "prompt_tokens": len(bench.token_ids)}
    write_json(
        json_file, "bench ttft", [asdict(row) | shared for row in rows], model=f"random weights, {shape}", setting=facts
    )


@bench_app.command()
def codecs(
    shape: Annotated[
        str, typer.Option(help="tiny, smollm2-360m, qwen2-0.5b, llama-3.2-1b, qwen2.5-7b or llama-3.1-8b.")
    ] = "qwen2-0.5b",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the chunk.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, float16 or bfloat16.")] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every codec once. The fastest counts.")] = 9,
    seed: Annotated[int, typer.Option(help="Seed of the KV.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Measure what each codec makes of a chunk's KV: bytes of its file, error, and speed beside copying the KV in memory.

    The KV is drawn from a normal distribution; `eval reference --codecs` says what a codec does to answers.
    """
    from cacheblend_rag.bench import CodecSetting, measure_codecs

    setting = CodecSetting(shape=shape, chunk_tokens=chunk_tokens, dtype=dtype, repeats=repeats, seed=seed)
    with console(stderr=True).status("measuring") as status:
        rows = measure_codecs(setting, lambda done, total: status.update(f"measuring, {done} of {total}"))
    lines = [
        (
            row.codec,
            say_bytes(row.file_bytes),
            f"{row.share_of_float16:.3f}",
            f"{row.rms_error:.4f}",
            f"{row.max_error:.4f}",
            f"{say_bytes(row.pack_bytes_per_s)}/s",
            f"{say_bytes(row.unpack_bytes_per_s)}/s",
        )
        for row in rows
    ]
    title = (
        f"{shape}, a chunk of {chunk_tokens} tokens in {dtype}, fastest of {repeats} rounds; "
        f"copying runs at {say_bytes(rows[0].copy_bytes_per_s)}/s"
    )
    columns = ("codec", "file", "of float16", "rms error", "max error", "pack", "unpack")
    show_table(title, columns, lines)
    write_json(
        json_file, "bench codecs", [asdict(row) for row in rows], model=f"random KV, {shape}", setting=asdict(setting)
    )
