"""What stands in a message: text, and documents that are chunks."""

from __future__ import annotations

from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage

from cacheblend_rag import Chunk
from cacheblend_rag.errors import PromptError
from langchain_cacheblend.documents import INLINE

__all__ = ["parts_of"]

_SEPARATOR = "\n\n"
# Said again by AIMessage.tool_calls, or never shown to a model again.
_NOT_SHOWN_OF_ANSWERS = ("tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "reasoning", "thinking")


def parts_of(message: BaseMessage) -> list[str | Chunk]:
    """Return the content of a message as text and documents.

    A document is a block of type "text-plain", or a document among the artifact of a retriever's tool message, where the
    message's text holds it. A blank line parts a block from what stands beside it.

    Parameters
    ----------
    message : BaseMessage
        The message.

    Returns
    -------
    list of str or Chunk
        The parts in order.

    Raises
    ------
    PromptError
        If the message holds something else than text and documents.
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
        was_inline, inline = inline, isinstance(block, dict) and bool((block.get("extras") or {}).get(INLINE))
        for number, part in enumerate([block] if isinstance(block, str) else _block_parts(block)):
            if not (part if isinstance(part, str) else part.text):
                continue
            beside = parts and (isinstance(part, Chunk) or isinstance(parts[-1], Chunk))
            if beside and not number and not inline and not was_inline and not _parted(parts[-1], part):
                parts.append(_SEPARATOR)
            parts.append(part)
    return parts


def _block_parts(block: dict[str, Any]) -> list[str | Chunk]:
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        return [text]
    if kind == "text-plain" and isinstance(text, str):
        about = [f"{block[name]}\n" for name in ("title", "context") if block.get(name)]
        return [*about, Chunk(text, block.get("id") or None)] if text else []
    raise PromptError(
        f"a content block of type {kind!r} with the keys {sorted(block)} cannot be shown to this model; it takes blocks of type "
        "text, and text-plain for documents, both with a text"
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
        parts.append(Chunk(document.page_content, document.id or None))
        begin = place + len(document.page_content)
    return [*parts, text[begin:]] if begin < len(text) or not parts else parts


def _parted(before: str | Chunk, after: str | Chunk) -> bool:
    return (isinstance(before, str) and before.endswith("\n")) or (isinstance(after, str) and after.startswith("\n"))
