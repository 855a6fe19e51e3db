"""Prompts made of text and chunks, and what of the text is a template's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate

from cacheblend_rag import Chunk, FixedText
from cacheblend_rag.chunk import Segment, text_hash
from langchain_cacheblend.messages import chunk_block, parts_of

__all__ = [
    "PromptText",
    "TextPromptValue",
    "as_content",
    "declare_fixed",
    "fixed_head",
    "said_first",
    "static_value",
]

_FIXED = "cacheblend_fixed"


class PromptText(str):
    """A prompt as a string that knows which parts of it are chunks, for models that take a string."""

    parts: tuple[str | Chunk | FixedText, ...]

    def __new__(cls, parts: Sequence[str | Chunk | FixedText]) -> PromptText:
        text = super().__new__(cls, "".join(part if isinstance(part, str) else part.text for part in parts))
        text.parts = tuple(parts)
        return text


class TextPromptValue(StringPromptValue):
    """Prompt value of a template whose text knows its chunks; see `of`."""

    parts: list[Any]

    @classmethod
    def of(cls, parts: Sequence[str | Chunk | FixedText]) -> TextPromptValue:
        """Make one of text and chunks."""
        return cls(text=str(PromptText(parts)), parts=list(parts))

    def to_string(self) -> str:
        return PromptText(self.parts)

    def to_messages(self) -> list[BaseMessage]:
        plain = [part.text if isinstance(part, FixedText) else part for part in self.parts]
        message = HumanMessage(content=as_content(plain))
        is_fixed = bool(self.parts) and isinstance(self.parts[0], FixedText)
        digest = said_first([message]) if is_fixed else None
        return list(declare_fixed(ChatPromptValue(messages=[message]), digest).messages)


def as_content(parts: Sequence[str | Chunk]) -> list[str | dict[str, Any]]:
    """Return text and chunks as the content of a message that adds nothing between them."""
    return [part if isinstance(part, str) else dict(chunk_block(part, inline=True)) for part in parts]


def static_value(prompt: BasePromptTemplate[Any], variable: str, context: str, value: str) -> PromptValue | None:
    """Return what a prompt template makes of its context, with one value in the place of all others.

    Values that were filled in beforehand are replaced too. None of what is no plain template, or cannot be filled so.
    """
    if type(prompt) not in (PromptTemplate, ChatPromptTemplate):
        return None
    names = {*prompt.input_variables, *prompt.optional_variables, *prompt.partial_variables}
    # Placeholders take messages.
    values: dict[str, Any] = {name: [HumanMessage(value)] if name in prompt.input_types else value for name in names}
    try:
        return prompt.invoke({**values, variable: context})
    except Exception:  # a template may want other types, and raise what it likes
        return None


def said_first(messages: Sequence[BaseMessage]) -> str | None:
    """Return a digest of what messages say before their first document; None if they hold none.

    None also where a message other than the system's stands before that with the document: its words are not a template's.
    """
    said: list[str] = []
    for message in messages:
        said.append(message.type)
        for part in parts_of(message):
            if isinstance(part, Chunk):
                return text_hash("\0".join(said))
            said.append(part)
        if not isinstance(message, SystemMessage):
            return None
    return None


def declare_fixed(value: ChatPromptValue, digest: str | None) -> ChatPromptValue:
    """Return messages that say of themselves that a template alone wrote what stands before their first document.

    `digest` is what `said_first` says of the template's own words.
    """
    if digest is None or said_first(value.messages) != digest:
        return value
    first, *others = value.messages
    told = first.model_copy(update={"additional_kwargs": {**first.additional_kwargs, _FIXED: digest}})
    return ChatPromptValue(messages=[told, *others])


def fixed_head(
    messages: Sequence[BaseMessage], parts: Sequence[str | Chunk], documents: Sequence[Document]
) -> list[Segment]:
    """Return the parts of a rendered conversation, the first of them as fixed text where the messages say so.

    `documents` are those beside it, which stand elsewhere.
    """
    digest = messages[0].additional_kwargs.get(_FIXED) if messages else None
    is_fixed = digest is not None and not documents and said_first(messages) == digest
    first, *others = parts
    # What was said since then cannot stand before the first document.
    if is_fixed and isinstance(first, str) and others and isinstance(others[0], Chunk):
        return [FixedText(first), *others]
    return list(parts)
