"""Answers in a given form: the schema that is asked for, and the grammar that constrains an answer to it token by token."""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import LogitsProcessor

from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError, StructuredOutputError
from cacheblend_rag.thoughts import Thinking

__all__ = ["Guide", "after_thoughts", "answer_form", "json_grammar", "written"]

# How deep a schema is searched for what has no end; below that an answer may come to it.
_DEEPEST = 32


def answer_form(response_format: Any) -> tuple[str | None, list[str]]:
    """Return the grammar of the answers that OpenAI's ``response_format`` asks for, and what the user's last message says of it.

    For text there are neither. `ConfigError` if it is of no known form, or its schema cannot be enforced.
    """
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    asked: Any = response_format.get("json_schema") if kind else None
    if response_format is None or (kind == "text" and asked is None):
        return None, []
    if kind == "json_object" and asked is None:
        return json_grammar({"type": "object"}), []
    schema = asked.get("schema") if kind == "json_schema" and isinstance(asked, dict) else None
    if not isinstance(schema, dict):
        raise ConfigError(
            f"response_format={response_format!r:.200} is not known; give {{'type': 'json_object'}}, or {{'type': 'json_schema', "
            "'json_schema': {'name': ..., 'schema': ...}}"
        )
    shown = {"description": asked["description"]} | schema if asked.get("description") else schema
    # So that the model knows what its words will be.
    said = f"\n\nAnswer with JSON of this schema and nothing else:\n{json.dumps(shown, ensure_ascii=False)}"
    return json_grammar(schema), [said]


def written(text: str, read: Callable[[str], Sequence[int]]) -> str:
    """Return what stands for a text in a grammar: its token, if it is a single one, as no text has a token that was added."""
    ids = read(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(text)


def json_grammar(schema: dict[str, Any], before: str = "", after: str = "") -> str:
    """Return the grammar (Lark) of the JSON texts that fit a schema, or raise `ConfigError`; `before` and `after` are too."""
    # What is malformed is for llguidance to refuse.
    with suppress(AttributeError, TypeError, RecursionError):
        schema = _closed(schema)
        if not _can_end(schema):
            raise ConfigError(
                "this JSON schema asks for a value without an end: an object or a list must hold another of its own kind, and "
                "that one again; leave the inner one out of what is required, or allow null in its place"
            )
    # Compact but for one blank after separators, as models write JSON; endless whitespace would be JSON too.
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = f"start: {before} %json {json.dumps(schema | {'x-guidance': form})} {after}"
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    if problem:
        # Behind the reason stands the whole grammar.
        reason = problem.partition("\n   1 | ")[0]
        raise ConfigError(f"this JSON schema cannot be enforced: {reason}; leave that part out of the schema")
    return grammar


def after_thoughts(grammar: str, thinking: Thinking | None) -> str:
    """Return the grammar of an answer to a prompt: before it may come thoughts, and must where the prompt ends within them."""
    if thinking is None or thinking.is_over:
        return grammar

    mark = partial(written, read=thinking.read)
    opens, closes, answer = mark(thinking.opens), mark(thinking.closes), grammar.removeprefix("start: ")
    thoughts = f": /(?s:.*)/ {closes}" if closes[0] == "<" else f"[suffix={closes}]: /(?s:.*)/"
    begin = 'thoughts "\\n\\n"?' if thinking.is_open else f'({opens} thoughts "\\n\\n"?)?'
    if thinking.named:
        names = [f'{opens} "{name}" {mark(thinking.named)}' for name in ("analysis", "final")]
        begin = f'({names[0]} thoughts {mark("<|start|>")} "assistant" {names[1]})?'
    return f"start: {begin} answer\nanswer: {answer}\nthoughts{thoughts}"


class Guide(LogitsProcessor):
    """Lets a generation write only what a grammar (in Lark) allows, and end only where it may end."""

    is_of_one_answer = True

    def __init__(self, engine: Engine, grammar: str) -> None:
        self._vocabulary = _vocabulary(engine)
        self._tokenizer = engine.tokenizer
        self.grammar = grammar
        self._rules = LLMatcher.grammar_from_lark(grammar)
        self._matchers: list[LLMatcher] = []
        self._read = 0
        self._prompt_len = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, ``(batch, vocab)``, with those of tokens that may not follow at minus infinity."""
        if not self._matchers or input_ids.shape[1] <= self._prompt_len:
            # The first token of an answer; after damaged KV the same prompt comes again.
            self._matchers = [LLMatcher(self._vocabulary, self._rules) for _ in range(input_ids.shape[0])]
            self._prompt_len = self._read = input_ids.shape[1]
        allowed = np.zeros((len(self._matchers), self._vocabulary.vocab_size), np.bool_)
        for row, matcher in enumerate(self._matchers):
            for token in input_ids[row, self._read :].tolist():
                if not matcher.is_stopped():
                    matcher.consume_token(token)
            if not matcher.is_stopped():
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                allowed[row] = np.unpackbits(bits, bitorder="little")[: allowed.shape[1]]
            if matcher.is_error():
                text = self._tokenizer.decode(input_ids[row, self._prompt_len :])
                raise StructuredOutputError(
                    f"no text can go on after {text[-80:]!r} so that it satisfies the JSON schema or grammar; remove the part "
                    "that contradicts the rest, or has no end",
                    text,
                )
            if matcher.is_stopped():
                allowed[row, self._vocabulary.eos_tokens] = True
        self._read = input_ids.shape[1]
        mask = torch.zeros(scores.shape, dtype=torch.bool)
        width = min(scores.shape[1], allowed.shape[1])
        mask[:, :width] = torch.from_numpy(allowed[:, :width])
        return scores.masked_fill(~mask.to(scores.device), -torch.inf)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON schema whose objects have no other properties than those it names, unless it says that they may."""
    schema = copy.deepcopy(schema)
    nodes = list(_subschemas(schema))
    parts = {id(each): _parts(each, schema, {}) for each in nodes if _is_joined(each)}
    shared = {place for found in parts.values() for place in found}
    for each in nodes:
        joined = [each, *parts.get(id(each), {}).values()]
        says_more = any(part.keys() & {"additionalProperties", "patternProperties"} for part in joined)
        names = [name for part in joined for name in (*part.get("properties", ()), *part.get("required", ()))]
        if id(each) not in shared and not says_more and ("properties" in each or (names and len(joined) > 1)):
            each["properties"] = dict.fromkeys(names, True) | each.get("properties", {})
            each["additionalProperties"] = False
    return schema


def _is_joined(schema: dict[str, Any]) -> bool:
    """Return whether a value has to fit several schemas at once."""
    kinds = {"properties" if name == "required" else name for name in schema} & {"properties", "anyOf", "oneOf", "$ref"}
    return len(kinds) + len(schema.get("allOf", ())) > 1


def _parts(schema: dict[str, Any], root: dict[str, Any], found: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return by their places the schemas that the same value has to fit, those of references included."""
    parts = [each for name in ("allOf", "anyOf", "oneOf") for each in schema.get(name, ()) if isinstance(each, dict)]
    if "$ref" in schema:
        # What is not found may name any property.
        parts.append(_target(schema, root) or {"additionalProperties": True})
    for each in parts:
        if id(each) not in found:
            found[id(each)] = each
            _parts(each, root, found)
    return found


def _target(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema that another one refers to, if it is found."""
    target: Any = root
    for name in schema["$ref"].split("/")[1:]:
        target = target.get(name) if isinstance(target, dict) else None
    return target if isinstance(target, dict) else None


def _can_end(root: dict[str, Any]) -> bool:
    """Return whether a value that fits a JSON schema can have an end, as far as one must hold another."""
    open_ones = {id(each): each for each in _subschemas(root)}
    for _ in range(_DEEPEST):
        ended = [place for place, each in open_ones.items() if _ends(each, root, open_ones)]
        for place in ended:
            del open_ones[place]
        if not ended:
            return id(root) not in open_ones
    return True


def _ends(schema: dict[str, Any], root: dict[str, Any], open_ones: dict[int, dict[str, Any]]) -> bool:
    """Return whether a value of a schema can end, where those of the open ones cannot."""

    def is_open(each: Any) -> bool:
        return id(each) in open_ones

    choices = [schema[name] for name in ("anyOf", "oneOf") if schema.get(name)]
    if any(map(is_open, schema.get("allOf", ()))) or any(all(map(is_open, each)) for each in choices):
        return False
    if "$ref" in schema and is_open(_target(schema, root)):
        return False
    kinds = schema.get("type", ["null"])
    if {*([kinds] if isinstance(kinds, str) else kinds)} - {"object", "array"}:
        return True
    named, others = schema.get("properties", {}), schema.get("additionalProperties")
    object_ends = not any(is_open(named.get(name, others)) for name in schema.get("required", ()))
    places, least = schema.get("prefixItems", []), schema.get("minItems", 0)
    items = [*places[:least], *([schema.get("items")] if least > len(places) else [])]
    return ("object" in kinds and object_ends) or ("array" in kinds and not any(map(is_open, items)))


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a JSON schema and all schemas in it."""
    if isinstance(schema, dict):
        yield schema
        inner = [schema.get(name, {}).values() for name in ("properties", "patternProperties", "$defs", "definitions")]
        inner += [schema.get(name, ()) for name in ("allOf", "anyOf", "oneOf", "prefixItems")]
        for each in chain(*inner, [schema.get("items"), schema.get("additionalProperties")]):
            yield from _subschemas(each)


# Taking a vocabulary of 150,000 tokens apart takes about a second, so it is done once for each engine.
_vocabularies: weakref.WeakKeyDictionary[Engine, LLTokenizer] = weakref.WeakKeyDictionary()
_vocabularies_lock = threading.Lock()


def _vocabulary(engine: Engine) -> LLTokenizer:
    with _vocabularies_lock:
        vocabulary = _vocabularies.get(engine)
        if vocabulary is None:
            try:
                # That of a GGUF file knows its words itself.
                make = getattr(engine.tokenizer, "guidance", partial(from_tokenizer, engine.tokenizer))
                vocabulary = make(eos_token=list(engine.end_ids) or None, slices=[])
            except ValueError as error:
                raise ConfigError(
                    f"answers of this model cannot be constrained: the vocabulary of its {type(engine.tokenizer).__name__} "
                    f"cannot be read ({error}); describe the format in the prompt and parse the text"
                ) from error
            _vocabularies[engine] = vocabulary
        return vocabulary
