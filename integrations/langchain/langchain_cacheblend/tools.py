"""Tools in OpenAI's form, and the calls of an answer as LangChain has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json

from cacheblend_rag.chat.tools import ToolReply
from cacheblend_rag.errors import ConfigError

__all__ = ["as_functions", "call_chunks", "calls_of"]


def as_functions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form; `ConfigError` if one is not a function but run by a provider of models itself."""
    shown = [convert_to_openai_tool(tool) for tool in tools]
    for each in shown:
        if not isinstance(each.get("function"), dict):
            raise ConfigError(
                f"the tool {each!r:.80} is not a function: it runs where models are served, but this model runs here; give a "
                "function, a BaseTool or a pydantic model"
            )
    return shown


def calls_of(reply: ToolReply) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Return the calls of an answer, and what begins like one but is none."""
    calls = [tool_call(name=call.name, args=call.arguments, id=call.id) for call in reply.calls]
    invalid = [
        invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=call.error) for call in reply.invalid
    ]
    return calls, invalid


def call_chunks(reply: ToolReply) -> list[ToolCallChunk]:
    """Return the same as the end of a stream has them."""
    written = [(call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in reply.calls]
    unread = [(call.name, _unreadable(call.arguments), call.id) for call in reply.invalid]
    return [
        tool_call_chunk(name=name, args=arguments, id=id, index=number)
        for number, (name, arguments, id) in enumerate([*written, *unread])
    ]


def _unreadable(arguments: str) -> str:
    """Return the arguments of an invalid call so that LangChain takes them for invalid in a stream too.

    There it reads the beginning of a JSON object as if it were a whole one; as a JSON string it is none.
    """
    try:
        read = parse_partial_json(arguments) if arguments else {}
    except json.JSONDecodeError:
        return arguments
    return json.dumps(arguments, ensure_ascii=False) if isinstance(read, dict) else arguments
