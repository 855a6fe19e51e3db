"""Long texts cut into chunks where a tokenizer is not at hand, and the value that is judged taken out of an answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

__all__ = ["CHUNK_CHARS", "code_line", "cut", "first_line", "pack", "split_before"]

CHUNK_CHARS = 2048
"""Characters of about 512 tokens of English."""

_BREAKS = ("\n", ". ", " ")


def cut(text: str, max_chars: int) -> list[str]:
    """Cut a text into pieces of at most `max_chars` characters, which joined are the text again.

    A piece ends with a line, else with a sentence, else with a word, wherever one ends in the second half of what fits.
    """
    pieces = []
    start = 0
    while len(text) - start > max_chars:
        end = start + max_chars
        for mark in _BREAKS:
            found = text.rfind(mark, start + max_chars // 2, end)
            if found >= 0 and found + len(mark) <= end:
                end = found + len(mark)
                break
        pieces.append(text[start:end])
        start = end
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def pack(pieces: Iterable[str], max_chars: int) -> list[str]:
    """Join neighbouring pieces as long as they stay within `max_chars` characters; a longer piece is cut."""
    chunks: list[str] = []
    for piece in pieces:
        parts = cut(piece, max_chars)
        if chunks and len(parts) == 1 and len(chunks[-1]) + len(piece) <= max_chars:
            chunks[-1] += piece
        else:
            chunks += parts
    return chunks


def split_before(pattern: re.Pattern[str], text: str) -> list[str]:
    """Cut a text before every match; the pieces joined are the text again."""
    borders = [0, *(match.start() for match in pattern.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(borders) if start < end]


_NOT_CODE = ("`", "#", "//")


def first_line(answer: str) -> str:
    """Return the first line that is not blank, stripped; models go on with another question where examples came before."""
    return answer.strip().split("\n", 1)[0].strip()


def code_line(answer: str) -> str:
    """Return the first line that is neither blank nor a comment nor a fence, with its indentation; empty if there is none."""
    for line in answer.split("\n"):
        if line.strip() and not any(mark in line for mark in _NOT_CODE):
            return line.rstrip("\r")
    return ""
