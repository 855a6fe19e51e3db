"""Tools: how they are shown to a model, how it is made to call one, and how its calls are read."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.chat.grammar import framed_json_grammar
from cacheblend_rag.errors import ConfigError

__all__ = ["ToolCall", "ToolGate", "ToolReply", "UnreadCall", "call_grammar", "chosen_tools", "parse_calls"]

# Qwen, Hermes and many after them; Llama's and Mistral's own marks are special tokens, which a text does not show.
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CUT = "the call was cut off at the token limit of the answer; raise max_tokens"
_BEGUN_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)', re.DOTALL)
_XML_CALL = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, with an id of its own."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(frozen=True)
class UnreadCall:
    """Text that begins like a call but is none: the name where it can be read, the rest as it was written, and what is wrong."""

    name: str | None
    arguments: str
    id: str
    error: str


@dataclass
class ToolReply:
    """A model's answer when it may call tools: its text besides the calls, the calls, and what begins like a call but is none."""

    text: str
    calls: list[ToolCall] = field(default_factory=list)
    invalid: list[UnreadCall] = field(default_factory=list)


def chosen_tools(tools: Sequence[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], bool]:
    """Return which of the tools the model may call, and whether it has to call one; `ConfigError` if there is none such.

    `choice` is "auto" or None, "none" or False, "any", "required" or True, or a tool: its name, or OpenAI's form of it.
    """
    if choice is None or choice == "auto":
        return list(tools), False
    if choice is False or choice == "none":
        return [], False
    if choice is True or choice in ("any", "required"):
        return list(tools), True
    function = choice.get("function", choice) if isinstance(choice, dict) else {"name": choice}
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise ConfigError(
            f'tool_choice={choice!r:.200} names none of the tools {names}; give one of them, "auto", "any" or "none"'
        )
    return named, True


def call_grammar(tools: Sequence[dict[str, Any]], template: str) -> str:
    """Return the grammar of one call of one of the tools, in the form that a chat template shows calls in."""
    arguments = "parameters" if _OPEN not in template and '"parameters"' in template else "arguments"
    before, after = (f"{_OPEN}\n", f"}}\n{_CLOSE}") if _OPEN in template else ("", "}")
    frames = []
    for tool in tools:
        function = tool["function"]
        begun = f'{before}{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{arguments}": '
        frames.append((begun, function.get("parameters") or {"type": "object", "properties": {}}, after))
    return framed_json_grammar(frames)


def parse_calls(
    text: str, tools: Sequence[dict[str, Any]] = (), *, is_cut: bool = False, must_call: bool = False
) -> ToolReply:
    """Read the tool calls in an answer; where there are none, it is the text as it is.

    The forms are those that models write: JSON or XML between ``<tool_call>`` tags, JSON alone (one object, several with ``;``
    between them, or a list), with ``arguments`` or ``parameters``, ``[TOOL_CALLS]`` before a list, and a list of Python calls.
    XML does not say which of its values are text: what is, by the schemas of the tools that were offered, stays as it is written.
    `is_cut` says that the answer had as many tokens as it was allowed, `must_call` that whatever it is, it is not text.
    """
    reply = _read(text, tools, is_cut)
    if must_call and not reply.calls and not reply.invalid:
        error = _CUT if is_cut else "the answer had to be a call, but is not one"
        return ToolReply("", invalid=[UnreadCall(None, text.strip(), _new_id(), error)])
    return reply


def _read(text: str, tools: Sequence[dict[str, Any]], is_cut: bool) -> ToolReply:
    if _OPEN in text:
        before, *blocks = text.split(_OPEN)
        reply = ToolReply(before.rstrip())
        for block in blocks:
            body, closed, after = block.partition(_CLOSE)
            if not closed:
                part = max((n for n in range(1, len(_CLOSE)) if body.endswith(_CLOSE[:n])), default=0)
                body = body[: len(body) - part]
            _read_block(body, tools, reply, is_cut and not closed)
            reply.text += after.strip()
        return reply
    body = text.strip()
    for mark in ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>"):
        body = body.removeprefix(mark).lstrip()
    calls = _json_calls(body) or _python_calls(body)
    return ToolReply("", calls) if calls else ToolReply(text)


class ToolGate:
    """Lets a streamed answer through up to where a tool call may begin."""

    def __init__(self) -> None:
        self._seen = ""
        self._shown = 0

    @property
    def shown(self) -> int:
        """Number of characters that have passed."""
        return self._shown

    def pass_on(self, piece: str) -> str:
        """Take in the next piece and return what can be shown now."""
        self._seen += piece
        end = len(self._seen)
        if self._seen.lstrip()[:1] in ("", "{", "[", "<"):
            begin = self._seen.lstrip()
            # A tag that turns out to be another one is text.
            if not begin or begin[0] != "<" or _OPEN.startswith(begin[: len(_OPEN)]) or begin.startswith("<|"):
                return ""
        place = self._seen.find(_OPEN)
        if place >= 0:
            end = place
        else:
            end -= max((n for n in range(1, len(_OPEN)) if self._seen.endswith(_OPEN[:n])), default=0)
        # What is blank before a call is not part of the text.
        end = len(self._seen[:end].rstrip())
        shown = self._seen[self._shown : end]
        self._shown = max(self._shown, end)
        return shown


def _read_block(body: str, tools: Sequence[dict[str, Any]], reply: ToolReply, is_cut: bool) -> None:
    calls = _json_calls(body.strip()) or _xml_calls(body, tools)
    if calls:
        reply.calls += calls
    else:
        begun = _BEGUN_CALL.match(body)
        name, arguments = begun.groups() if begun else (None, body.strip())
        error = "no JSON with a name and arguments, and no <function=...> element is between the tags"
        error = _CUT if is_cut else error
        reply.invalid.append(UnreadCall(name, arguments, _new_id(), error))


def _json_calls(body: str) -> list[ToolCall]:
    """Return the calls of a text that is nothing but JSON, or none."""
    decoder = json.JSONDecoder(strict=False)
    found: list[Any] = []
    place = 0
    while place < len(body):
        try:
            value, place = decoder.raw_decode(body, place)
        except json.JSONDecodeError:
            return []
        found += value if isinstance(value, list) else [value]
        place += len(body[place:]) - len(body[place:].lstrip("; \n\t"))
    calls = [_call_of(value) for value in found]
    return [call for call in calls if call is not None] if all(calls) else []


def _call_of(value: Any) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    value = value.get("function") if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments, _new_id())


def _xml_calls(body: str, tools: Sequence[dict[str, Any]]) -> list[ToolCall]:
    if _XML_CALL.sub("", body):
        return []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    return [
        ToolCall(
            name,
            {
                key: _value(text, schemas.get(name, {}).get("properties", {}).get(key))
                for key, text in _XML_PARAMETER.findall(parameters)
            },
            _new_id(),
        )
        for name, parameters in _XML_CALL.findall(body)
    ]


def _value(text: str, schema: Any) -> Any:
    """Return the value that a text stands for, by the JSON schema that it has to fit, if there is one."""
    given = schema.get("type") if isinstance(schema, dict) else None
    kinds = given if isinstance(given, list) else [given]
    if "string" in kinds and not ("null" in kinds and text == "null"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _python_calls(body: str) -> list[ToolCall]:
    """Return the calls of a text like ``[weather(city="Oslo"), time()]``, or none."""
    try:
        tree = ast.parse(body, mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else []
        calls = []
        for element in elements:
            if not isinstance(element, ast.Call) or element.args or any(word.arg is None for word in element.keywords):
                return []
            arguments = {str(word.arg): ast.literal_eval(word.value) for word in element.keywords}
            calls.append(ToolCall(ast.unparse(element.func), arguments, _new_id()))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return []
    return calls


def _new_id() -> str:
    # Nine letters and digits: what the templates of Mistral ask for, and no other forbids.
    return uuid.uuid4().hex[:9]
