"""A real model asked about real pages, alone and from stored KV: ``python -m cacheblend_lab.bench.real MODEL``.

MODEL is a GGUF file, which llama-cpp-python reads alone, or a folder for transformers, in the dtype that an engine chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from cacheblend_lab.bench.runner import Figures, Row, in_rounds, median_ratio, percentile, seconds_of
from cacheblend_lab.bench.tiers import cold_folder, drop_cached, still_cached
from cacheblend_lab.cli.options import parse_numbers
from cacheblend_lab.demo.manual import pages
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef, FixedText
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine

_CHUNK_TOKENS = 250
# As a framework's template begins.
_HEAD = FixedText("Read this.\n\n")
_QUESTION = "\n\nQuestion: What does the passage say about values?\nAnswer:"

Answer = Callable[[Sequence[int], int], object]
"""Answers a prompt of tokens in so many tokens."""
Way = Callable[[int], object]
"""Answers a prompt in so many tokens."""


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file, or a folder of transformers.")],
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "1400,2900",
    answer_tokens: Annotated[int, typer.Option(help="Length of answers.")] = 48,
    callers: Annotated[
        int, typer.Option(help="How many ask at once, with prompts of the first length; 1: nobody.")
    ] = 1,
    rounds: Annotated[int, typer.Option(help="Measurements, of which medians are shown.")] = 7,
    ratios: Annotated[str, typer.Option(help="Also with these shares of the chunks' tokens recomputed.")] = "",
    disk: Annotated[
        bool, typer.Option("--disk", help="Also from KV on disk alone, with the page cache emptied of it.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; by default as an engine chooses.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; likewise.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Time first tokens and answers: the model alone, from stored KV, and the same plain prompt a second time."""
    make_quiet()
    chosen = {name: value for name, value in (("device", device), ("dtype", dtype)) if value}
    lengths = [int(length) for length in tokens.split(",")]
    shares = parse_numbers(ratios) if ratios else ()
    with ExitStack() as stack:
        config = EngineConfig(prefix_bytes=0, **chosen)
        engine = stack.enter_context(BlendEngine.from_pretrained(model, config=config))
        engines = {"stored": engine}
        cold = stack.enter_context(cold_folder(None)) if disk else None
        if cold is not None:
            engines["disk"] = stack.enter_context(engine.another(config=config.replace(ram_bytes=0), store=cold))
        alone, again = _alone(engine)
        ids = _ids(engine, max(lengths))
        rows: list[Row] = []
        of_callers: list[BlendPrompt] = []
        for length in lengths:
            prompts = _prompts(engines.values(), ids[:length], max(callers, 2))
            of_callers = of_callers or prompts[:callers]
            whole = engine.prompt_ids(prompts[0])
            ways: dict[str, Way] = {"alone": partial(alone, whole)}
            ways |= {name: partial(_ours, each, prompts[0]) for name, each in engines.items()}
            for share in shares:
                blend = engine.blend.replace(recompute_ratio=share)
                ways[f"recomputed_{share:g}"] = partial(_ours, engine, prompts[0], blend=blend)
            times = _timed(ways, (1, answer_tokens), rounds, cold)
            for what, count in (("first token", 1), (f"answer of {answer_tokens}", answer_tokens)):
                rows.append(_row(len(whole), what, {way: times[way, count] for way in ways}))
        reordered = _reordered(engine, again, prompts[:2], answer_tokens, rounds)
        rows += [_row(len(whole), what, seconds) for what, seconds in reordered.items()]
        if callers > 1:
            rows.append(_together(engine, of_callers, answer_tokens, rounds))
        with engine_of(engine) as sharing:
            plain = BlendPrompt(segments=[tuple(whole)])
            sharing.generate(plain, 2)
            twice: dict[str, list[float]] = {"alone": [], "stored": []}
            for _ in range(rounds):
                # Behind an answer of one token llama-cpp-python still has the scores, and computes nothing at all.
                again(whole, 2)
                twice["alone"].append(seconds_of(again, whole, 1))
                twice["stored"].append(seconds_of(sharing.generate, plain, 1))
        rows.append(_row(len(whole), "first token, the same plain text again", twice))
        facts = {"model": Path(model).name, "still_cached": None if cold is None else still_cached(cold)}
        title = f"{Path(model).name}, {_kind(engine)}, medians of {rounds}"
    figures = Figures(title, rows, facts)
    figures.show()
    setting = {"answer_tokens": answer_tokens, "rounds": rounds, "callers": callers}
    figures.write(json_file, "bench real", setting)


def _kind(engine: BlendEngine) -> str:
    """Return in what a model computes, and where."""
    on_cpu = f"{torch.get_num_threads()} threads"
    if engine.model is None:
        return f"GGUF, {on_cpu}"
    is_cuda = engine.model.device.type == "cuda"
    return f"{engine.model.dtype}, {torch.cuda.get_device_name() if is_cuda else on_cpu}".removeprefix("torch.")


def _timed(
    ways: Mapping[str, Way], counts: Sequence[int], rounds: int, cold: Path | None
) -> dict[tuple[str, int], list[float]]:
    """Return what answers of so many tokens take in each way."""

    def run(method: tuple[str, int]) -> float:
        way, count = method
        if way == "disk" and cold is not None:
            drop_cached(cold)
        return seconds_of(ways[way], count)

    return in_rounds([(way, count) for count in counts for way in ways], run, rounds, say=lambda _: None)


def _reordered(
    engine: BlendEngine, again: Answer, prompts: Sequence[BlendPrompt], answer_tokens: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return what it takes to ask about the chunks of the prompt before in another order, which no prefix cache knows."""
    counts = {
        "first token, same chunks reordered": 1,
        f"answer of {answer_tokens}, same chunks reordered": answer_tokens,
    }
    times: dict[str, dict[str, list[float]]] = {what: {"alone": [], "stored": []} for what in counts}
    wholes = [engine.prompt_ids(prompt) for prompt in prompts]
    again(wholes[-1], 2)
    for _ in range(rounds):
        for (what, count), prompt, whole in zip(counts.items(), prompts, wholes, strict=True):
            times[what]["alone"].append(seconds_of(again, whole, count))
            times[what]["stored"].append(seconds_of(_ours, engine, prompt, count))
    return times


def _prompts(engines: Iterable[BlendEngine], ids: Sequence[int], callers: int) -> list[BlendPrompt]:
    """Store chunks of these tokens; return each caller's prompt of them, in another order."""
    numbers = range(max(len(ids) // _CHUNK_TOKENS, 1))
    names = [f"{len(ids)}-{number}" for number in numbers]
    for engine in engines:
        parts = [ids[_CHUNK_TOKENS * number : _CHUNK_TOKENS * (number + 1)] for number in numbers]
        engine.add(Chunk(engine.tokenizer.decode(part), name) for part, name in zip(parts, names, strict=True))
    chunks = [ChunkRef(name) for name in names]
    turns = [number % len(chunks) for number in range(callers)]
    return [BlendPrompt(segments=[_HEAD, *chunks[turn:], *chunks[:turn], _QUESTION]) for turn in turns]


def _ids(engine: BlendEngine, count: int) -> list[int]:
    """Return tokens of the manual's pages, which are repeated where more are wanted; chunks are cut elsewhere then."""
    text = "\n\n".join(text for _, text in sorted(pages().items()))
    ids = list(engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids * (1 + count // len(ids))


def _together(engine: BlendEngine, prompts: Sequence[BlendPrompt], answer_tokens: int, rounds: int) -> Row:
    """Return how fast callers are answered that ask at once, beside one after the other."""

    def ask(prompt: BlendPrompt) -> float:
        return float(_ours(engine, prompt, answer_tokens).report.ttft_s)

    def run(method: str) -> tuple[float, list[float]]:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts) if method == "together" else 1) as pool:
            first = list(pool.map(ask, prompts))
        return time.perf_counter() - began, first

    runs = in_rounds(("one by one", "together"), run, rounds, say=lambda _: None)
    one, many = ([seconds for seconds, _ in runs[name]] for name in ("one by one", "together"))
    return {
        "tokens": len(engine.prompt_ids(prompts[0])),
        "what": f"{len(prompts)} answers of {answer_tokens} at once",
        "stored_s": median(many),
        "tokens_per_s": len(prompts) * answer_tokens / median(many),
        "over_one_by_one": median_ratio(one, many),
        "first_p95_s": percentile([each for _, first in runs["together"] for each in first], 95),
    }


def _row(tokens: int, what: str, times: Mapping[str, Sequence[float]]) -> Row:
    """Return the medians of each way, and by how much it is faster than the model alone."""
    row: Row = {"tokens": tokens, "what": what}
    for way, seconds in times.items():
        row[f"{way}_s"] = median(seconds)
        if way != "alone":
            row["speedup" if way == "stored" else f"{way}_speedup"] = median_ratio(times["alone"], seconds)
    return row


def engine_of(engine: BlendEngine) -> BlendEngine:
    """Return an engine over the model of another one that keeps earlier prompts."""
    return engine.another(config=EngineConfig())


def _ours(engine: BlendEngine, prompt: BlendPrompt, count: int, **options: Any) -> Any:
    return engine.generate(prompt, count, eos_token_id=[], do_sample=False, **options)


def _alone(engine: BlendEngine) -> tuple[Answer, Answer]:
    """Return what answers without this project, knowing nothing, and knowing the prompt before."""
    llama = getattr(engine, "llama", None)
    if llama is None:

        def generate(ids: Sequence[int], count: int) -> None:
            given = torch.tensor([list(ids)], device=engine.model.device)
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
            # Read, which waits for the device.
            engine.model.generate(given, attention_mask=torch.ones_like(given), **options).tolist()

        return generate, generate
    import llama_cpp

    theirs = llama_cpp.Llama(str(llama.path), n_ctx=llama.window, n_threads=torch.get_num_threads(), verbose=False)

    def go_on(ids: Sequence[int], count: int) -> None:
        for number, _ in enumerate(theirs.generate(list(ids), temp=0.0), 1):
            if number == count:
                break

    def anew(ids: Sequence[int], count: int) -> None:
        theirs.reset()
        go_on(ids, count)

    return anew, go_on


if __name__ == "__main__":
    typer.run(main)
