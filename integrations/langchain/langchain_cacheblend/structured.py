"""Answers in a given form: the schema that is asked for, and how the answer is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel

from cacheblend_rag.errors import ConfigError

__all__ = ["AnswerForm", "requested_schema", "with_schema"]

_SHOWN = "\n\nAnswer with JSON of this schema and nothing else:\n"


@dataclass(frozen=True)
class AnswerForm:
    """What an answer has to be.

    Parameters
    ----------
    schema : type or dict
        A pydantic model, a TypedDict, or a JSON schema.
    """

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
        """Return an answer as an object of the pydantic model, or as a dict.

        Raises
        ------
        OutputParserException
            If the answer is no such JSON; the message shows it and says why.
        """
        text = _unfenced(message.text)
        try:
            return self._read(json.loads(text))
        except (ValueError, TypeError) as error:
            cut = isinstance(message, AIMessage) and message.response_metadata.get("finish_reason") == "length"
            hint = (
                "it was cut at the most tokens allowed; raise max_tokens" if cut else "ask for that form in the prompt"
            )
            raise OutputParserException(
                f"the model's answer {text[:200]!r} is no JSON of the form that was asked for ({error}); {hint}",
                llm_output=text,
            ) from error

    def _read(self, value: Any) -> Any:
        if self._object is not None:
            return self._object.model_validate(value) if issubclass(self._object, BaseModel) else self._object(**value)
        if not isinstance(value, dict):
            raise ValueError(f"it is a JSON {type(value).__name__} and no object")
        missing = [name for name in self.json_schema().get("required", ()) if name not in value]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        return value


def requested_schema(response_format: Any) -> dict[str, Any]:
    """Return the JSON schema that OpenAI's ``response_format`` asks for.

    Raises
    ------
    ConfigError
        If it is of no known form.
    """
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    asked = response_format.get("json_schema") if kind == "json_schema" else None
    if isinstance(asked, dict) and isinstance(asked.get("schema"), dict):
        schema: dict[str, Any] = asked["schema"]
        return schema
    raise ConfigError(
        f"response_format={response_format!r:.200} is not known; give {{'type': 'json_object'}}, or {{'type': 'json_schema', "
        "'json_schema': {'name': ..., 'schema': ...}}}, or use with_structured_output"
    )


def with_schema(messages: list[BaseMessage], schema: dict[str, Any]) -> list[BaseMessage]:
    """Return the messages with the schema said in the last one of the user, so that the model knows what its words will be."""
    said = _SHOWN + json.dumps(schema, ensure_ascii=False)
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
