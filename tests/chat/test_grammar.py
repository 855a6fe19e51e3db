"""What a grammar made of JSON schemas allows."""

from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import AddedToken

from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendEngine
from cacheblend_rag.chat.grammar import Guide, json_grammar
from cacheblend_rag.chat.tools import call_grammar
from cacheblend_rag.errors import ConfigError, StructuredOutputError


def flag(*names: str, **more: Any) -> dict[str, Any]:
    """The schema of an object with properties that are true or false."""
    return {"type": "object", "properties": {n: {"type": "boolean"} for n in names}, "required": [*names]} | more


SENT = {"$ref": "#/$defs/S"}
DEFS = {"$defs": {"S": flag("sent"), "N": flag("a", allOf=[{"properties": {"next": {"$ref": "#/$defs/N"}}}])}}
# A schema, what fits it, and what does not.
SCHEMAS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (flag("a"), ['{"a": true}'], ["{}", '{"a": true, "x": 1}']),
    "patterns": (flag("a", patternProperties={"^x": {"type": "integer"}}), ['{"a": true, "x": 1}'], ['{"x": 1}']),
    "allOf": (
        {"allOf": [flag("paid"), flag("sent")]},
        ['{"paid": true, "sent": true}'],
        ['{"paid": true}'],
    ),
    "anyOf beside properties": (
        flag("paid", anyOf=[SENT, flag("lost")], **DEFS),
        ['{"paid": true, "sent": true}', '{"paid": true, "lost": true}'],
        ['{"paid": true}'],
    ),
    "$ref in allOf, below": (
        {"properties": {"o": {"allOf": [SENT, flag("paid")]}, "p": flag("q")}, "required": ["o"], **DEFS},
        ['{"o": {"sent": true, "paid": true}}', '{"o": {"sent": true, "paid": true}, "p": {"q": true}}'],
        ['{"o": {"sent": true}}'],
    ),
    "recursive": (
        {"$ref": "#/$defs/N", **DEFS},
        ['{"a": true, "next": {"a": true}}'],
        ['{"a": true, "next": {}}'],
    ),
    "parts without names": ({"allOf": [{"type": "object"}, {"description": "Any."}]}, ["{}", '{"x": 1}'], ["1"]),
}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return from_tokenizer(load_tokenizer(), slices=[])


def fits(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar))
    tokens = vocabulary.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_allows_what_fits_it_and_unless_it_is_joined_no_other_properties(
    vocabulary: LLTokenizer, name: str
) -> None:
    schema, good, bad = SCHEMAS[name]
    tool = {"type": "function", "function": {"name": "book", "parameters": schema}}
    other = {"type": "function", "function": {"name": "time"}}
    calls = call_grammar([other, tool], load_tokenizer())
    for text in (*good, *bad):
        assert fits(vocabulary, json_grammar(schema), text) == (text in good), text
        assert fits(vocabulary, calls, f'{{"name": "book", "arguments": {text}}}') == (text in good), text
    assert fits(vocabulary, calls, '{"name": "time", "arguments": {}}')


def test_a_call_is_written_in_the_tokens_of_the_templates_tags() -> None:
    tokenizer = load_tokenizer()
    tokenizer.chat_template = "<tool_call>\n{{ messages[0].content }}\n</tool_call>"
    tool = {"type": "function", "function": {"name": "book", "parameters": flag("a")}}
    text = '<tool_call>\n{"name": "book", "arguments": {"a": true}}\n</tool_call>'
    assert fits(from_tokenizer(tokenizer, slices=[]), call_grammar([tool], tokenizer), text)
    # As Qwen has them: added, and not special.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    matcher = LLMatcher(
        from_tokenizer(tokenizer, slices=[]), LLMatcher.grammar_from_lark(call_grammar([tool], tokenizer))
    )
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert {tokens[0], tokens[-1]} == set(tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"]))
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (flag("a", **{"not": {"type": "string"}}), "not"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"properties": []}, "properties"),
        ({"allOf": 3}, "allOf"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        json_grammar(schema)


def one(**value: Any) -> dict[str, Any]:
    """The schema of an object with one property, of which this is the schema."""
    return {"type": "object", "properties": {"a": value}, "required": ["a"]}


OWN = {"$ref": "#/$defs/Own"}
NEVER: dict[str, dict[str, Any]] = {
    "lengths": one(type="string", minLength=5, maxLength=2),
    "parts that exclude each other": {"allOf": [one(type="string"), one(type="integer")]},
}


@pytest.mark.parametrize("name", NEVER)
def test_a_schema_that_nothing_fits_is_refused_before_anything_is_generated(name: str) -> None:
    with pytest.raises(ConfigError):
        json_grammar(NEVER[name])
    tool = {"type": "function", "function": {"name": "book", "parameters": NEVER[name]}}
    with pytest.raises(ConfigError):
        call_grammar([tool], load_tokenizer())


def test_an_answer_that_cannot_be_finished_is_no_whole_one() -> None:
    schema = {"type": "object", "properties": {"b": OWN}, "$defs": {"Own": one(**OWN)}}
    with BlendEngine.from_pretrained("reference") as engine:
        guide = Guide(engine, json_grammar(schema))
        ids, begun = [1], engine.tokenizer('{"b": ', add_special_tokens=False)["input_ids"]

        def write(number: int) -> None:
            scores = guide(torch.tensor([ids]), torch.zeros(1, len(engine.tokenizer)))
            assert scores[0, engine.end_ids[0]] == -torch.inf
            ids.append(begun[number] if number < len(begun) else int(scores.argmax()))
            assert scores[0, ids[-1]] == 0

        with pytest.raises(StructuredOutputError):
            list(map(write, range(60)))
