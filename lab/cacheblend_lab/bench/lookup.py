"""Answers with prompt look-up beside those without: ``python -m cacheblend_lab.bench.lookup MODEL``.

MODEL is a GGUF file, or a folder for transformers. Questions are those about Python's manual, and sentences of it that are to be
continued word for word. The chunks' KV is stored before a question is timed.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from cacheblend_lab.answers import Trial, copying, manual
from cacheblend_lab.bench.runner import Figures, Row, in_rounds, median_ratio
from cacheblend_lab.sets import QuestionSet
from cacheblend_rag.chunk import BlendPrompt
from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import make_quiet
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.lookup import Pace


def main(
    model: Annotated[str, typer.Argument(help="A GGUF file, or a folder of transformers.")],
    questions: Annotated[int, typer.Option(help="How many of each kind are asked.")] = 50,
    answer_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 48,
    rounds: Annotated[int, typer.Option(help="How often each is asked both ways; medians count.")] = 3,
    store: Annotated[str | None, typer.Option(help="Where KV is kept for the next time; by default nowhere.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Ask each question with look-up and without; compare the answers token by token, and their times."""
    make_quiet()
    about = manual()
    sets = {"questions": about, "quotations": copying(about, 1 + questions // len(about.documents))}
    with ExitStack() as stack:
        engine = stack.enter_context(BlendEngine.from_pretrained(model, config=EngineConfig(prefix_bytes=0)))
        folder = Path(store or stack.enter_context(tempfile.TemporaryDirectory()))
        rows = [_row(engine, kind, given, folder, questions, answer_tokens, rounds) for kind, given in sets.items()]
    figures = Figures(
        f"{Path(model).name}, answers of at most {answer_tokens} tokens", rows, {"model": Path(model).name}
    )
    figures.show()
    figures.write(json_file, "bench lookup", {"answer_tokens": answer_tokens, "rounds": rounds})


def _row(
    engine: Any, kind: str, given: QuestionSet, folder: Path, questions: int, answer_tokens: int, rounds: int
) -> Row:
    trial = Trial(engine, given, folder)
    asked = trial.engine("own")
    # What guesses cost and how often they are right is learnt over all questions, as a program that answers them does.
    paces = {"without": Pace(0), "with": Pace()}
    step = max(1, len(given.questions) // questions)
    chosen = islice(given.questions, 0, questions * step, step)
    found = [_both(asked, paces, trial.prompt(question), answer_tokens, rounds) for question in chosen]
    trial.close()
    ratios, same, tokens = zip(*found, strict=True)
    ranked = sorted(ratios)
    return {
        "asked": kind,
        "answers": len(same),
        "same": sum(same),
        "mean_tokens": fmean(tokens),
        "speedup": median(ratios),
        "slowest_tenth": ranked[len(ranked) // 10],
        "fastest_tenth": ranked[-1 - len(ranked) // 10],
    }


def _both(
    engine: Any, paces: dict[str, Pace], prompt: BlendPrompt, answer_tokens: int, rounds: int
) -> tuple[float, bool, int]:
    """Return how much faster a prompt is answered with look-up, whether it is the same answer, and its length."""
    engine.prefill(prompt)
    answers: dict[str, tuple[int, ...]] = {}

    def ask(way: str) -> float:
        holder = engine.llama.decoding if hasattr(engine, "llama") else engine.backend
        holder.pace = paces[way]
        began = time.perf_counter()
        answers[way] = engine.generate(prompt, answer_tokens, do_sample=False).token_ids
        return time.perf_counter() - began

    times = in_rounds([*paces], ask, rounds, unmeasured=0, say=lambda _: None)
    ratio = median_ratio(times["without"], times["with"])
    return ratio, answers["with"] == answers["without"], len(answers["without"])


if __name__ == "__main__":
    typer.run(main)
