"""LangChain's documents and messages as chunks, as the turns that chat templates take, and as one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    get_buffer_string,
)
from langchain_core.messages.content import PlainTextContentBlock

from cacheblend_rag import Chunk
from cacheblend_rag.chat.render import Holes, Passage
from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.errors import ConfigError, PromptError
from langchain_cacheblend.places import DOCUMENT_KEYS

__all__ = ["as_chunks", "chunk_block", "documents_to_blocks", "parts_of", "passages", "render_text", "turns_of"]

# Key in a block's ``extras``: nothing is put between the document and the text beside it.
_INLINE = "cacheblend_inline"
# Another: what it was made of.
_SOURCE = "cacheblend_source"
# Said again by AIMessage.tool_calls, or never shown to a model again.
_NOT_SHOWN_OF_ANSWERS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "reasoning", "thinking")
_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)


def as_chunks(documents: Iterable[Document]) -> list[Chunk]:
    """Make chunks of documents, leaving out those without text; `ConfigError` for anything but documents."""
    if isinstance(documents, Document):
        raise ConfigError(f"documents is a single Document, {documents.page_content!r:.40}; give a list: [document]")
    documents = list(documents)
    for document in documents:
        if not isinstance(document, Document):
            raise ConfigError(
                f"there is a {type(document).__name__} among the documents; give Document(page_content, id=...) objects"
            )
    return [_chunk(document) for document in documents if document.page_content]


def documents_to_blocks(documents: Iterable[Document]) -> list[PlainTextContentBlock]:
    """Make content blocks of documents, which a model takes as chunks directly, without searching for them in the prompt.

    Parameters
    ----------
    documents : iterable of Document
        The documents, for example from a retriever.

    Returns
    -------
    list of PlainTextContentBlock
        One block of type "text-plain" for each document that has text, for the content of a message.
    """
    return [chunk_block(chunk) for chunk in as_chunks(documents)]


def chunk_block(chunk: Chunk, *, inline: bool = False) -> PlainTextContentBlock:
    """Make a content block of a chunk; `inline` says that nothing is put between it and the text beside it."""
    block = PlainTextContentBlock(type="text-plain", mime_type="text/plain", text=chunk.text)
    if chunk.id:
        block["id"] = chunk.id
    extras = ({_INLINE: True} if inline else {}) | ({_SOURCE: chunk.source} if chunk.source else {})
    if extras:
        block["extras"] = extras
    return block


def parts_of(message: BaseMessage) -> list[str | Chunk]:
    """Return the content of a message as text and documents; `PromptError` for anything else.

    A document is a block of type "text-plain", or a document among the artifact of a retriever's tool message, where the
    message's text holds it. A blank line parts a block from what stands beside it.
    """
    if isinstance(message.content, str):
        if isinstance(message, ToolMessage):
            return _found(message.content, message.artifact)
        return [message.content]
    parts: list[str | Chunk] = []
    inline = False
    for block in message.content:
        if isinstance(message, AIMessage) and isinstance(block, dict) and block.get("type") in _NOT_SHOWN_OF_ANSWERS:
            continue
        was_inline, inline = inline, isinstance(block, dict) and bool((block.get("extras") or {}).get(_INLINE))
        for number, part in enumerate([block] if isinstance(block, str) else _block_parts(block)):
            if not (part if isinstance(part, str) else part.text):
                continue
            before = parts[-1] if parts else ""
            is_parted = (isinstance(before, str) and before.endswith("\n")) or (
                isinstance(part, str) and part.startswith("\n")
            )
            beside = parts and (isinstance(part, Chunk) or isinstance(before, Chunk))
            if beside and not number and not inline and not was_inline and not is_parted:
                parts.append(BLANK_LINE)
            parts.append(part)
    return parts


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
    titles = [str(document.metadata.get("title") or "") for document in documents if document.page_content]
    return [Passage(title, chunk) for title, chunk in zip(titles, chunks, strict=True)]


def render_text(messages: Sequence[BaseMessage]) -> list[str | Chunk]:
    """Write messages as one text, as LangChain does it for models that take a string, without losing documents."""
    holes = Holes[Chunk]()
    flat = [message.model_copy(update={"content": holes.text(parts_of(message))}) for message in messages]
    parts = holes.split(get_buffer_string(flat))
    holes.check()
    return parts


def _chunk(document: Document) -> Chunk:
    return Chunk(document.page_content, document.id or None, source=document.metadata.get(DOCUMENT_KEYS[0]))


def _block_parts(block: dict[str, Any]) -> list[str | Chunk]:
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        return [text]
    if kind == "text-plain" and isinstance(text, str):
        about = [f"{block[name]}\n" for name in ("title", "context") if block.get(name)]
        source = (block.get("extras") or {}).get(_SOURCE)
        return [*about, Chunk(text, block.get("id") or None, source=source)] if text else []
    raise PromptError(
        f"a content block of type {kind!r} with the keys {sorted(block)} cannot be shown to this model; it takes blocks of type "
        "text, and text-plain for documents, both with text"
    )


def _found(text: str, artifact: Any) -> list[str | Chunk]:
    """Split a text at the documents of an artifact that stand in it, in their order."""
    parts: list[str | Chunk] = []
    begin = 0
    for document in artifact if isinstance(artifact, list | tuple) else ():
        if not isinstance(document, Document) or not document.page_content:
            continue
        place = text.find(document.page_content, begin)
        if place < 0:
            continue
        if place > begin:
            parts.append(text[begin:place])
        parts.append(_chunk(document))
        begin = place + len(document.page_content)
    return [*parts, text[begin:]] if begin < len(text) or not parts else parts
