"""LangChain's documents and messages as chunks, as the turns that chat templates take, and as one text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

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
from langchain_core.messages.tool import tool_call
from langchain_core.prompt_values import StringPromptValue

from cacheblend_rag import Chunk
from cacheblend_rag.chat.render import Holes, Passage, block_text, past_call
from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.errors import ConfigError, PromptError

__all__ = [
    "PromptText",
    "TextPromptValue",
    "as_chunks",
    "as_content",
    "documents_to_blocks",
    "passages",
    "render_text",
    "turns_of",
]

# Key in a block's ``extras``: nothing is put between the document and the text beside it.
_INLINE = "cacheblend_inline"
# Another: what it was made of.
# Thoughts of answers, which the chat template shows again or not, and what streams leave of calls.
_NO_WORDS_OF_ANSWERS = frozenset(
    {"input_json_delta", "reasoning", "reasoning_content", "redacted_thinking", "thinking", "tool_call_chunk"}
)
# Calls among the content of answers, as Anthropic, OpenAI and LangChain write them: what arguments and ids are called there.
_CALLS = {
    "tool_use": ("input", "id"),
    "function_call": ("arguments", "call_id"),
    "tool_call": ("args", "id"),
    "invalid_tool_call": ("args", "id"),
}
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
    return [_block(chunk) for chunk in as_chunks(documents)]


def _block(chunk: Chunk, *, inline: bool = False) -> PlainTextContentBlock:
    """Make a content block of a chunk; `inline` says that nothing is put between it and the text beside it."""
    block: dict[str, Any] = {"type": "text-plain", "mime_type": "text/plain", "text": chunk.text}
    if chunk.id:
        block["id"] = chunk.id
    if inline:
        block["extras"] = {_INLINE: True}
    # On Python 3.10 type checkers take all of its keys for required.
    return cast(PlainTextContentBlock, block)


def as_content(parts: Sequence[str | Chunk]) -> list[str | dict[str, Any]]:
    """Return text and chunks as the content of a message that adds nothing between them."""
    return [part if isinstance(part, str) else dict(_block(part, inline=True)) for part in parts]


class PromptText(str):
    """A prompt as a string that knows which parts of it are chunks, for models that take a string."""

    parts: tuple[str | Chunk, ...]

    def __new__(cls, parts: Sequence[str | Chunk]) -> PromptText:
        text = super().__new__(cls, "".join(part if isinstance(part, str) else part.text for part in parts))
        text.parts = tuple(parts)
        return text


class TextPromptValue(StringPromptValue):
    """Prompt value of a template whose text knows its chunks; see `of`."""

    parts: list[Any]

    @classmethod
    def of(cls, parts: Sequence[str | Chunk]) -> TextPromptValue:
        """Make one of text and chunks."""
        return cls(text=str(PromptText(parts)), parts=list(parts))

    def to_string(self) -> str:
        return PromptText(self.parts)

    def to_messages(self) -> list[BaseMessage]:
        return [HumanMessage(content=as_content(self.parts))]


def _parts_of(message: BaseMessage) -> list[str | Chunk]:
    """Return the content of a message as text and documents; `PromptError` for anything else.

    A document is a block of type "text-plain", or Anthropic's "document", of text; a blank line parts it from the text beside it.
    Content is read in the forms of OpenAI's, Anthropic's and Google's messages; thoughts and calls of answers are no part of it.
    """
    if isinstance(message.content, str):
        return [message.content or str(message.additional_kwargs.get("refusal") or "")]
    parts: list[str | Chunk] = []
    inline = False
    for block in message.content:
        kind = block.get("type") if isinstance(block, dict) and isinstance(message, AIMessage) else None
        if kind in _NO_WORDS_OF_ANSWERS or kind in _CALLS:
            continue
        was_inline, inline = inline, isinstance(block, dict) and bool((block.get("extras") or {}).get(_INLINE))
        for number, part in enumerate(_block_parts(block)):
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
    turns: list[dict[str, Any]] = []
    names: dict[str | None, str] = {}
    for message in messages:
        named = (name for kind, name in _ROLES if isinstance(message, kind))
        role = message.role if isinstance(message, ChatMessage) else next(named, None)
        if role is None:
            raise PromptError(f"ChatBlend cannot show a {type(message).__name__} to its model")
        blocks = message.content if isinstance(message.content, list) else []
        results = [each for each in blocks if isinstance(each, dict) and each.get("type") == "tool_result"]
        for block in results:
            id = block.get("tool_use_id")
            turns.append({"role": "tool", "content": _block_parts(block), "tool_call_id": id})
            turns[-1] |= {"name": names[id]} if id in names else {}
        if results:
            message = message.model_copy(update={"content": [each for each in blocks if each not in results]})
            if not message.content:
                continue
        turn: dict[str, Any] = {"role": role, "content": _parts_of(message)}
        if isinstance(message, ToolMessage):
            turn["tool_call_id"] = message.tool_call_id
        if isinstance(message, ToolMessage | FunctionMessage):
            name = message.name or names.get(turn.get("tool_call_id"))
            turn |= {"name": name} if name else {}
        elif isinstance(message, AIMessage):
            # Of what had to be a call and is none, there are only the words.
            turn["content"] += [call["args"] or "" for call in message.invalid_tool_calls if not call["name"]]
            turn |= {"reasoning_content": thoughts} if (thoughts := _past_thoughts(message)) else {}
            calls = _past_calls(message)
            turn |= {"tool_calls": calls} if calls else {}
            names |= {call["id"]: call["function"]["name"] for call in calls}
        turns.append(turn)
    return turns


def _past_thoughts(message: AIMessage) -> str:
    """Return what was thought before an answer."""
    blocks: list[Any] = [each for each in message.content_blocks if each["type"] == "reasoning"]
    return "\n\n".join(each["reasoning"] for each in blocks if each.get("reasoning"))


def _past_calls(message: AIMessage) -> list[dict[str, Any]]:
    """Return the calls of an answer, wherever the class that wrote it keeps them."""
    given: list[tuple[Any, Any, Any]] = [(call["name"], call["args"], call["id"]) for call in message.tool_calls]
    given += [(call["name"], call["args"], call["id"]) for call in message.invalid_tool_calls if call["name"]]
    known = {id for *_, id in given if id}
    for block in message.content:
        if isinstance(block, dict) and block.get("type") in _CALLS:
            arguments, id = (block.get(name) for name in _CALLS[block["type"]])
            given += [] if id in known else [(block.get("name"), arguments, id)]
    function = message.additional_kwargs.get("function_call")
    if function and not given:
        given.append((function.get("name"), function.get("arguments"), None))
    for name, arguments, _ in given:
        if not name:
            raise PromptError(
                f"an answer has a tool call without a name, of the arguments {arguments!r:.80}; leave it out"
            )
    return [past_call(name, arguments, id) for name, arguments, id in given]


def passages(documents: Sequence[Document]) -> list[Passage[Chunk]]:
    """Return documents beside a conversation, leaving out those without text."""
    chunks = as_chunks(documents)
    titles = [str(document.metadata.get("title") or "") for document in documents if document.page_content]
    return [Passage(title, chunk) for title, chunk in zip(titles, chunks, strict=True)]


def render_text(messages: Sequence[BaseMessage]) -> list[str | Chunk]:
    """Write messages as one text, as LangChain does it for models that take a string, without losing documents."""
    holes = Holes[Chunk]()
    flat = [message.model_copy(update={"content": holes.text(_parts_of(message))}) for message in messages]
    for message, given in zip(flat, messages, strict=True):
        if isinstance(message, AIMessage) and isinstance(given, AIMessage) and not message.tool_calls:
            functions = [(call["function"], call["id"]) for call in _past_calls(given)]
            message.tool_calls = [tool_call(name=each["name"], args=each["arguments"], id=id) for each, id in functions]
    parts = holes.split(get_buffer_string(flat))
    holes.check()
    return parts


def _chunk(document: Document) -> Chunk:
    return Chunk(document.page_content, document.id or None)


def _block_parts(block: str | dict[str, Any]) -> list[str | Chunk]:
    said = block_text(block)
    if said is not None or isinstance(block, str):
        return [said or ""]
    kind, text, held = block.get("type"), block.get("text"), block.get("content")
    source = block.get("source")
    if kind == "document" and isinstance(source, dict):
        kind = "text-plain" if source.get("type") == "text" else kind
        text, held = source.get("data"), source.get("content")
    about: list[str | Chunk] = [f"{block[name]}\n" for name in ("title", "context") if block.get(name)]
    if kind == "text-plain" and isinstance(text, str):
        return [*about, Chunk(text, block.get("id") or None)] if text else []
    if kind == "tool_result" or (kind == "document" and held):
        parts = [_block_parts(each) for each in (held if isinstance(held, list) else [held or ""])]
        return [*about, *(part for each in parts for part in each)]
    raise PromptError(
        f"a content block of type {kind!r} with the keys {sorted(block)} cannot be shown to this model; it takes blocks of type "
        "text, and text-plain for documents, both with text"
    )
