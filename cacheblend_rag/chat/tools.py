"""Tools: how they are shown to a model, how it is made to call one, and how its calls are read."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cacheblend_rag.chat.grammar import json_grammar, written
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.stops import begun

__all__ = ["ToolCall", "ToolGate", "ToolReply", "UnreadCall", "call_grammar", "chosen_tools", "parse_calls"]

# Qwen, Hermes and many after them; Llama's and Mistral's own marks are special tokens, which a text does not show.
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CUT = "the call was cut off at the token limit of the answer; raise max_tokens"
_BEGUN_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.*)', re.DOTALL)
_BEGUN = re.compile(r'\s*(?:\{\s*"(?:name|function|type|arguments|parameters)"|<function=)')
# Before calls that stand alone, and what an answer of such calls begins with.
_MARKS = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")
_STARTS = ("{", "[", *_MARKS, "```json", "```\n")
_FENCED = re.compile(r"\s*```(?:json)?\s(.*)```\s*", re.DOTALL)
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
    """Return which of the tools the model may call, and whether it has to call one; `ConfigError` if there is none such."""
    choice = choice["type"] if isinstance(choice, dict) and choice.keys() == {"type"} else choice
    if choice in (None, "auto", True, "any", "required"):
        return list(tools), choice not in (None, "auto")
    if choice in (False, "none"):
        return [], False
    function = choice.get("function", choice) if isinstance(choice, dict) else {"name": choice}
    name = function.get("name") if isinstance(function, dict) else None
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise ConfigError(
            f'tool_choice={choice!r:.200} names none of the tools {names}; give one of them, "auto", "any" or "none"'
        )
    return named, True


def call_grammar(tools: Sequence[dict[str, Any]], tokenizer: Any) -> str:
    """Return the grammar of one call of one of the tools, in the form that a tokenizer's chat template shows calls in."""
    template, read = str(tokenizer.get_chat_template(tools=tools)), lexer_of(tokenizer).read
    arguments = "parameters" if _OPEN not in template and '"parameters"' in template else "arguments"
    before, after, line = "", json.dumps("}"), json.dumps("\n")
    if _OPEN in template:
        opens, closes = (written(tag, lambda text: read(text)[0]) for tag in (_OPEN, _CLOSE))
        before, after = f"{opens} {line}", f"{after} {line} {closes}"
    calls = []
    for function in (tool["function"] for tool in tools):
        begun = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{arguments}": '
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        calls.append(json_grammar(schema, f"{before} {json.dumps(begun)}", after))
    return "start: " + " | ".join(call.removeprefix("start: ") for call in calls)


def parse_calls(
    text: str, tools: Sequence[dict[str, Any]], *, is_cut: bool = False, must_call: bool = False, one_call: bool = False
) -> ToolReply:
    """Read the calls of these tools in an answer; all else is text as it was written.

    The forms are those that models write: JSON or XML between ``<tool_call>`` tags, JSON alone (one object, several with ``;``
    between them, or a list, with or without ``[TOOL_CALLS]``), also in a fence of Markdown, with ``arguments`` or ``parameters``.
    Of a tool that takes none, these may be empty, null or, between the tags, left out. XML does not say which of its values are
    text: what is, by the schemas of the tools, stays as it is written.
    `is_cut` says that the answer had as many tokens as it was allowed, `must_call` that whatever it is, it is not text, and
    `one_call` that what is called after the first is left out.
    """
    reply = _read(text, tools, is_cut) if tools else ToolReply(text)
    if one_call:
        del reply.calls[1:]
    if must_call and not reply.calls and not reply.invalid:
        error = _CUT if is_cut else "the answer must be a tool call, but is not one"
        return ToolReply("", invalid=[UnreadCall(None, text.strip(), _new_id(), error)])
    return reply


def _read(text: str, tools: Sequence[dict[str, Any]], is_cut: bool) -> ToolReply:
    names = {tool["function"]["name"] for tool in tools}
    fenced = _FENCED.fullmatch(text)
    body = (fenced[1] if fenced else text).strip()
    for mark in _MARKS:
        body = body.removeprefix(mark).lstrip()
    alone = _json_calls(body)
    if alone and {call.name for call in alone} <= names:
        return ToolReply("", alone)
    reply, place = ToolReply(""), 0
    while (begin := text.find(_OPEN, place)) >= 0:
        body, closed, after = text[begin + len(_OPEN) :].partition(_CLOSE)
        reply.text += text[place:begin]
        place = len(text) - len(after)
        body = body if closed else body[: begun(body, _CLOSE)]
        calls = _json_calls(body.strip(), bare=True) or _xml_calls(body, tools)
        if calls and {call.name for call in calls} <= names:
            reply.calls += calls
        elif not calls and (_BEGUN.match(body) or (is_cut and not closed)):
            called = _BEGUN_CALL.match(body)
            name, arguments = called.groups() if called else (None, body.strip())
            error = "no JSON with a name and arguments, and no <function=...> element is between the tags"
            reply.invalid.append(UnreadCall(name, arguments, _new_id(), _CUT if is_cut and not closed else error))
        else:
            reply.text += text[begin:place]
    reply.text += text[place:]
    # Blanks alone part calls from each other, and are no text.
    reply.text = reply.text if reply.text.strip() or not (reply.calls or reply.invalid) else ""
    return reply


class ToolGate:
    """Lets a streamed answer through up to where a call may begin."""

    def __init__(self) -> None:
        self.shown = 0
        """Number of characters that have passed."""
        self._seen = ""

    def pass_on(self, piece: str) -> str:
        """Take in the next piece and return what can be shown now."""
        self._seen += piece
        words = self._seen.lstrip()
        if not self.shown and any(words.startswith(start) or start.startswith(words) for start in _STARTS):
            return ""
        end = self._seen.find(_OPEN)
        end = begun(self._seen, _OPEN) if end < 0 else end
        shown = self._seen[self.shown : end] if self._seen[:end].strip() else ""
        self.shown += len(shown)
        return shown


def _json_calls(body: str, bare: bool = False) -> list[ToolCall]:
    """Return the calls of a text that is nothing but JSON, or none; `bare` ones are names alone."""
    decoder, place = json.JSONDecoder(strict=False), 0
    calls: list[ToolCall] = []
    while True:
        # Several stand in a list, or have something between them.
        place = len(body) - len(body[place:].lstrip("[],; \n\t"))
        if place == len(body):
            return calls
        try:
            value, place = decoder.raw_decode(body, place)
        except (json.JSONDecodeError, RecursionError):
            return []
        call = _call_of(value, bare)
        if call is None:
            return []
        calls.append(call)


def _call_of(value: Any, bare: bool) -> ToolCall | None:
    value = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if arguments in (None, "") and (value.keys() & {"arguments", "parameters"} or (bare and value.keys() == {"name"})):
        # How models write that there are none.
        arguments = {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return (
        ToolCall(name, arguments, _new_id()) if name and isinstance(name, str) and isinstance(arguments, dict) else None
    )


def _xml_calls(body: str, tools: Sequence[dict[str, Any]]) -> list[ToolCall]:
    if _XML_CALL.sub("", body):
        return []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = []
    for match in _XML_CALL.finditer(body):
        known = schemas.get(match[1], {}).get("properties", {})
        arguments = {key: _value(text, known.get(key)) for key, text in _XML_PARAMETER.findall(match[2])}
        calls.append(ToolCall(match[1], arguments, _new_id()))
    return calls


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


def _new_id() -> str:
    # Nine letters and digits: what the templates of Mistral ask for, and no other forbids.
    return uuid.uuid4().hex[:9]
