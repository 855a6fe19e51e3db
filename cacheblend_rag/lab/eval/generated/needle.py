"""A needle in a haystack over depth and length, and the heat map of what is found (A3, Figures 4 and 7)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.eval.generated.facts import fact_puzzle
from cacheblend_rag.lab.eval.generated.needles import NeedleSetting, across_puzzle, needle_puzzle
from cacheblend_rag.lab.eval.generated.packing import Puzzle, TokenCounter
from cacheblend_rag.lab.eval.generated.ruler import at_least_one, generated_task
from cacheblend_rag.lab.eval.task import EvalTask
from cacheblend_rag.lab.figures import new_figure, save_figure
from cacheblend_rag.reference.prompt import FORMATS

__all__ = ["DEPTHS", "LENGTHS", "draw_needle_heat_map", "needle_heat_map", "needle_task"]

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
        Whether the needle's key ends one chunk and its value begins the next, behind "It", "She" or "He".
    hidden : "number" or "fact"
        A secret number, as everywhere (across a border, beside three others); or what a person of the fictional world does,
        asked in a form that the reference model was trained on.

    Returns
    -------
    EvalTask
        The task; a question's kind is ``"{length} @ {depth}"``, as `needle_heat_map` takes it.

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


def needle_heat_map(recall: Mapping[str, Mapping[str, float]], path: Path) -> Path:
    """Write `draw_needle_heat_map`'s figure to a file.

    Parameters
    ----------
    recall : mapping of str to mapping of str to float
        For each method, the mean recall of each kind of `needle_task`'s questions; other kinds, such as "all", are left out.
    path : Path
        The file that is written; its ending says the format.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    ConfigError
        If there is nothing to draw, matplotlib is not installed, or the file cannot be written.
    """
    return save_figure(draw_needle_heat_map(recall), path)


def draw_needle_heat_map(recall: Mapping[str, Mapping[str, float]]) -> Any:
    """Draw what was found at each depth and length, one map for each method.

    Parameters
    ----------
    recall : mapping of str to mapping of str to float
        As `needle_heat_map` takes it. A cell without a figure stays blank.

    Returns
    -------
    matplotlib Figure
        The figure.

    Raises
    ------
    ConfigError
        If there is nothing to draw, or matplotlib is not installed.
    """
    maps = {method: cells for method, kinds in recall.items() if (cells := _cells(kinds))}
    if not maps:
        raise ConfigError('there is no kind of the form "LENGTH @ DEPTH" to draw; evaluate the task "needle" first')
    lengths = sorted({length for cells in maps.values() for length, _ in cells})
    depths = sorted({depth for cells in maps.values() for _, depth in cells})
    figure, panels = new_figure(len(maps), width=1.8 + 0.6 * len(lengths), height=1.8 + 0.35 * len(depths))
    for axes, (method, cells) in zip(panels, maps.items(), strict=True):
        rows = [[cells.get((length, depth), float("nan")) for length in lengths] for depth in depths]
        image = axes.imshow(rows, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], rotation=45)
        axes.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
        axes.set(title=method, xlabel="tokens", ylabel="depth")
    figure.colorbar(image, ax=panels, label="recall")
    return figure


def _cells(kinds: Mapping[str, float]) -> dict[tuple[int, float], float]:
    cells = {}
    for kind, value in kinds.items():
        length, at, depth = kind.partition(" @ ")
        if at:
            cells[int(length), float(depth)] = value
    return cells
