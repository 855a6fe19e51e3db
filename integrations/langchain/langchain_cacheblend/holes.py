"""Texts with holes where chunks stand, while something that knows only text works on them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue

from cacheblend_rag import Chunk, FixedText
from cacheblend_rag.errors import PromptError
from langchain_cacheblend.documents import chunk_block
from langchain_cacheblend.fixed import declare_fixed, said_first

__all__ = ["Holes", "PromptText", "TextPromptValue", "as_content"]


class PromptText(str):
    """A prompt as a string that knows which parts of it are chunks, for models that take a string.

    Parameters
    ----------
    parts : sequence of str, Chunk or FixedText
        The prompt.

    Attributes
    ----------
    parts : tuple of str, Chunk or FixedText
        The prompt.
    """

    parts: tuple[str | Chunk | FixedText, ...]

    def __new__(cls, parts: Sequence[str | Chunk | FixedText]) -> PromptText:
        text = super().__new__(cls, "".join(part if isinstance(part, str) else part.text for part in parts))
        text.parts = tuple(parts)
        return text


class TextPromptValue(StringPromptValue):
    """What a prompt template makes, where the text knows its chunks; see `of`."""

    parts: list[Any]

    @classmethod
    def of(cls, parts: Sequence[str | Chunk | FixedText]) -> TextPromptValue:
        """Make one of text and chunks."""
        return cls(text=str(PromptText(parts)), parts=list(parts))

    def to_string(self) -> str:
        return PromptText(self.parts)

    def to_messages(self) -> list[BaseMessage]:
        message = HumanMessage(content=as_content([_plain(part) for part in self.parts]))
        is_fixed = bool(self.parts) and isinstance(self.parts[0], FixedText)
        return declare_fixed(ChatPromptValue(messages=[message]), said_first([message]) if is_fixed else None).messages


def as_content(parts: Sequence[str | Chunk]) -> list[str | dict[str, Any]]:
    """Return text and chunks as the content of a message that adds nothing between them."""
    return [part if isinstance(part, str) else dict(chunk_block(part, inline=True)) for part in parts]


def _plain(part: str | Chunk | FixedText) -> str | Chunk:
    return part.text if isinstance(part, FixedText) else part


class Holes:
    """Gives each chunk a mark to stand in for it, and puts the chunks where the marks came to stand."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._shown: set[int] = set()
        self._name = uuid.uuid4().hex

    def put(self, chunk: Chunk) -> str:
        """Return the mark of a chunk."""
        self._chunks.append(chunk)
        return f"[[{self._name}-{len(self._chunks) - 1}]]"

    def text(self, parts: Sequence[str | Chunk]) -> str:
        """Return parts as one text with marks."""
        return "".join(part if isinstance(part, str) else self.put(part) for part in parts)

    def split(self, text: str) -> list[str | Chunk]:
        """Return a text with the chunks in their places; a chunk may stand there more than once."""
        pieces = re.split(rf"\[\[{self._name}-(\d+)\]\]", text)
        parts: list[str | Chunk] = [pieces[0]]
        for number, after in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
            self._shown.add(number)
            parts += [self._chunks[number], after]
        return [part for part in parts if part]

    def check(self) -> None:
        """Raise `PromptError` if a chunk has come to stand nowhere."""
        lost = len(self._chunks) - len(self._shown)
        if lost:
            raise PromptError(
                f"the template drops or changes content: {lost} of the {len(self._chunks)} documents do not stand in what it "
                "makes of them; put the documents into the text of a message instead"
            )

    def fill(self, text: str) -> list[str | Chunk]:
        """Return a text with the chunks in their places.

        Raises
        ------
        PromptError
            If a chunk stands nowhere.
        """
        parts = self.split(text)
        self.check()
        return parts
