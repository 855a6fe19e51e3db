"""A real model asked about real pages, alone and from stored KV: ``python -m cacheblend_lab.bench.real MODEL``.

MODEL is a GGUF file, which llama-cpp-python reads alone, or a folder for transformers, in the dtype that an engine chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer

from cacheblend_lab.bench.runner import Figures, Row, in_rounds, median_ratio, percentile, seconds_of
from cacheblend_lab.demo.manual import pages
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine

_CHUNK_TOKENS = 250
_QUESTION = "\n\nQuestion: What does the passage say about values?\nAnswer:"

Answer = Callable[[Sequence[int], int], object]
"""Answers a prompt of tokens in so many tokens."""


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file, or a folder of transformers.")],
    tokens: Annotated[str, typer.Option(help="Lengths of prompts.")] = "1400,2900",
    answer_tokens: Annotated[int, typer.Option(help="Length of answers.")] = 48,
    callers: Annotated[
        int, typer.Option(help="How many ask at once, with prompts of the first length; 1: nobody.")
    ] = 1,
    rounds: Annotated[int, typer.Option(help="Measurements, of which medians are shown.")] = 7,
    json_file: JsonOption = None,
) -> None:
    """Time first tokens and answers: the model alone, from stored KV, and the same plain prompt a second time."""
    make_quiet()
    with BlendEngine.from_pretrained(model, config=EngineConfig(prefix_bytes=0)) as engine:
        alone, again = _alone(engine)
        text = "\n\n".join(text for _, text in sorted(pages().items()))
        ids = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        rows: list[Row] = []
        prompts: list[BlendPrompt] = []
        for length in map(int, tokens.split(",")):
            numbers = range(max(length // _CHUNK_TOKENS, 1))
            parts = [ids[_CHUNK_TOKENS * number : _CHUNK_TOKENS * (number + 1)] for number in numbers]
            engine.add(Chunk(engine.tokenizer.decode(part), f"{length}-{n}") for n, part in enumerate(parts))
            chunks = [ChunkRef(f"{length}-{n}") for n in numbers]
            prompt = BlendPrompt(segments=["Read this.\n\n", *chunks, _QUESTION])
            # Of each caller, in another order.
            prompts = prompts or [
                BlendPrompt(
                    segments=["Read this.\n\n", *chunks[n % len(chunks) :], *chunks[: n % len(chunks)], _QUESTION]
                )
                for n in range(callers)
            ]
            whole = engine.prompt_ids(prompt)
            timed = [_round(engine, alone, prompt, whole, answer_tokens) for _ in range(rounds)]
            first, answer, our_first, our_answer = zip(*timed, strict=True)
            rows.append(_row(len(whole), "first token", first, our_first))
            rows.append(_row(len(whole), f"answer of {answer_tokens}", answer, our_answer))
        if callers > 1:
            rows.append(_together(engine, prompts, answer_tokens, rounds))
        with engine_of(engine) as sharing:
            plain = BlendPrompt(segments=[tuple(whole)])
            sharing.generate(plain, 2)
            twice = []
            for _ in range(rounds):
                # Behind an answer of one token llama-cpp-python still has the scores, and computes nothing at all.
                again(whole, 2)
                twice.append((seconds_of(again, whole, 1), seconds_of(sharing.generate, plain, 1)))
        rows.append(_row(len(whole), "first token, the same plain text again", *zip(*twice, strict=True)))
        kind = "GGUF" if hasattr(engine, "llama") else str(engine.model.dtype).removeprefix("torch.")
    title = f"{Path(model).name}, {kind}, {torch.get_num_threads()} threads, medians of {rounds}"
    figures = Figures(title, rows, {"model": Path(model).name})
    figures.show()
    figures.write(json_file, "bench real", {"answer_tokens": answer_tokens, "rounds": rounds, "callers": callers})


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


def _row(tokens: int, what: str, alone: Sequence[float], stored: Sequence[float]) -> Row:
    times = {"alone_s": median(alone), "stored_s": median(stored), "speedup": median_ratio(alone, stored)}
    return {"tokens": tokens, "what": what, **times}


def engine_of(engine: BlendEngine) -> BlendEngine:
    """Return an engine over the model of another one that keeps earlier prompts."""
    return engine.another(config=EngineConfig())


def _ours(engine: BlendEngine, prompt: BlendPrompt, count: int) -> Any:
    return engine.generate(prompt, count, eos_token_id=[] if hasattr(engine, "llama") else None, do_sample=False)


def _round(
    engine: BlendEngine, alone: Answer, prompt: BlendPrompt, whole: Sequence[int], answer_tokens: int
) -> tuple[float, ...]:
    first, answer = (seconds_of(alone, whole, count) for count in (1, answer_tokens))
    return first, answer, *(seconds_of(_ours, engine, prompt, count) for count in (1, answer_tokens))


def _alone(engine: BlendEngine) -> tuple[Answer, Answer]:
    """Return what answers without this project, knowing nothing, and knowing the prompt before."""
    llama = getattr(engine, "llama", None)
    if llama is None:

        def generate(ids: Sequence[int], count: int) -> None:
            given = torch.tensor([list(ids)])
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            engine.model.generate(given, attention_mask=torch.ones_like(given), **options)

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
