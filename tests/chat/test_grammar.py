"""What a grammar made of JSON schemas allows."""

from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendEngine
from cacheblend_rag.chat.grammar import Guide, json_grammar
from cacheblend_rag.chat.tools import call_grammar
from cacheblend_rag.errors import ConfigError


def flag(*names: str, **more: Any) -> dict[str, Any]:
    """The schema of an object with properties that are true or false."""
    return {"type": "object", "properties": {n: {"type": "boolean"} for n in names}, "required": [*names]} | more


SENT = {"$ref": "#/$defs/S"}
DEFS = {"$defs": {"S": flag("sent"), "N": flag("a", allOf=[{"properties": {"next": {"$ref": "#/$defs/N"}}}])}}
# A schema, what fits it, and what does not.
SCHEMAS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (flag("a"), ['{"a": true}'], ["{}", '{"a": true, "x": 1}']),
    "open by its own word": (flag("a", additionalProperties=True), ['{"a": true, "x": 1}'], ["{}"]),
    "patterns": (flag("a", patternProperties={"^x": {"type": "integer"}}), ['{"a": true, "x": 1}'], ['{"x": 1}']),
    "allOf": (
        {"allOf": [flag("paid"), flag("sent")]},
        ['{"paid": true, "sent": true}'],
        ['{"paid": true}', '{"paid": true, "sent": true, "x": 1}'],
    ),
    "anyOf beside properties": (
        flag("paid", anyOf=[SENT, flag("lost")], **DEFS),
        ['{"paid": true, "sent": true}', '{"paid": true, "lost": true}'],
        ['{"paid": true}', '{"paid": true, "sent": true, "x": 1}'],
    ),
    "$ref in allOf, below": (
        {"properties": {"o": {"allOf": [SENT, flag("paid")]}, "p": flag("q")}, "required": ["o"], **DEFS},
        ['{"o": {"sent": true, "paid": true}}', '{"o": {"sent": true, "paid": true}, "p": {"q": true}}'],
        ['{"o": {"sent": true}}', '{"o": {"sent": true, "paid": true}, "p": {"q": true, "x": 1}}'],
    ),
    "recursive": (
        {"$ref": "#/$defs/N", **DEFS},
        ['{"a": true, "next": {"a": true}}'],
        ['{"a": true, "next": {}}', '{"a": true, "x": 1}'],
    ),
    "required, but not described": (
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a", "b"]},
        ['{"a": true, "b": 1}'],
        ['{"a": true}', '{"a": true, "b": 1, "c": 2}'],
    ),
    "parts without names": ({"allOf": [{"type": "object"}, {"description": "Any."}]}, ["{}", '{"x": 1}'], ["1"]),
    "names that are keywords": (
        {"type": "object", "properties": {"properties": flag("a"), "allOf": {"type": "integer"}}},
        ['{"properties": {"a": true}, "allOf": 1}'],
        ['{"properties": {}}'],
    ),
}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return from_tokenizer(load_tokenizer(), slices=[])


def fits(vocabulary: LLTokenizer, grammar: str, text: str) -> bool:
    matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(grammar))
    tokens = vocabulary.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_allows_what_fits_it_and_no_properties_without_a_name(vocabulary: LLTokenizer, name: str) -> None:
    schema, good, bad = SCHEMAS[name]
    tool = {"type": "function", "function": {"name": "book", "parameters": schema}}
    other = {"type": "function", "function": {"name": "time"}}
    calls = call_grammar([other, tool], "")
    for text in (*good, *bad):
        assert fits(vocabulary, json_grammar(schema), text) == (text in good), text
        assert fits(vocabulary, calls, f'{{"name": "book", "arguments": {text}}}') == (text in good), text
    assert fits(vocabulary, calls, '{"name": "time", "arguments": {}}')


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (flag("a", **{"not": {"type": "string"}}), "not"),
        (flag("a", unevaluatedProperties=False), "unevaluatedProperties"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"properties": []}, "properties must be"),
        ({"allOf": 3}, "allOf must be"),
        ({"$ref": 3}, "must be"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        json_grammar(schema)


def test_a_schema_that_no_text_fits_ends_no_answer_as_if_it_were_whole() -> None:
    schema = flag("a", additionalProperties=False, patternProperties={"^a$": {"type": "boolean"}})
    with BlendEngine.from_pretrained("reference") as engine:
        guide, prompt = Guide(engine, json_grammar(schema)), [1]
        written = engine.tokenizer('{"a": true, ', add_special_tokens=False)["input_ids"]
        guide(torch.tensor([prompt]), torch.zeros(1, len(engine.tokenizer)))
        with pytest.raises(ConfigError, match="no text can satisfy"):
            guide(torch.tensor([prompt + written]), torch.zeros(1, len(engine.tokenizer)))
