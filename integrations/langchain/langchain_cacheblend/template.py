"""LangChain's messages as chat templates take them, or as one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    get_buffer_string,
)

from cacheblend_rag import Chunk
from cacheblend_rag.chat.render import Holes, Passage
from cacheblend_rag.errors import PromptError
from langchain_cacheblend.documents import as_chunks, parts_of

__all__ = ["passages", "render_text", "turns_of"]

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
)


def turns_of(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them, the content of each being a list of text and documents.

    `PromptError` if a message holds something else than these, or is none of a conversation with a model.
    """
    names = {
        call["id"]: call["name"]
        for message in messages
        if isinstance(message, AIMessage)
        for call in message.tool_calls
    }
    turns = []
    for message in messages:
        named = (name for kind, name in _ROLES if isinstance(message, kind))
        role = message.role if isinstance(message, ChatMessage) else next(named, None)
        if role is None:
            raise PromptError(
                f"a {type(message).__name__} cannot be part of a conversation that ChatBlend shows to its model"
            )
        turn: dict[str, Any] = {"role": role, "content": parts_of(message)}
        if isinstance(message, ToolMessage):
            turn["tool_call_id"] = message.tool_call_id
            name = message.name or names.get(message.tool_call_id)
            if name:
                turn["name"] = name
        elif isinstance(message, AIMessage) and message.tool_calls:
            turn["tool_calls"] = [
                {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["args"]}}
                for call in message.tool_calls
            ]
        turns.append(turn)
    return turns


def passages(documents: Sequence[Document]) -> list[Passage[Chunk]]:
    """Return documents beside a conversation, leaving out those without text."""
    chunks = as_chunks(documents)
    titles = [str(document.metadata.get("title", "")) for document in documents if document.page_content]
    return [Passage(title, chunk) for title, chunk in zip(titles, chunks, strict=True)]


def render_text(messages: Sequence[BaseMessage]) -> list[str | Chunk]:
    """Write messages as one text, as LangChain does it for models that take a string, without losing documents."""
    holes = Holes[Chunk]()
    flat = [message.model_copy(update={"content": holes.text(parts_of(message))}) for message in messages]
    parts = holes.split(get_buffer_string(flat))
    holes.check()
    return parts
