"""Screen that the demonstration shows."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cacheblend_lab.demo.manual import pages
from cacheblend_lab.demo.run import METHODS, Answered, score
from cacheblend_rag.cli.output import console, say_seconds, show_table

__all__ = ["show_demo"]


def show_demo(answered: Sequence[Answered], chunks: int, added: int, retrieved: int, model: str, verbose: bool) -> None:
    """Show how often each method was right and how soon, and the question at which most was gained, or all of them.

    `answered` has two for each question, in the order of `METHODS`; `added` of the chunks were put in now.
    """
    screen = console()
    there = chunks - added
    screen.print(
        f"{model} has read {len(pages())} pages of the Python language reference, in {chunks} chunks"
        f"{f', {there} of them before' if there else ''}. Each question is answered from the {retrieved} chunks found first, in "
        f"prompts of {int(median(each.prompt_tokens for each in answered)):,} tokens. Times are medians.\n",
        markup=False,
    )
    scores = score(answered)
    full = scores[0]
    show_table(
        "Twenty questions, half through LlamaIndex and half through LangChain"
        if full.questions == 20
        else f"{full.questions} questions through LlamaIndex and LangChain",
        ("", "right answers", "first token", "sooner", "whole answer", "sooner"),
        [
            (
                each.method,
                f"{each.right}/{each.questions}",
                say_seconds(each.first_s),
                f"{full.first_s / each.first_s:.1f}x",
                say_seconds(each.whole_s),
                f"{full.whole_s / each.whole_s:.1f}x",
            )
            for each in scores
        ],
    )
    pairs = list(zip(answered[::2], answered[1::2], strict=True))
    # Most is gained where the answer is right.
    best = max(pairs, key=lambda pair: (pair[1].is_right, pair[0].first_s / pair[1].first_s))
    for pair in pairs if verbose else [best]:
        title = f"{'' if verbose else 'An example. '}{pair[0].framework}: {pair[0].question.text}"
        lines = [
            (each.method, each.answer, "yes" if each.is_right else "no", say_seconds(each.first_s)) for each in pair
        ]
        show_table(title, ("", "answer", "right", "first token"), lines, text_columns=2)
    same = sum(one.answer == other.answer for one, other in pairs)
    screen.print(f"{same} of {len(pairs)} answers are word for word the same by {' and by '.join(METHODS)}.")
