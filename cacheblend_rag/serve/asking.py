"""From a request to calls of an engine: the prompt with its chunks, what ends the answer, how it is decoded and read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cacheblend_rag.chat.answer import Answer, Deadline, Ending
from cacheblend_rag.chat.catalog import catalog_of
from cacheblend_rag.chat.grammar import Guide, json_grammar, requested_schema, schema_request
from cacheblend_rag.chat.render import Passage, around_question, render_chat
from cacheblend_rag.chat.seeded import SeededSampling
from cacheblend_rag.chat.tools import ToolReply, call_grammar, chosen_tools, parse_calls
from cacheblend_rag.chunk import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import PromptError, PromptTooLongError
from cacheblend_rag.serve.settings import ServeConfig
from cacheblend_rag.serve.wire import ChatRequest, CompletionRequest, Decoding, DocumentItem

__all__ = ["Asked", "calls_for"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SEPARATOR = "\n\n"
# Most tokens of an answer where neither the request nor the model's own settings say.
_ANSWER_TOKENS = 256
_Part = str | Chunk | ChunkRef


@dataclass(frozen=True)
class Asked:
    """One call of an engine.

    Attributes
    ----------
    engine : BlendEngine
        That of the tenant who asks.
    prompt : BlendPrompt
        The prompt.
    ending : Ending
        What ends the answer early.
    options : dict
        Options of `BlendEngine.stream`.
    tools : "none", "may" or "must"
        Whether the answer may be calls of tools, or has to be.
    """

    engine: BlendEngine
    prompt: BlendPrompt
    ending: Ending
    options: dict[str, Any] = field(default_factory=dict)
    tools: Literal["none", "may", "must"] = "none"

    def reply(self, answer: Answer) -> ToolReply | None:
        """Return what is read of an answer that may call tools; None where there are none."""
        if self.tools == "none":
            return None
        is_cut = answer.finish_reason == "length"
        reply = parse_calls(answer.text, is_cut=is_cut, must_call=self.tools == "must")
        # OpenAI's form has no place for calls that cannot be read: what was written is shown.
        return reply if not reply.invalid else ToolReply(answer.text)


def calls_for(engine: BlendEngine, request: ChatRequest | CompletionRequest, config: ServeConfig) -> list[Asked]:
    """Return the calls that answer a request, one for each of its prompts.

    Raises
    ------
    ConfigError
        If an option is not possible with this model.
    PromptError
        If a prompt cannot be made, or is too long.
    """
    if isinstance(request, ChatRequest):
        calls = [_chat(engine, request, config)]
    else:
        prompts = [_completion(engine, prompt, request.documents) for prompt in request.prompts]
        calls = [_asked(engine, prompt, request, config) for prompt in prompts]
    if config.prompt_tokens is not None:
        for call in calls:
            tokens = len(engine.prompt_ids(call.prompt))
            if tokens > config.prompt_tokens:
                raise PromptTooLongError(
                    f"the prompt has {tokens} tokens, and this server takes {config.prompt_tokens}; send fewer documents"
                )
    return calls


def _chat(engine: BlendEngine, request: ChatRequest, config: ServeConfig) -> Asked:
    tools, must_call = chosen_tools(request.tools, request.tool_choice) if request.tools else ([], False)
    turns = [_turn(message, number) for number, message in enumerate(request.messages)]
    processors: list[Any] = []
    if request.response_format is not None and request.response_format.get("type") != "text":
        schema = requested_schema(request.response_format)
        processors.append(Guide(engine, json_grammar(schema)))
        if request.response_format["type"] == "json_schema":
            turns = around_question(turns, after=[schema_request(schema)]) or turns
        must_call = False
    elif must_call and tools:
        template = str(engine.tokenizer.get_chat_template(tools=tools))
        processors.append(Guide(engine, call_grammar(tools, template)))
    documents = [Passage(each.title, _chunk(each)) for each in _items(engine, request.documents)]
    parts = render_chat(engine.tokenizer, turns, tools=tools, documents=documents)
    prompt = catalog_of(engine).prompt(engine, parts)
    kind: Literal["none", "may", "must"] = "none" if not tools else "must" if must_call else "may"
    return _asked(engine, prompt, request, config, processors, kind)


def _completion(engine: BlendEngine, prompt: str | list[int], documents: Sequence[str | DocumentItem]) -> BlendPrompt:
    before = [part for each in _items(engine, documents) for part in (_chunk(each), _SEPARATOR)]
    if isinstance(prompt, str):
        return catalog_of(engine).prompt(engine, [*before, *([prompt] if prompt else [])])
    size = len(engine.tokenizer)
    wrong = next((each for each in prompt if not 0 <= each < size), None)
    if wrong is not None:
        raise PromptError(
            f"the prompt has the token {wrong}, and this model's vocabulary has {size}; they count from 0"
        )
    return BlendPrompt(segments=[*before, prompt])


def _asked(
    engine: BlendEngine,
    prompt: BlendPrompt,
    request: Decoding,
    config: ServeConfig,
    processors: Sequence[Any] = (),
    tools: Literal["none", "may", "must"] = "none",
) -> Asked:
    ending = Ending(request.stop_strings, Deadline(config.timeout_s))
    own = engine.model.generation_config
    most = request.most_tokens or own.max_new_tokens or _ANSWER_TOKENS
    options: dict[str, Any] = {
        "max_new_tokens": min(most, config.output_tokens),
        "stopping_criteria": ending.criteria(engine.tokenizer),
        "wait_s": config.timeout_s,
    }
    processors = list(processors)
    top_k = request.top_k if request.top_k is None or request.top_k > 0 else None
    if request.temperature == 0 or (request.temperature is None and not own.do_sample):
        options["do_sample"] = False
    elif request.seed is not None:
        temperature = request.temperature or own.temperature or 1.0
        processors.append(SeededSampling(request.seed, temperature, top_k, request.top_p))
        options["do_sample"] = False
    else:
        asked = {"temperature": request.temperature, "top_p": request.top_p, "top_k": top_k}
        options |= {name: value for name, value in asked.items() if value is not None}
        if request.temperature is not None:
            options["do_sample"] = True
    if processors:
        options["logits_processor"] = processors
    if request.recompute_ratio is not None:
        options["blend"] = engine.blend.replace(recompute_ratio=request.recompute_ratio)
    return Asked(engine, prompt, ending, options, tools)


def _items(engine: BlendEngine, documents: Sequence[str | DocumentItem]) -> list[DocumentItem]:
    """Return what a request names, the chunks of a document in the place of its name."""
    items: list[DocumentItem] = []
    for each in documents:
        if isinstance(each, str):
            ids = [] if engine.contains(each) else engine.document(each)
            items += [DocumentItem(id=id) for id in ids or [each]]
        else:
            items.append(each)
    return items


def _chunk(item: DocumentItem) -> Chunk | ChunkRef:
    if item.text is not None:
        return Chunk(item.text, item.id)
    assert item.id is not None
    return ChunkRef(item.id)


def _turn(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message as chat templates take it, its content being a list of text and chunks."""
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise PromptError(f"message {number} has the role {message.get('role')!r:.40}; give one of {', '.join(_ROLES)}")
    turn: dict[str, Any] = {"role": role, "content": _content(message.get("content"), number)}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            turn[name] = message[name]
    calls = message.get("tool_calls")
    if calls and role == "assistant":
        turn["tool_calls"] = [_call(call, number) for call in calls]
    return turn


def _content(content: Any, number: int) -> list[_Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    parts: list[_Part] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text, id = (part.get("text"), part.get("id")) if isinstance(part, dict) else (None, None)
        if kind == "text" and isinstance(text, str):
            parts.append(text)
        elif kind == "document" and isinstance(text, str | None) and isinstance(id, str | None) and (text or id):
            parts.append(_chunk(DocumentItem(id=id or None, text=text or None)))
        else:
            raise PromptError(
                f"message {number} has content of the type {kind!r:.40}; this model reads text, and documents: "
                '{"type": "document", "id": ..., "text": ...}'
            )
    return parts


def _call(call: Any, number: int) -> dict[str, Any]:
    try:
        function = call["function"]
        arguments = function["arguments"]
        # Templates write arguments themselves, from objects.
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {"type": "function", "id": call["id"], "function": {"name": function["name"], "arguments": arguments}}
    except (KeyError, TypeError, ValueError) as error:
        raise PromptError(
            f"message {number} has a tool call that cannot be read ({type(error).__name__}: {error}); give id, function.name "
            "and function.arguments, which is JSON"
        ) from error
