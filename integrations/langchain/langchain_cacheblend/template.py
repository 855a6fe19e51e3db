"""From a conversation to a prompt, by the model's own chat template."""

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
from cacheblend_rag.errors import ConfigError, PromptError
from langchain_cacheblend.documents import as_chunks, documents_to_blocks, parts_of
from langchain_cacheblend.holes import Holes

__all__ = ["knows_tools", "render_chat", "render_text"]

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
)
_PROBE = "probe_of_cacheblend"


def knows_tools(tokenizer: Any) -> bool:
    """Return whether a tokenizer's chat template shows tools to the model."""
    function = {"name": _PROBE, "description": "None.", "parameters": {"type": "object", "properties": {}}}
    return _shows_probe(tokenizer, tools=[{"type": "function", "function": function}])


def render_chat(
    tokenizer: Any,
    messages: Sequence[BaseMessage],
    *,
    tools: Sequence[dict[str, Any]] = (),
    documents: Sequence[Document] = (),
) -> list[str | Chunk]:
    """Render messages by the tokenizer's chat template, up to where the answer begins, as text and documents.

    `documents` are those beside the conversation. They stand where the template shows documents, or else, where it knows none,
    before the text of the last message of the user.

    Raises
    ------
    ConfigError
        If the tokenizer has no chat template.
    PromptError
        If a message holds something else than text and documents, or the template cannot show the conversation, its tools
        included.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("this model's tokenizer has no chat template; set tokenizer.chat_template, or use BlendLLM")
    is_about_tools = tools or any(
        isinstance(each, ToolMessage)
        or (isinstance(each, AIMessage) and bool(each.tool_calls or each.invalid_tool_calls))
        for each in messages
    )
    if is_about_tools and not knows_tools(tokenizer):
        raise PromptError(
            "this model's chat template has no tools, so neither tools nor their calls and results can be shown to it; put what "
            "a tool returned into a user message, or use a model that has learnt to call tools"
        )
    holes = Holes()
    variables: dict[str, Any] = {"tools": list(tools)} if tools else {}
    chunks = as_chunks(documents) if documents else []
    if chunks and _shows_probe(tokenizer, documents=[{"title": "", "text": _PROBE}]):
        titles = [str(document.metadata.get("title", "")) for document in documents if document.page_content]
        variables["documents"] = [
            {"title": title, "text": holes.text([chunk])} for title, chunk in zip(titles, chunks, strict=True)
        ]
    elif chunks:
        messages = _with_documents(messages, documents)
    names = {
        call["id"]: call["name"]
        for message in messages
        if isinstance(message, AIMessage)
        for call in message.tool_calls
    }
    turns = [_turn(message, holes, names) for message in messages]
    parts = holes.split(_apply(tokenizer, turns, variables))
    holes.check()
    return parts


def render_text(messages: Sequence[BaseMessage]) -> list[str | Chunk]:
    """Write messages as one text, as LangChain does it for models that take a string, without losing documents."""
    holes = Holes()
    flat = [message.model_copy(update={"content": holes.text(parts_of(message))}) for message in messages]
    parts = holes.split(get_buffer_string(flat))
    holes.check()
    return parts


def _apply(tokenizer: Any, turns: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **variables))
    except Exception as error:  # a template may raise what it likes, mostly about the order of roles
        raise PromptError(f"the model's chat template refuses these messages: {error}") from error


def _shows_probe(tokenizer: Any, **variables: Any) -> bool:
    try:
        return _PROBE in _apply(tokenizer, [{"role": "user", "content": "Hello."}], variables)
    except PromptError:
        return False


def _with_documents(messages: Sequence[BaseMessage], documents: Sequence[Document]) -> list[BaseMessage]:
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if isinstance(message, HumanMessage):
            content = [message.content] if isinstance(message.content, str) else list(message.content)
            changed = message.model_copy(update={"content": [*documents_to_blocks(documents), *content]})
            return [*messages[:place], changed, *messages[place + 1 :]]
    raise PromptError("documents= needs a user message to go into; there is none among the messages")


def _turn(message: BaseMessage, holes: Holes, names: dict[str | None, str]) -> dict[str, Any]:
    named = (name for kind, name in _ROLES if isinstance(message, kind))
    role = message.role if isinstance(message, ChatMessage) else next(named, None)
    if role is None:
        raise PromptError(
            f"a {type(message).__name__} cannot be part of a conversation that ChatBlend shows to its model"
        )
    turn: dict[str, Any] = {"role": role, "content": holes.text(parts_of(message))}
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
    return turn
