"""Rendering of a conversation as a prompt, by the model's own chat template."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cacheblend_rag.chunk import BLANK_LINE, Chunk, ChunkRef
from cacheblend_rag.errors import ConfigError, PromptError

__all__ = [
    "Holes",
    "Passage",
    "apply_template",
    "around_context",
    "around_question",
    "knows_tools",
    "render_chat",
]

Piece = TypeVar("Piece", bound="Chunk | ChunkRef")
_PROBE = "probe_of_cacheblend"


@dataclass(eq=False)
class Holes(Generic[Piece]):
    """Gives each chunk a mark to stand in for it, and puts the chunks where the marks came to stand."""

    _chunks: list[Piece] = field(default_factory=list)
    _shown: set[int] = field(default_factory=set)
    _name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def text(self, parts: Sequence[str | Piece]) -> str:
        """Return parts as one text with marks."""
        texts = []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
            else:
                texts.append(f"[[{self._name}-{len(self._chunks)}]]")
                self._chunks.append(part)
        return "".join(texts)

    def split(self, text: str) -> list[str | Piece]:
        """Return a text with the chunks in their places; a chunk may stand there more than once."""
        pieces = re.split(rf"\[\[{self._name}-(\d+)\]\]", text)
        parts: list[str | Piece] = [pieces[0]]
        for number, after in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
            self._shown.add(number)
            parts += [self._chunks[number], after]
        return [part for part in parts if part]

    def check(self) -> None:
        """Raise `PromptError` if a chunk has come to stand nowhere."""
        lost = len(self._chunks) - len(self._shown)
        if lost:
            raise PromptError(
                f"the template drops or changes content: {lost} of the {len(self._chunks)} documents do not appear in "
                "its output; put the documents into the text of a message instead"
            )


@dataclass(frozen=True)
class Passage(Generic[Piece]):
    """A document beside a conversation: what it is called, and the chunk that it is."""

    title: str
    chunk: Piece


def knows_tools(tokenizer: Any) -> bool:
    """Return whether a tokenizer's chat template shows tools to the model."""
    function = {"name": _PROBE, "description": "None.", "parameters": {"type": "object", "properties": {}}}
    return _shows_probe(tokenizer, tools=[{"type": "function", "function": function}])


def render_chat(
    tokenizer: Any,
    turns: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    documents: Sequence[Passage[Piece]] = (),
    **variables: Any,
) -> list[str | Piece]:
    """Render a conversation by the tokenizer's chat template, up to where the answer begins, as text and chunks.

    Turns are messages as chat templates take them (`role`, `content`, `tool_calls`, ...), the content being a list of text
    and chunks; tools are in OpenAI's form; `variables` are the template's own. Documents stand where the template shows
    documents, or else before the text of the last message of the user. `ConfigError` if the tokenizer has no chat template,
    `PromptError` if that cannot show the conversation, its tools included.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("this model's tokenizer has no chat template; set tokenizer.chat_template, or use BlendLLM")
    is_about_tools = tools or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in turns)
    if is_about_tools and not knows_tools(tokenizer):
        raise PromptError(
            "this model's chat template has no tools, so neither tools nor their calls and results can be shown to it; put what "
            "a tool returned into a user message, or use a model that has learnt to call tools"
        )
    holes = Holes[Piece]()
    variables |= {"tools": list(tools)} if tools else {}
    if documents and _shows_probe(tokenizer, documents=[{"title": "", "text": _PROBE}]):
        variables["documents"] = [{"title": each.title, "text": holes.text([each.chunk])} for each in documents]
    elif documents:
        placed = around_question(turns, [part for each in documents for part in (each.chunk, BLANK_LINE)])
        if placed is None:
            raise PromptError("documents= needs a user message to go into; there is none among the messages")
        turns = placed
    shown = [{**turn, "content": holes.text(turn["content"])} for turn in turns]
    parts = holes.split(apply_template(tokenizer, shown, **variables))
    holes.check()
    return parts


def apply_template(tokenizer: Any, turns: Sequence[dict[str, Any]], **variables: Any) -> str:
    """Write turns as one text, up to where the assistant's answer begins, with the BOS if the template writes one.

    Some templates know no system message, or only one. Those get the system messages as one, or at the head of the first
    user message. `PromptError` if the template refuses them.
    """
    refusal: Exception | None = None
    for change in (list, _one_system_turn, _without_system_turn):
        try:
            given = {"add_generation_prompt": True, **variables}
            return str(tokenizer.apply_chat_template(change(turns), tokenize=False, **given))
        except Exception as error:  # a template may raise what it likes, mostly about the order of roles
            refusal = refusal or error
    raise PromptError(
        f"the model's chat template refuses messages with the roles {[turn['role'] for turn in turns]}: {refusal}; change their "
        "order"
    ) from refusal


def around_context(tokenizer: Any, head: str, tail: str) -> tuple[str, str]:
    """Return `head` and `tail` with what a chat template writes around them, as a user's message with a context between them.

    `PromptError` if the template refuses that.
    """
    message = {"role": "user", "content": f"{head}{_PROBE}{tail}"}
    before, _, after = apply_template(tokenizer, [message]).partition(_PROBE)
    return before, after


def _one_system_turn(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    others = [turn for turn in turns if turn["role"] != "system"]
    return [{"role": "system", "content": system}, *others] if system else others


def _without_system_turn(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    first, *others = _one_system_turn(turns) or [{"role": "user", "content": ""}]
    if first["role"] != "system":
        return [first, *others]
    if others and others[0]["role"] == "user":
        return [{**others[0], "content": f"{first['content']}\n\n{others[0]['content']}"}, *others[1:]]
    return [{"role": "user", "content": first["content"]}, *others]


def _shows_probe(tokenizer: Any, **variables: Any) -> bool:
    try:
        return _PROBE in apply_template(tokenizer, [{"role": "user", "content": "Hello."}], **variables)
    except PromptError:
        return False


def around_question(
    turns: Sequence[dict[str, Any]], before: Sequence[Any] = (), after: Sequence[Any] = ()
) -> list[dict[str, Any]] | None:
    """Return the turns with parts before and after what the user said last; None if there is no such turn."""
    for place in range(len(turns) - 1, -1, -1):
        if turns[place]["role"] == "user":
            changed = {**turns[place], "content": [*before, *turns[place]["content"], *after]}
            return [*turns[:place], changed, *turns[place + 1 :]]
    return None
