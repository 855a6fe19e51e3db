"""Rendering of a conversation as a prompt, by the model's own chat template."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from cacheblend_rag.chunk import BLANK_LINE, Chunk, ChunkRef
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.lexer import MARK, lexer_of

__all__ = [
    "VARIABLES",
    "Holes",
    "Passage",
    "apply_template",
    "around_context",
    "around_question",
    "block_text",
    "knows_tools",
    "past_call",
    "render_chat",
    "template_variables",
]

Piece = TypeVar("Piece", bound="Chunk | ChunkRef")
_PROBE, _TITLE = "probe_of_cacheblend", "title_of_cacheblend"
VARIABLES = ("chat_template_kwargs", "enable_thinking", "reasoning_effort")
"""Options that set variables of the chat template: any, in a mapping, and two that have a name of their own."""

# Where templates look for what was thought before an answer, the first of them in the turns that we are given.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Other names of the roles that templates know.
_ROLES = {"developer": "system", "function": "tool", "human": "user"} | dict.fromkeys(
    ("ai", "chatbot", "model"), "assistant"
)


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

    def parts(self) -> list[str | Piece]:
        """Return the chunk below its title, if it has one."""
        return [f"{self.title}\n", self.chunk] if self.title else [self.chunk]


def block_text(block: Any) -> str | None:
    """Return the text of a content block, in the form of OpenAI's, Anthropic's or Google's messages; None if it is none."""
    kind = block.get("type", "text") if isinstance(block, dict) else None
    text = block.get("refusal" if kind == "refusal" else "text") if kind else block
    return text if isinstance(text, str) and kind in (None, "text", "input_text", "output_text", "refusal") else None


def past_call(name: str, arguments: Any, id: str | None = None) -> dict[str, Any]:
    """Return a tool call that was made as chat templates take it: they write its arguments themselves, from an object."""
    with suppress(ValueError, RecursionError):
        arguments = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments or {}}}


def knows_tools(tokenizer: Any) -> bool:
    """Return whether a tokenizer's chat template shows tools to the model."""
    function = {"name": _PROBE, "description": "None.", "parameters": {"type": "object", "properties": {}}}
    return _PROBE in _rendered(tokenizer, tools=[{"type": "function", "function": function}])


def render_chat(
    tokenizer: Any,
    turns: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]] = (),
    documents: Sequence[Passage[Piece]] = (),
    **variables: Any,
) -> list[str | Piece]:
    """Render a conversation by the tokenizer's chat template, up to where the answer begins, as text and chunks."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("this model's tokenizer has no chat template; set tokenizer.chat_template, or use BlendLLM")
    if tools and not knows_tools(tokenizer):
        raise PromptError(
            "this model's chat template has no place for tools; use a model that was trained to call tools"
        )
    holes = Holes[Piece]()
    variables |= {"tools": list(tools)} if tools else {}
    shows = _rendered(tokenizer, documents=[{"title": _TITLE, "text": _PROBE}]) if documents else ""
    if _PROBE in shows:
        variables["documents"] = [
            {"title": each.title, "text": holes.text([each.chunk] if _TITLE in shows else each.parts())}
            for each in documents
        ]
    elif documents:
        placed = around_question(turns, [part for each in documents for part in (*each.parts(), BLANK_LINE)])
        if placed is None:
            raise PromptError("documents= needs a user message to go into; there is none among the messages")
        turns = placed
    shown = [{**turn, "content": holes.text(turn["content"])} for turn in turns]
    parts = holes.split(apply_template(tokenizer, shown, **variables))
    holes.check()
    return parts


def template_variables(tokenizer: Any, *given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what options set of a chat template's variables by those of `VARIABLES`, later ones over earlier."""
    asked: dict[str, Any] = {}
    for options in given:
        asked |= options.get("chat_template_kwargs") or {}
        asked |= {name: options[name] for name in VARIABLES[1:] if options.get(name) is not None}
    template = str(tokenizer.get_chat_template()) if asked and tokenizer.chat_template else ""
    known = {*re.findall(r"\w+", template)} - {
        "messages",
        *signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    }
    if wrong := sorted(asked.keys() - known):
        raise ConfigError(f"this model's chat template takes no {wrong[0]!r:.60} from a caller; leave it out")
    return asked


def apply_template(tokenizer: Any, turns: Sequence[dict[str, Any]], **variables: Any) -> str:
    """Write turns as one text, up to where the assistant's answer begins, with the BOS if the template writes one.

    All that is said and called stands in it. Where the template refuses a turn or passes over it, system messages become one or
    join the first user message; else calls of tools and their results become words of the assistant and the user.
    `PromptError` if even then it refuses them or leaves something out. The template alone writes control tokens (`Lexer.said`).
    """
    turns = [
        {**turn, "role": _ROLES.get(turn["role"], turn["role"])}
        | (dict.fromkeys(_THOUGHTS, turn[_THOUGHTS[0]]) if turn.get(_THOUGHTS[0]) else {})
        for turn in turns
    ]
    turns, variables = lexer_of(tokenizer).said([turns, {"add_generation_prompt": True, **variables}])
    if re.search(r"split\(.</think>", str(tokenizer.chat_template)):
        turns = [_with_thoughts(turn) if turn["role"] == "assistant" else turn for turn in turns]
    attempts = (
        change(join(turns))
        for change in (list, _calls_as_words)
        for join in (list, _one_system_turn, _without_system_turn)
    )
    tried: list[Any] = []
    problem, cause = "", None
    for shown in attempts:
        if shown in tried:
            continue
        tried.append(shown)
        try:
            text, place = str(tokenizer.apply_chat_template(shown, tokenize=False, **variables)), 0
            # What may stand there besides, so that finding it says nothing of what was said.
            own = f"{tokenizer.chat_template}{variables}{[{**turn, 'content': ''} for turn in shown]}"
            is_doubtful = any(turn.get("tool_calls") for turn in shown)
            for said in filter(None, (turn["content"].strip() for turn in shown)):
                found = text.find(said, place)
                is_doubtful = is_doubtful or found < 0 or said in own
                place = found + len(said)
            if not is_doubtful or not (lost := _passed_over(tokenizer, shown, variables)):
                return text
            problem = problem or f"drops or changes content: it does not show the {lost}; move that to another role"
        except Exception as error:  # a template may raise what it likes, mostly about the order of roles
            roles = [turn["role"] for turn in turns]
            problem, cause = problem or f"refuses messages with the roles {roles}: {error}; change their order", error
    raise PromptError(f"the model's chat template {problem}") from cause


def _with_thoughts(turn: dict[str, Any]) -> dict[str, Any]:
    """Return an answer in which a template finds the tags around its thoughts, which it takes out or writes itself."""
    thoughts, end, words = turn["content"].rpartition(f"<{MARK}/think>")
    begin = f"<{MARK}think>"
    thoughts = thoughts.replace(begin, "<think>", 1) if thoughts.lstrip().startswith(begin) else thoughts
    return {**turn, "content": f"{thoughts}{end.replace(MARK, '')}{words}"}


def around_context(tokenizer: Any, head: str, tail: str) -> tuple[str, str]:
    """Return `head` and `tail` with what a chat template writes around them, as a user's message with a context between them."""
    message = {"role": "user", "content": f"{head}{_PROBE}{tail}"}
    before, _, after = apply_template(tokenizer, [message]).partition(_PROBE)
    return before, after


def _one_system_turn(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    others = [turn for turn in turns if turn["role"] != "system"]
    return [{"role": "system", "content": system}, *others] if system else others


def _without_system_turn(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    shown = _one_system_turn(turns) or [{"role": "user", "content": ""}]
    if [turn["role"] for turn in shown[:2]] == ["system", "user"]:
        shown[:2] = [{**shown[1], "content": f"{shown[0]['content']}\n\n{shown[1]['content']}"}]
    return [{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in shown]


def _calls_as_words(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with calls as JSON of the assistant, their results as the user's, and neighbours as one."""
    words: list[dict[str, Any]] = []
    for turn in turns:
        role = "user" if turn["role"] == "tool" else turn["role"]
        said = [
            turn["content"],
            *(json.dumps(call["function"], ensure_ascii=False, default=str) for call in turn.get("tool_calls", ())),
        ]
        said[:0] = [words.pop()["content"]] if words and words[-1]["role"] == role else []
        words.append({"role": role, "content": "\n\n".join(filter(None, said))})
    return words


def _passed_over(tokenizer: Any, turns: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    """Return which of the turns a template does not show, as is seen by marks around words and in the places of names."""
    asked, marks = [], [f"{_PROBE}-{number}." for number in range(len(turns))]
    for mark, turn in zip(marks, turns, strict=True):
        # Templates may leave out what an earlier answer thought.
        thoughts, end, words = turn["content"].rpartition("</think>")
        marked = f"{thoughts}{end}{mark}{words}{mark}" if turn["content"].strip() else ""
        calls = [{**call, "function": call["function"] | {"name": mark}} for call in turn.get("tool_calls", ())]
        asked.append(turn | {"content": marked} | ({"tool_calls": calls} if calls else {}))
    text = str(tokenizer.apply_chat_template(asked, tokenize=False, **variables))
    for mark, turn in zip(marks, turns, strict=True):
        if text.count(mark) < 2 * bool(turn["content"].strip()) + len(turn.get("tool_calls", ())):
            return f"{turn['role']} message {turn['content']!r:.60}"
    return None


def _rendered(tokenizer: Any, **variables: Any) -> str:
    """Return what a template makes of a greeting with variables; nothing if it refuses them."""
    with suppress(PromptError):
        return apply_template(tokenizer, [{"role": "user", "content": "Hello."}], **variables)
    return ""


def around_question(
    turns: Sequence[dict[str, Any]], before: Sequence[Any] = (), after: Sequence[Any] = ()
) -> list[dict[str, Any]] | None:
    """Return the turns with parts before and after what the user said last; None if there is no such turn."""
    for place in range(len(turns) - 1, -1, -1):
        if turns[place]["role"] == "user":
            changed = {**turns[place], "content": [*before, *turns[place]["content"], *after]}
            return [*turns[:place], changed, *turns[place + 1 :]]
    return None
