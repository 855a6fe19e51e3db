"""Generated text as chunks: sentences packed up to a number of tokens, and as many of them as a context holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from cacheblend_rag.errors import ConfigError

__all__ = ["Puzzle", "TokenCounter", "Unit", "fit", "pack"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A piece of text that no chunk border divides: a sentence, or an item of a list.

    Attributes
    ----------
    text : str
        The text.
    ends_chunk : bool
        Whether the next unit must stand in the next chunk.
    """

    text: str
    ends_chunk: bool = False


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A question, and the text of any length that answers it.

    Attributes
    ----------
    question : str
        What is asked.
    answers : tuple of str
        Everything that a right answer names.
    build : callable
        Returns the units of the text with that many units of filling. The same number gives the same text.
    least : int
        The least number `build` takes.
    """

    question: str
    answers: tuple[str, ...]
    build: Callable[[int], Sequence[Unit]]
    least: int = 0


class TokenCounter:
    """Counts the tokens of texts, special tokens apart."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._sizes: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Return how many tokens a text has."""
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def sizes(self, units: Sequence[Unit]) -> list[int]:
        """Return about how many tokens each unit adds to a chunk; a tokenizer may join tokens over a border."""
        new = list(dict.fromkeys(unit.text for unit in units if unit.text not in self._sizes))
        if new:
            ids = self._tokenizer([" " + text for text in new], add_special_tokens=False, verbose=False)["input_ids"]
            self._sizes.update((text, len(row)) for text, row in zip(new, ids, strict=True))
        return [self._sizes[unit.text] for unit in units]


def pack(units: Sequence[Unit], count: TokenCounter, chunk_tokens: int) -> tuple[list[str], int]:
    """Fill chunks with units, in order, each chunk as far as it goes; return them, and their tokens together."""
    sizes = count.sizes(units)
    chunks: list[str] = []
    total = start = 0
    while start < len(units):
        end, size = start, 0
        while end < len(units) and (end == start or size + sizes[end] <= chunk_tokens):
            size += sizes[end]
            end += 1
            if units[end - 1].ends_chunk:
                break
        text = _joined(units[start:end])
        while (size := count(text)) > chunk_tokens:
            end -= 1
            if end == start:
                raise ConfigError(
                    f"chunk_tokens={chunk_tokens} is too small: {text!r} alone has {size} tokens; take longer chunks"
                )
            text = _joined(units[start:end])
        chunks.append(text)
        total += size
        start = end
    return chunks, total


def fit(puzzle: Puzzle, count: TokenCounter, context_tokens: int, chunk_tokens: int) -> tuple[str, ...]:
    """Return a puzzle's text as chunks, with as much filling as the context holds, up to about one unit."""
    fits = puzzle.least
    chunks, tokens = pack(puzzle.build(fits), count, chunk_tokens)
    if tokens > context_tokens:
        raise ConfigError(
            f"context_tokens={context_tokens} is too small: the shortest text that answers "
            f"{puzzle.question.splitlines()[0]!r} has {tokens} tokens; take a longer context"
        )
    # The average over many units tells how far to go, and what was tried bounds the next guess.
    too_many: int | None = None
    number = fits + 32
    while number > fits:
        tried, size = pack(puzzle.build(number), count, chunk_tokens)
        per_unit = max(1.0, (size - tokens) / (number - fits)) if size > tokens else 1.0
        if size <= context_tokens:
            fits, chunks, tokens = number, tried, size
        else:
            too_many = number
        guess = fits + int((context_tokens - tokens) / per_unit)
        number = guess if too_many is None else min(guess, too_many - 1)
    return tuple(chunks)


def _joined(units: Sequence[Unit]) -> str:
    return " ".join(unit.text for unit in units)
