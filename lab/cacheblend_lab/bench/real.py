"""A real model asked about real pages, alone and from stored KV: ``python -m cacheblend_lab.bench.real MODEL``.

MODEL is a GGUF file, which llama-cpp-python reads alone, or a folder for transformers, in the dtype that an engine chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Annotated, Any

import torch
import typer

from cacheblend_lab.demo.manual import pages
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.cli.output import make_quiet, show_table
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
    rounds: Annotated[int, typer.Option(help="Measurements, of which medians are shown.")] = 7,
) -> None:
    """Time first tokens and answers: the model alone, from stored KV, and the same plain prompt a second time."""
    make_quiet()
    rows = []
    with BlendEngine.from_pretrained(model, config=EngineConfig(prefix_bytes=0)) as engine:
        alone, again = _alone(engine)
        text = "\n\n".join(text for _, text in sorted(pages().items()))
        ids = engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for length in map(int, tokens.split(",")):
            numbers = range(max(length // _CHUNK_TOKENS, 1))
            parts = [ids[_CHUNK_TOKENS * number : _CHUNK_TOKENS * (number + 1)] for number in numbers]
            engine.add(Chunk(engine.tokenizer.decode(part), f"{length}-{n}") for n, part in enumerate(parts))
            prompt = BlendPrompt(segments=["Read this.\n\n", *(ChunkRef(f"{length}-{n}") for n in numbers), _QUESTION])
            whole = engine.prompt_ids(prompt)
            timed = [_round(engine, alone, prompt, whole, answer_tokens) for _ in range(rounds)]
            first, answer, our_first, our_answer = (median(each) for each in zip(*timed, strict=True))
            rows.append(
                [
                    f"{len(whole):,}",
                    *(f"{each:.2f} s" for each in (first, our_first)),
                    f"{first / our_first:.1f}x",
                    *(f"{each:.2f} s" for each in (answer, our_answer)),
                    f"{answer / our_answer:.1f}x",
                ]
            )
        show_table(
            f"{engine.model_name}, {_dtype(engine)}, {torch.get_num_threads()} threads, answers of {answer_tokens} tokens, "
            f"medians of {rounds}",
            ["tokens", "first: alone", "stored KV", "", "answer: alone", "stored KV", ""],
            rows,
        )
        with engine_of(engine) as sharing:
            plain = BlendPrompt(segments=[tuple(whole)])
            sharing.generate(plain, 2)
            twice = []
            for _ in range(rounds):
                # Behind an answer of one token llama-cpp-python still has the scores, and computes nothing at all.
                again(whole, 2)
                twice.append((_timed(again, whole, 1), _timed(sharing.generate, plain, 1)))
        theirs, ours = (median(each) for each in zip(*twice, strict=True))
        typer.echo(f"The same {len(whole):,} tokens again, as plain text: alone {theirs:.3f} s, ours {ours:.3f} s")


def engine_of(engine: BlendEngine) -> BlendEngine:
    """Return an engine over the model of another one that keeps earlier prompts."""
    if hasattr(engine, "another"):
        return engine.another(config=EngineConfig())  # type: ignore[no-any-return]
    return BlendEngine(engine.model, engine.tokenizer, config=EngineConfig())


def _round(
    engine: BlendEngine, alone: Answer, prompt: BlendPrompt, whole: Sequence[int], answer_tokens: int
) -> tuple[float, ...]:
    def ours(_: Sequence[int], count: int) -> None:
        engine.generate(prompt, count, eos_token_id=[] if hasattr(engine, "llama") else None, do_sample=False)

    return tuple(_timed(each, whole, count) for each in (alone, ours) for count in (1, answer_tokens))


def _timed(work: Callable[..., object], *given: Any) -> float:
    started = time.perf_counter()
    work(*given)
    return time.perf_counter() - started


def _alone(engine: BlendEngine) -> tuple[Answer, Answer]:
    """Return what answers without this project, knowing nothing, and knowing the prompt before."""
    llama = getattr(engine, "llama", None)
    if llama is None:

        def generate(ids: Sequence[int], count: int) -> None:
            given = torch.tensor([list(ids)])
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            engine.model.generate(given, attention_mask=torch.ones_like(given), **options)  # type: ignore[operator]

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


def _dtype(engine: BlendEngine) -> str:
    return "GGUF" if hasattr(engine, "llama") else str(engine.model.dtype).removeprefix("torch.")


if __name__ == "__main__":
    typer.run(main)
