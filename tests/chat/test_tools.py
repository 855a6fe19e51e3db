"""How a model's calls of tools are read, whole and from a stream."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.chat.tools import ToolGate, ToolReply, parse_calls

CALL = ("weather", {"city": "Oslo", "days": 2})
TWO = [CALL, ("time", {})]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]


def as_json(name: str, args: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: args})


FORMS = {
    "tags": (f"<tool_call>\n{as_json(*CALL)}\n</tool_call>", [CALL]),
    "no arguments": (
        "".join(
            f'<tool_call>\n{{"name": "time"{rest}}}\n</tool_call>'
            for rest in ("", ', "arguments": null', ', "arguments": ""', ', "parameters": {}')
        ),
        [("time", {})] * 4,
    ),
    "tags of two": ("".join(f"\n<tool_call>\n{as_json(*each)}\n</tool_call>" for each in TWO), TWO),
    "xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
        "</tool_call>",
        [CALL],
    ),
    "parameters": (as_json(*CALL, key="parameters"), [CALL]),
    "python tag": (f"<|python_tag|>{as_json(*CALL, key='parameters')}", [CALL]),
    "semicolons": ("; ".join(as_json(*each, key="parameters") for each in TWO), TWO),
    "list": (f"[TOOL_CALLS][{', '.join(as_json(*each) for each in TWO)}]", TWO),
    "list without its mark": (f" [{as_json(*CALL)}]", [CALL]),
    "arguments as a string": (json.dumps({"name": "weather", "arguments": json.dumps(CALL[1])}), [CALL]),
    "OpenAI's": (json.dumps({"type": "function", "function": {"name": "weather", "arguments": CALL[1]}}), [CALL]),
    "fence": (f"```json\n{as_json(*CALL)}\n```", [CALL]),
    "fence without a language": (f"\n```\n[{', '.join(as_json(*each) for each in TWO)}]```\n", TWO),
}


def called(reply: ToolReply) -> list[tuple[str, dict[str, Any]]]:
    assert len({call.id for call in reply.calls}) == len(reply.calls)
    return [(call.name, call.arguments) for call in reply.calls]


def streamed(gate: ToolGate, text: str) -> str:
    return "".join(gate.pass_on(letter) for letter in text)


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_read_in_the_forms_that_models_write(form: str) -> None:
    text, calls = FORMS[form]
    reply = parse_calls(text, TOOLS)
    assert called(reply) == calls
    assert (reply.text, reply.invalid) == ("", [])
    # Where one call is allowed, what is called after it is left out.
    reply = parse_calls(text, TOOLS, one_call=True)
    assert (called(reply), reply.text) == (calls[:1], "")


@pytest.mark.parametrize(
    "text",
    [
        *("", " \n", "Four.", '{"a": "b"}', "[1, 2]", '{"name": "weather"', "weather(1)", "{}"),
        *(
            '{"name": "weather", "days": 2}',
            '{"name": "gcc", "parameters": {"O": 2}}',
            '[weather(city="Oslo")]',
            "<tool_",
        ),
        *(f"So:\n```json\n{as_json(*CALL)}\n```", f"```json\n{as_json(*CALL)}\n```\nThat is it."),
        *(f"```json\n{as_json('gcc', {})}\n```", f"```python\n{as_json(*CALL)}\n```", f"```\n{as_json(*CALL)}"),
        *("Write `<tool_call>` first.", "<tool_call>nothing</tool_call>\n", '<tool_call>\n{"a": 1}\n</tool_call> x'),
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    reply = parse_calls(text, TOOLS)
    assert (reply.text, reply.calls, reply.invalid) == (text, [], [])


def test_a_call_that_cannot_be_read_is_said_to_be_invalid() -> None:
    reply = parse_calls('Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Os', TOOLS)
    assert (reply.text, reply.calls) == ("Well.\n", [])
    assert (reply.invalid[0].name, reply.invalid[0].arguments) == ("weather", '{"city": "Os')


def test_the_text_around_calls_keeps_its_blanks() -> None:
    call = FORMS["tags"][0]
    assert parse_calls(f"  Well,\n\n{call}\n and\n{call}\n", TOOLS).text == "  Well,\n\n\n and\n\n"
    assert parse_calls(f"\n{call}\n{call}\n", TOOLS).text == ""


@pytest.mark.parametrize("form", ["tags", "xml", "parameters", "list"])
def test_a_call_that_was_cut_is_said_to_be(form: str) -> None:
    text, _ = FORMS[form]
    for size in range(text.index("weather") + 12):
        reply = parse_calls(text[:size], TOOLS, is_cut=True, must_call=True)
        assert (reply.text, reply.calls) == ("", [])
        assert "max_tokens" in reply.invalid[0].error
    assert "max_tokens" not in parse_calls("Well.", TOOLS, must_call=True).invalid[0].error


OTHER = '<tool_call>\n{"name": "gcc", "arguments": {}}\n</tool_call>'


@given(
    st.sampled_from(["", "Well. ", "\n", " {", "[We", "<b>", OTHER, '{"id": 1}']) | st.text(max_size=40),
    st.lists(st.integers(1, 12), max_size=12),
    st.sampled_from([*FORMS, "none"]),
    st.sampled_from(["", "\n", " So.", OTHER, "<tool_call></tool_"]),
    st.booleans(),
    st.sampled_from([0, 0, 1, 5, 13, 30]),
    st.sampled_from([TOOLS, TOOLS, [], [{"function": {"name": "another"}}]]),
)
def test_a_stream_shows_what_the_answer_says(
    before: str, cuts: list[int], form: str, after: str, one: bool, missing: int, offered: list[dict[str, Any]]
) -> None:
    text = before + FORMS.get(form, ("",))[0] + after
    text = text[: len(text) - missing]
    gate = ToolGate()
    shown, rest = "", text
    for size in [*cuts, len(text)]:
        shown += gate.pass_on(rest[:size])
        rest = rest[size:]
    reply = parse_calls(text, offered, one_call=one, is_cut=missing > 0)
    assert len(shown) == gate.shown
    assert reply.text.startswith(shown)
    # What calls a tool that was not offered is text.
    assert offered == TOOLS or not reply.calls
    if not reply.calls and not reply.invalid:
        assert reply.text == text


def test_a_stream_waits_while_a_call_may_begin_and_no_longer() -> None:
    for text in ("<b>", "Well, [", "```py", " It is {"):
        assert ToolGate().pass_on(text) == streamed(ToolGate(), text) == text
    for text in ("", " ", "{", '[{"function"', "[TOOL_", "<tool_c", "``", "<tool_call>"):
        assert ToolGate().pass_on(text) == ""


def test_what_is_text_by_its_schema_stays_as_it_is_written() -> None:
    properties = {"id": {"type": "string"}, "note": {"type": ["string", "null"]}, "count": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "order", "parameters": {"properties": properties}}}]
    values = {"id": "0012", "note": "1.10", "count": "3", "other": "true"}
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    text = f"<tool_call>\n<function=order>\n{written}</function>\n</tool_call>"
    [call] = parse_calls(text, tools).calls
    assert call.arguments == {"id": "0012", "note": "1.10", "count": 3, "other": True}
    [call] = parse_calls(text.replace("1.10", "null"), tools).calls
    assert call.arguments["note"] is None
