"""From LangChain's messages and documents to the text and the chunks of a prompt."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.messages.content import PlainTextContentBlock

from cacheblend_rag import Chunk
from cacheblend_rag.errors import ConfigError, PromptError

__all__ = ["documents_to_blocks", "flatten", "render_chat"]

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
)
_SEPARATOR = "\n\n"


def documents_to_blocks(documents: Iterable[Document]) -> list[PlainTextContentBlock]:
    """Make content blocks of documents, which a chat model then takes as chunks exactly, without looking for them in the prompt.

    Parameters
    ----------
    documents : iterable of Document
        The documents, from a retriever for example.

    Returns
    -------
    list of PlainTextContentBlock
        One block of type "text-plain" for each document, for the content of a message.
    """
    blocks: list[PlainTextContentBlock] = []
    for document in documents:
        block = PlainTextContentBlock(type="text-plain", mime_type="text/plain", text=document.page_content)
        if document.id:
            block["id"] = document.id
        blocks.append(block)
    return blocks


@dataclass
class _Holes:
    """Stands in for chunks while a chat template is rendered, which knows only text."""

    chunks: list[Chunk] = field(default_factory=list)
    mark: str = field(default_factory=lambda: f"[[{uuid.uuid4().hex}]]")

    def put(self, chunk: Chunk) -> str:
        self.chunks.append(chunk)
        return self.mark

    def fill(self, text: str) -> list[str | Chunk]:
        texts = text.split(self.mark)
        if len(texts) != len(self.chunks) + 1:
            raise PromptError(
                f"the chat template shows {len(texts) - 1} of the {len(self.chunks)} documents of the messages; it drops or "
                "repeats content, so put the documents into the text of a message instead"
            )
        filled: list[str | Chunk] = [texts[0]]
        for chunk, after in zip(self.chunks, texts[1:], strict=True):
            filled += [chunk, after]
        return [part for part in filled if part]


def render_chat(tokenizer: Any, messages: Sequence[BaseMessage]) -> list[str | Chunk]:
    """Render messages by the tokenizer's chat template, up to where the answer begins.

    Parameters
    ----------
    tokenizer : Any
        The model's tokenizer.
    messages : sequence of BaseMessage
        The conversation.

    Returns
    -------
    list of str or Chunk
        Text, and the documents among the messages' content blocks.

    Raises
    ------
    ConfigError
        If the tokenizer has no chat template.
    PromptError
        If a message holds something else than text and documents, or the template cannot show the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("this model's tokenizer has no chat template; set tokenizer.chat_template, or use BlendLLM")
    holes = _Holes()
    turns = [{"role": _role(message), "content": _content(message, holes)} for message in messages]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise what it likes, mostly about the order of roles
        raise PromptError(f"the model's chat template refuses these messages: {error}") from error
    return holes.fill(text)


def flatten(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the messages with their content blocks as one text each, for models that take a string.

    Raises
    ------
    PromptError
        If a message holds something else than text and documents.
    """
    flat = []
    for message in messages:
        if isinstance(message.content, str):
            flat.append(message)
        else:
            text = "".join(part if isinstance(part, str) else part.text for part in _parts(message))
            flat.append(message.model_copy(update={"content": text}))
    return flat


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    if isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls):
        raise PromptError("a message holds tool calls, which ChatBlend does not pass on; leave them out")
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    raise PromptError(f"a {type(message).__name__} is no part of a conversation that ChatBlend can show to its model")


def _content(message: BaseMessage, holes: _Holes) -> str:
    return "".join(part if isinstance(part, str) else holes.put(part) for part in _parts(message))


def _parts(message: BaseMessage) -> list[str | Chunk]:
    """Return the content as text and documents; a blank line parts a document from what stands beside it."""
    if isinstance(message.content, str):
        return [message.content]
    parts: list[str | Chunk] = []
    for block in message.content:
        part = block if isinstance(block, str) else _part(block)
        if not (part if isinstance(part, str) else part.text):
            continue
        if parts and (isinstance(part, Chunk) or isinstance(parts[-1], Chunk)) and not _parted(parts[-1], part):
            parts.append(_SEPARATOR)
        parts.append(part)
    return parts


def _part(block: dict[str, Any]) -> str | Chunk:
    kind, text = block.get("type"), block.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    if kind == "text-plain" and isinstance(text, str):
        return Chunk(text, block.get("id") or None) if text else ""
    raise PromptError(
        f"a content block of type {kind!r} with the keys {sorted(block)} cannot be shown to this model; it takes blocks of type "
        "text, and text-plain for documents, both with a text"
    )


def _parted(before: str | Chunk, after: str | Chunk) -> bool:
    return (isinstance(before, str) and before.endswith("\n")) or (isinstance(after, str) and after.startswith("\n"))
