"""Documents as they are passed to a model, as chunks that need not be searched for, and the other content of messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.content import PlainTextContentBlock

from cacheblend_rag import Chunk
from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.errors import ConfigError, PromptError
from langchain_cacheblend.places import source_of

__all__ = ["as_chunks", "chunk_block", "documents_to_blocks", "parts_of"]

# Key in a block's ``extras``: nothing is put between the document and the text beside it.
_INLINE = "cacheblend_inline"
# Another: what it was made of.
_SOURCE = "cacheblend_source"
# Said again by AIMessage.tool_calls, or never shown to a model again.
_NOT_SHOWN_OF_ANSWERS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "reasoning", "thinking")


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


def _chunk(document: Document) -> Chunk:
    return Chunk(document.page_content, document.id or None, source=source_of(document.metadata))


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
