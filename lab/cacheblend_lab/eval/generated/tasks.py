"""RULER (Hsieh et al. 2024) generated, the eleven subtasks of A3's Table 5, and a needle over depth and length."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from transformers import PreTrainedTokenizerBase

from cacheblend_lab.eval.generated.packing import Puzzle, TokenCounter, fit
from cacheblend_lab.eval.generated.puzzles import (
    NEEDLES,
    NeedleSetting,
    across_puzzle,
    common_words_puzzle,
    fact_puzzle,
    frequent_words_puzzle,
    needle_puzzle,
    tracking_puzzle,
)
from cacheblend_lab.eval.metrics import needle_recall
from cacheblend_lab.eval.task import EvalContext, EvalQuestion, EvalTask, at_least_one
from cacheblend_lab.reference.prompt import FORMATS
from cacheblend_rag.errors import ConfigError

__all__ = [
    "DEPTHS",
    "LENGTHS",
    "NEEDLE_ACROSS",
    "RULER_SUBTASKS",
    "generated_task",
    "needle_task",
    "ruler_task",
]

HEAD = "Read the text below, then answer the question about it.\n\n"
TAIL = "\n\n{question}"
SEPARATOR = "\n\n"


@dataclass(frozen=True, slots=True)
class _Subtask:
    draw: Callable[[random.Random], Puzzle]
    max_new_tokens: int


NEEDLE_ACROSS = "needle_across"
_NIAH_TOKENS = 128
_SUBTASKS: dict[str, _Subtask] = {
    **{name: _Subtask(partial(needle_puzzle, setting=setting), _NIAH_TOKENS) for name, setting in NEEDLES.items()},
    "cwe": _Subtask(common_words_puzzle, 120),
    "fwe": _Subtask(frequent_words_puzzle, 50),
    "vt": _Subtask(tracking_puzzle, 30),
    NEEDLE_ACROSS: _Subtask(across_puzzle, _NIAH_TOKENS),
}

RULER_SUBTASKS: tuple[str, ...] = tuple(name for name in _SUBTASKS if name != NEEDLE_ACROSS)
"""The eleven subtasks in the order of A3's Table 5, by RULER's names."""


def ruler_task(
    tokenizer: PreTrainedTokenizerBase,
    *,
    subtasks: Sequence[str] = RULER_SUBTASKS,
    num_questions: int = 100,
    context_tokens: int = 4096,
    chunk_tokens: int = 512,
    seed: int = 0,
) -> EvalTask:
    """Generate RULER's questions, each about a text of its own.

    Parameters
    ----------
    tokenizer
        Any Hugging Face tokenizer; lengths are counted with it.
    subtasks : sequence of str
        Which of `RULER_SUBTASKS`; ``"needle_across"`` is there besides.
    num_questions : int
        How many questions of each subtask.
    context_tokens : int
        Most tokens of the chunks of one text together. What stands before, between and after them comes on top.
    chunk_tokens : int
        Most tokens of a chunk.
    seed : int
        Everything follows from it; a subtask's texts do not depend on which others are asked for.

    Returns
    -------
    EvalTask
        The task; a question's kind is its subtask.

    Raises
    ------
    ConfigError
        If a subtask is unknown, a number is less than 1, or a text does not fit.
    """
    unknown = [name for name in subtasks if name not in _SUBTASKS]
    if unknown or not subtasks:
        named = ", ".join(map(repr, unknown)) or "no subtask"
        raise ConfigError(f"subtasks names {named}; choose from {', '.join(_SUBTASKS)}")
    at_least_one(num_questions=num_questions, context_tokens=context_tokens, chunk_tokens=chunk_tokens)
    count = TokenCounter(tokenizer)
    wanted = list(dict.fromkeys(subtasks))
    return generated_task(
        "ruler",
        count,
        chunk_tokens,
        (
            (f"{name}-{number}", name, context_tokens, _SUBTASKS[name].draw(random.Random(f"{seed}/{name}/{number}")))
            for name in wanted
            for number in range(num_questions)
        ),
        max(_SUBTASKS[name].max_new_tokens for name in wanted),
    )


def generated_task(
    name: str,
    count: TokenCounter,
    chunk_tokens: int,
    puzzles: Iterable[tuple[str, str, int, Puzzle]],
    max_new_tokens: int,
) -> EvalTask:
    """Return puzzles as a task, each with its question's id and kind, and the most tokens of its text.

    Answers get more than `max_new_tokens` where this tokenizer needs more for the longest one.
    """
    contexts = []
    for identifier, kind, context_tokens, puzzle in puzzles:
        texts = fit(puzzle, count, context_tokens, chunk_tokens)
        question = EvalQuestion(identifier, puzzle.question, puzzle.answers, kind)
        contexts.append(EvalContext(texts, (question,)))
        # Room for a numbered list with a few words around it.
        listed = " ".join(f"{place}. {answer}," for place, answer in enumerate(puzzle.answers, 1))
        max_new_tokens = max(max_new_tokens, count(listed) + 16)
    return EvalTask(
        name=name,
        contexts=tuple(contexts),
        metrics={"recall": needle_recall},
        head=HEAD,
        tail=TAIL,
        separator=SEPARATOR,
        chunked=True,
        max_new_tokens=max_new_tokens,
    )


DEPTHS: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS: tuple[int, ...] = (1024, 2048, 3072, 4096)


def needle_task(
    tokenizer: PreTrainedTokenizerBase,
    *,
    depths: Sequence[float] = DEPTHS,
    lengths: Sequence[int] = LENGTHS,
    num_per_cell: int = 5,
    seed: int = 0,
    chunk_tokens: int = 512,
    across: bool = False,
    hidden: Literal["number", "fact"] = "number",
) -> EvalTask:
    """Generate needles in haystacks, over depth and length.

    Parameters
    ----------
    tokenizer
        Any Hugging Face tokenizer; lengths are counted with it.
    depths : sequence of float
        Where the needle stands, from 0 (the text's beginning) to 1 (its end); to the nearest end of a sentence.
    lengths : sequence of int
        Most tokens of the chunks of a text together.
    num_per_cell : int
        How many questions for each depth and length.
    seed : int
        Everything follows from it.
    chunk_tokens : int
        Most tokens of a chunk.
    across : bool
        Whether the needle's key ends one chunk and its value begins the next, after "It", "She" or "He".
    hidden : "number" or "fact"
        A secret number, as everywhere (across a border, beside three others); or what a person of the fictional world does,
        asked in a form that the reference model was trained on.

    Returns
    -------
    EvalTask
        The task; a question's kind is ``"{length} @ {depth}"``, as `draw_needle_heat_map` takes it.

    Raises
    ------
    ConfigError
        If a depth is not between 0 and 1, there is none, a number is less than 1, `hidden` is unknown, or a text does not fit.
    """
    if not depths or not lengths:
        raise ConfigError("a needle needs at least one depth and one length; give depths and lengths")
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ConfigError(f"depth {depth} is outside 0 to 1; give a share of the text, such as 0.5")
    if hidden not in ("number", "fact"):
        raise ConfigError(f"hidden={hidden!r} is unknown; choose number or fact")
    at_least_one(num_per_cell=num_per_cell, chunk_tokens=chunk_tokens)
    for length in lengths:
        at_least_one(length=length)

    def draw(rng: random.Random, depth: float) -> Puzzle:
        if hidden == "fact":
            return fact_puzzle(rng, depth, across)
        return across_puzzle(rng, [depth]) if across else needle_puzzle(rng, NeedleSetting(), [depth])

    def puzzles() -> Iterator[tuple[str, str, int, Puzzle]]:
        for length in dict.fromkeys(lengths):
            for written, depth in {f"{depth:g}": depth for depth in depths}.items():
                for number in range(num_per_cell):
                    rng = random.Random(f"{seed}/{length}/{written}/{number}")
                    puzzle = draw(rng, depth)
                    yield f"{length}-{written}-{number}", f"{length} @ {written}", length, puzzle

    name = "-".join(["needle", *(["fact"] if hidden == "fact" else []), *(["across"] if across else [])])
    task = generated_task(name, TokenCounter(tokenizer), chunk_tokens, puzzles(), max_new_tokens=32)
    if hidden == "number":
        return task
    form = FORMATS["plain_answer"]
    return replace(task, head=form.head, tail=form.suffix("{question}"), separator=form.separator)
