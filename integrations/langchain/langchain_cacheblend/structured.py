"""Answers in a given form: what LangChain asks for, how a model is told of it, and how it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from cacheblend_rag.chat.grammar import schema_request

__all__ = ["AnswerForm", "with_schema"]


@dataclass(frozen=True)
class AnswerForm:
    """What an answer has to be: a pydantic model, a TypedDict, or a JSON schema."""

    schema: Any

    @property
    def _object(self) -> Any:
        """The pydantic model, of version 2 or 1, or None."""
        return self.schema if isinstance(self.schema, type) and is_basemodel_subclass(self.schema) else None

    def json_schema(self) -> dict[str, Any]:
        """Return the form as a JSON schema."""
        if self._object is None:
            return convert_to_json_schema(self.schema)
        schema: dict[str, Any] = (
            self._object.model_json_schema() if issubclass(self._object, BaseModel) else self._object.schema()
        )
        return schema

    def parse(self, message: BaseMessage) -> Any:
        """Return an answer as an object of the pydantic model, or as a dict; `OutputParserException` says why not."""
        text = _unfenced(message.text)
        try:
            return self._read(json.loads(text))
        except (ValueError, TypeError) as error:
            cut = isinstance(message, AIMessage) and message.response_metadata.get("finish_reason") == "length"
            hint = "it was cut off at the token limit; raise max_tokens" if cut else "ask for that form in the prompt"
            raise OutputParserException(
                f"the model's answer {text[:200]!r} is not JSON of the form that was asked for ({error}); {hint}",
                llm_output=text,
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


def with_schema(messages: list[BaseMessage], schema: dict[str, Any]) -> list[BaseMessage]:
    """Return the messages with the schema said in the last one of the user, so that the model knows what its words will be."""
    said = schema_request(schema)
    for place in range(len(messages) - 1, -1, -1):
        message = messages[place]
        if isinstance(message, HumanMessage):
            content = message.content + said if isinstance(message.content, str) else [*message.content, said]
            return [*messages[:place], message.model_copy(update={"content": content}), *messages[place + 1 :]]
    return messages


def _unfenced(text: str) -> str:
    """Return what stands between the fences of a Markdown code block, where the text is one."""
    lines = text.strip().split("\n")
    fenced = len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```"
    return "\n".join(lines[1:-1]) if fenced else text.strip()
