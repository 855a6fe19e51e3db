"""Answers in a given form: the schema that is asked for, and the grammar that constrains an answer to it token by token."""

from __future__ import annotations

import copy
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import LogitsProcessor

from cacheblend_rag.engine import Engine
from cacheblend_rag.errors import ConfigError, StructuredOutputError
from cacheblend_rag.stops import Thinking

__all__ = ["Guide", "after_thoughts", "answer_form", "json_grammar", "written"]


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
    # Compact but for one blank after separators, as models write JSON; endless whitespace would be JSON too.
    form = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    grammar = f"start: {before} %json {json.dumps(schema | {'x-guidance': form})} {after}"
    problem = _problem(grammar)
    if problem:
        # Behind the reason stands the whole grammar.
        reason = problem.partition("\n   1 | ")[0]
        raise ConfigError(f"this JSON schema cannot be enforced: {reason}; leave that part out of the schema")
    return grammar


# The same few schemas are asked for again and again, by one call more than once.
@lru_cache(maxsize=64)
def _problem(grammar: str) -> str:
    """Return what is wrong with a grammar; empty for nothing."""
    problem: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    return problem


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
    """Return a JSON schema whose objects have no properties but those it names, unless it says more, or joins schemas."""
    schema = copy.deepcopy(schema)
    nodes = list(_subschemas(schema))
    if any(
        len(each.keys() & {"properties", "anyOf", "oneOf", "$ref"}) + len(each.get("allOf", ())) > 1 for each in nodes
    ):
        # Each of them would forbid what only the others name.
        return schema
    for each in nodes:
        if "properties" in each and not each.keys() & {"additionalProperties", "patternProperties"}:
            each["properties"] = dict.fromkeys(each.get("required", ()), True) | each["properties"]
            each["additionalProperties"] = False
    return schema


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
