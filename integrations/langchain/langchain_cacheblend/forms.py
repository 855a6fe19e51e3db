"""Forms of answers, an object or a call of a tool: what LangChain asks for, how a model is told of it, how it is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.json import parse_partial_json
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from cacheblend_rag.chat.tools import ToolReply
from cacheblend_rag.errors import ConfigError, StructuredOutputError

__all__ = [
    "AnswerForm",
    "AnswerFormError",
    "as_functions",
    "call_chunks",
    "calls_of",
]


class AnswerFormError(StructuredOutputError, OutputParserException):
    """An answer that does not have the form that was asked for, as LangChain's own parsers say it."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message, text)
        self.llm_output = text


@dataclass(frozen=True)
class AnswerForm:
    """Form that an answer must have: a pydantic model, a TypedDict, or a JSON schema."""

    schema: Any

    @property
    def _object(self) -> Any:
        """The pydantic model, of version 2 or 1, or None."""
        return self.schema if isinstance(self.schema, type) and is_basemodel_subclass(self.schema) else None

    def json_schema(self) -> dict[str, Any]:
        """Return the form as a JSON schema."""
        if self._object is not None:
            made = self._object.model_json_schema if issubclass(self._object, BaseModel) else self._object.schema
            return dict(made())
        given = self.schema
        if isinstance(given, dict) and isinstance(given.get("schema"), dict):
            given = given["schema"]
        # LangChain would leave out what is no property, as allOf.
        is_schema = isinstance(given, dict) and not given.keys() & {"function", "input_schema", "parameters"}
        return dict(given) if is_schema else convert_to_json_schema(given)

    def attempt(self, message: Any) -> tuple[Any, AnswerFormError | None]:
        """Return an answer as an object, or None and why it is none."""
        try:
            return self.parse(message), None
        except AnswerFormError as error:
            return None, error

    def parse(self, message: Any) -> Any:
        """Return an answer, or the arguments of its first call, as an object of the pydantic model, or as a dict.

        `AnswerFormError` says why not.
        """
        calls = [*message.tool_calls, *message.invalid_tool_calls]
        given = calls[0]["args"] if calls else message.text
        try:
            return self._read(json.loads(given) if isinstance(given, str) else given)
        except (ValueError, TypeError) as error:
            cut = message.response_metadata.get("finish_reason") == "length"
            hint = "it was cut off at the token limit; raise max_tokens" if cut else "ask for that form in the prompt"
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            raise AnswerFormError(
                f"the model's answer {text[:200]!r} is not JSON of the form that was asked for ({error}); {hint}", text
            ) from error

    def _read(self, value: Any) -> Any:
        if self._object is not None:
            return self._object.model_validate(value) if issubclass(self._object, BaseModel) else self._object(**value)
        if not isinstance(value, dict):
            raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
        missing = [name for name in self.json_schema().get("required", ()) if name not in value]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        return value


def as_functions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form; `ConfigError` if one is not a function but run by a provider of models itself."""
    shown = [convert_to_openai_tool(tool) for tool in tools]
    for tool, each in zip(tools, shown, strict=True):
        if isinstance(tool, dict) and "title" in tool and "properties" not in tool:
            # A JSON schema of which LangChain would leave out what is no property, as allOf.
            each["function"]["parameters"] = {n: tool[n] for n in tool if n not in ("title", "description")}
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
