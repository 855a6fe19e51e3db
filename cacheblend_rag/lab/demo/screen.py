"""What the demonstration shows: one screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cacheblend_rag.cli.output import console, say_seconds, show_table
from cacheblend_rag.demo.corpus import demo_documents
from cacheblend_rag.lab.demo.example import Example
from cacheblend_rag.lab.demo.run import METHODS, Asked, Ingestion, Score
from cacheblend_rag.lab.demo.size import RealSize

__all__ = ["show_answers", "show_demo"]

_TITLES = {"llama_index": "LlamaIndex", "langchain": "LangChain"}


def show_demo(
    ingestions: Sequence[Ingestion],
    scores: Sequence[Score],
    retrieved: int,
    example: Example | None,
    size: RealSize | None,
) -> None:
    """Show what was read, how each method did through each framework, one example, and the speed at a real model's size."""
    screen, first = console(), ingestions[0]
    screen.print(
        f"Read: {len(demo_documents())} documents in {first.chunks} chunks, {first.tokens:,} tokens. Each of "
        f"{scores[0].questions} questions is answered from the {retrieved} chunks found first. Times are medians.\n"
    )
    for each in ingestions:
        there = each.chunks - each.encoded
        title = (
            f"{_TITLES[each.framework]}: put in within {say_seconds(each.seconds)}, {each.encoded} chunks encoded"
            f"{f', the KV of {there} was there' if there else ''}"
        )
        lines = [
            (
                METHODS[score.method].title,
                f"{score.right}/{score.questions}",
                f"{score.prompt_tokens:,}",
                say_seconds(score.ttft_s),
                f"{score.speedup:.1f}x",
            )
            for score in scores
            if score.framework == each.framework
        ]
        show_table(title, ("", "right answers", "prompt tokens", "first token", "speed-up"), lines)
    if example is None:
        screen.print("No question told full prefill of the retrieved chunks and the default apart.")
    else:
        _show_question("An example. ", example.asked)
        screen.print(example.why, markup=False)
    if size is not None:
        screen.print(
            f"\nIts documents and question at the shape of {size.shape}, {size.prompt_tokens:,} tokens, random weights: first "
            f"token after {say_seconds(size.full_s)} by full prefill, {say_seconds(size.blend_s)} by the default, "
            f"[bold]{size.full_s / size.blend_s:.0f}x[/bold] as soon."
        )


def show_answers(asked: Sequence[Asked]) -> None:
    """Show what was answered to each question through each framework, by each method."""
    for number in range(0, len(asked), len(METHODS)):
        _show_question("", {each.method: each for each in asked[number : number + len(METHODS)]})


def _show_question(label: str, answers: Mapping[str, Asked]) -> None:
    blend = answers["blend"]
    lines = [
        (METHODS[method].title, each.answer, "yes" if each.is_right else "no", say_seconds(each.ttft_s))
        for method, each in answers.items()
    ]
    title = f"{label}{_TITLES[blend.framework]}: {blend.question.text}"
    show_table(title, ("", "answer", "right", "first token"), lines, text_columns=2)
