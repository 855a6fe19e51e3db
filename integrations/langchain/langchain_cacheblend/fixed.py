"""What of a prompt is its template's own words, whoever asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate

from cacheblend_rag import Chunk, FixedText
from cacheblend_rag.chunk import Segment, text_hash
from langchain_cacheblend.content import parts_of

__all__ = ["declare_fixed", "fixed_head", "said_first", "static_value"]

_FIXED = "cacheblend_fixed"


def static_value(prompt: BasePromptTemplate[Any], variable: str, context: str, value: str) -> PromptValue | None:
    """Return what a prompt template makes of its context alone, with a word of nobody's in the place of every other value.

    Parameters
    ----------
    prompt : BasePromptTemplate
        The template.
    variable : str
        The variable of the context.
    context : str
        What to put there.
    value : str
        What to put everywhere else, values that were filled in beforehand included.

    Returns
    -------
    PromptValue or None
        None where it is no plain template, or cannot be filled so.
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
    """Return a digest of what messages say before their first document; None if they hold none, or it is somebody's own words.

    That is so where a message of anybody but the system stands before that with the document.
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

    Parameters
    ----------
    value : ChatPromptValue
        The messages.
    digest : str or None
        What `said_first` says of the template's own words.
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

    Parameters
    ----------
    messages : sequence of BaseMessage
        The conversation.
    parts : sequence of str or Chunk
        What the model's chat template makes of it.
    documents : sequence of Document
        Documents beside it, which stand elsewhere.
    """
    digest = messages[0].additional_kwargs.get(_FIXED) if messages else None
    is_fixed = digest is not None and not documents and said_first(messages) == digest
    first, *others = parts
    # What was said since then cannot stand before the first document.
    if is_fixed and isinstance(first, str) and others and isinstance(others[0], Chunk):
        return [FixedText(first), *others]
    return list(parts)
