"""OpenAI's chats and completions: from a request to what a backend is asked, and its answers, whole or piece by piece."""

from __future__ import annotations

import asyncio
import io
import tempfile
import zipfile
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from llguidance import LLMatcher
from starlette.exceptions import HTTPException

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.catalog import catalog_of
from cacheblend_rag.chat.grammar import after_thoughts, json_grammar, schema_request
from cacheblend_rag.chat.render import (
    VARIABLES,
    Passage,
    around_question,
    block_text,
    past_call,
    render_chat,
    template_variables,
)
from cacheblend_rag.chat.tools import ToolGate, call_grammar, chosen_tools
from cacheblend_rag.chunk import BLANK_LINE, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import ConfigError, PromptError, PromptTooLongError, UnknownChunkError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.thoughts import Thought
from cacheblend_serve.backend import Asked
from cacheblend_serve.responses import event_stream, unless_left
from cacheblend_serve.server import Asker, FromAsker, in_thread
from cacheblend_serve.settings import ServeConfig
from cacheblend_serve.wire import ChatRequest, CompletionRequest, Decoding, DocumentItem, Replies, ToolChoice

__all__ = ["router", "calls_for"]

router = APIRouter()

# Settings of the engine that its clients look at.
_TOLD = {"companions", "separator", "tenant"}

Speak = Callable[[Asked], AsyncGenerator[str | Answer, None]]


@router.get("/v1/models", response_model=None)
async def _models(asker: FromAsker) -> dict[str, Any]:
    return {"object": "list", "data": [await _model(asker.server.backend.model_name, asker)]}


@router.get("/v1/models/{name:path}", response_model=None)
async def _model(name: str, asker: FromAsker) -> dict[str, Any]:
    library = await asker.library()
    _check_served(name, asker)
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "cacheblend-rag",
        "max_model_len": library.window,
        "namespace": library.namespace,
        "end_ids": asker.server.backend.end_ids,
        "config": library.config.model_dump(mode="json", include=_TOLD),
        "blend": asker.server.backend.blend.model_dump(mode="json"),
    }


@router.get("/v1/tokenizer", response_model=None)
async def _tokenizer(asker: FromAsker) -> Response:
    packed = await asker.of_library(lambda library: _packed(library.tokenizer))
    return Response(packed, media_type="application/zip")


@lru_cache(maxsize=1)
def _packed(tokenizer: Any) -> bytes:
    """Return the files of a tokenizer, as an archive."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder))
    return packed.getvalue()


def _check_served(name: str, asker: Asker) -> None:
    served = asker.server.backend.model_name
    if name != served:
        raise HTTPException(404, f"the model {name!r:.60} is not served here, but {served!r} is")


@router.post("/v1/chat/completions", response_model=None)
async def _chat(request: ChatRequest, asker: FromAsker) -> Response:
    return await _answer(request, asker)


@router.post("/v1/completions", response_model=None)
async def _complete(request: CompletionRequest, asker: FromAsker) -> Response:
    return await _answer(request, asker)


@router.post("/v1/completions/layout", response_model=None)
async def _layout(request: CompletionRequest, asker: FromAsker) -> Response:
    """Return the tokens of a prompt, and which of them are chunks."""

    def laid_out(library: ChunkLibrary) -> dict[str, Any]:
        if len(request.prompts) > 1:
            raise PromptError("the layout of several prompts is not told at once; ask for each")
        call = _completion_call(library, request.prompts[0], request, asker.server.config)
        return asdict(library.prompt_layout(call.prompt))

    return await asker.written(laid_out)


async def _answer(request: ChatRequest | CompletionRequest, asker: Asker) -> Response:
    server = asker.server
    if request.model is not None:
        _check_served(request.model, asker)
    # Those of a stream are answered one after the other.
    prompts = len(request.prompts) if isinstance(request, CompletionRequest) and not request.stream else 1
    with ExitStack() as entered:
        entered.enter_context(server.gate.pass_through(prompts))
        library = await asker.library()
        calls = await in_thread(calls_for, library, request, server.config)
        replies = Replies(server.backend.model_name, request)
        speak = partial(asker.answer, library)
        if request.stream:
            pieces, leave = _pieces(calls, replies, speak), entered.pop_all().close
            return await event_stream(pieces, server.config.reader_s, leave)
        return JSONResponse(await unless_left(asker.request, _whole(calls, replies, speak)))


async def _whole(calls: Sequence[Asked], replies: Replies, speak: Speak) -> dict[str, Any]:
    tasks = [asyncio.create_task(_last(speak(call))) for call in calls]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return replies.whole(answers, calls[0].reply(answers[0]))


async def _last(spoken: AsyncGenerator[str | Answer, None]) -> Answer:
    async with aclosing(spoken):
        async for piece in spoken:
            if isinstance(piece, Answer):
                return piece
    raise AssertionError("an answer has an end")


async def _pieces(calls: Sequence[Asked], replies: Replies, speak: Speak) -> AsyncGenerator[dict[str, Any], None]:
    answers: list[Answer] = []
    has_begun = False
    for number, call in enumerate(calls):
        gate = ToolGate(call.tools) if call.tools else None
        async with aclosing(speak(call)) as spoken:
            async for piece in spoken:
                # Not before there is something to say: until then, what goes wrong has a status of its own.
                for event in () if has_begun else replies.begin():
                    yield event
                has_begun = True
                if isinstance(piece, Answer):
                    reply = call.reply(piece)
                    rest = "" if gate is None or reply is None else reply.text[gate.shown :]
                    if rest:
                        yield replies.piece(rest, number)
                    for event in replies.end(piece, reply, number):
                        yield event
                    answers.append(piece)
                    continue
                if isinstance(piece, Thought):
                    yield replies.thought(piece, number)
                    continue
                shown = piece if gate is None else gate.pass_on(piece)
                if shown:
                    yield replies.piece(shown, number)
    for event in replies.last(answers):
        yield event


_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
_FIELDS = {"role", "content", "name"}
# What was thought before an answer, as DeepSeek and vLLM call it.
_THOUGHTS = ("reasoning_content", "reasoning")
_FIELDS_OF = {"assistant": {"tool_calls", "function_call", "refusal", *_THOUGHTS}, "tool": {"tool_call_id"}}
_Part = str | Chunk | ChunkRef


def calls_for(library: ChunkLibrary, request: ChatRequest | CompletionRequest, config: ServeConfig) -> list[Asked]:
    """Return the calls that answer a request, one for each of its prompts.

    Raises
    ------
    ConfigError
        If an option is not possible with this model.
    PromptError
        If a prompt cannot be made, or is too long.
    """
    if isinstance(request, ChatRequest):
        calls = [_chat_call(library, request, config)]
    else:
        calls = [_completion_call(library, prompt, request, config) for prompt in request.prompts]
    for call in calls:
        _check_length(library, call.prompt, config)
    return calls


def _check_length(library: ChunkLibrary, prompt: BlendPrompt, config: ServeConfig) -> None:
    """Raise `PromptTooLongError` for a prompt of more tokens than the server takes."""
    if config.prompt_tokens is not None and (tokens := len(library.prompt_ids(prompt))) > config.prompt_tokens:
        raise PromptTooLongError(
            f"the prompt has {tokens} tokens, and this server takes {config.prompt_tokens}; send fewer documents"
        )


def _chat_call(library: ChunkLibrary, request: ChatRequest, config: ServeConfig) -> Asked:
    choice: Any = request.tool_choice
    choice = choice.model_dump() if isinstance(choice, ToolChoice) else choice
    offered = [tool.model_dump(exclude_unset=True) for tool in request.tools]
    tools, must_call = chosen_tools(offered, choice) if offered else ([], False)
    turns = [_turn(message, number) for number, message in enumerate(request.messages)]
    grammar: str | None = None
    if request.response_format is not None and request.response_format.type != "text":
        form = request.response_format.json_schema
        schema = {"type": "object"} if form is None else form.shape
        grammar = json_grammar(schema)
        if form is not None:
            shown = schema if form.description is None else {"description": form.description} | schema
            turns = around_question(turns, after=[schema_request(shown)]) or turns
    elif must_call and tools:
        grammar = call_grammar(tools, library.tokenizer)
    documents = _passages(library, request.documents)
    variables = _variables(library.tokenizer, request)
    parts = render_chat(library.tokenizer, turns, tools=tools, documents=documents, **variables)
    asked = [part for part in turns[-1]["content"] if isinstance(part, str)] if turns[-1]["role"] == "user" else []
    prompt = catalog_of(library).prompt(library, parts, asked="".join(asked))
    thinking = lexer_of(library.tokenizer).thinking(prompt.segments)
    called = _asked(prompt, request, config, grammar and after_thoughts(grammar, thinking))
    # An answer that has another form is no call.
    tools = tools if grammar is None or must_call else []
    one_call = not request.parallel_tool_calls
    return replace(called, tools=tools, must_call=must_call, one_call=one_call, thinking=thinking)


def _variables(tokenizer: Any, request: ChatRequest) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets; an error for those that it does not read."""
    begins = request.add_generation_prompt and not request.continue_final_message
    own = {"add_generation_prompt": begins, "continue_final_message": request.continue_final_message}
    if not request.add_generation_prompt and "add_generation_prompt" not in str(tokenizer.chat_template):
        raise PromptError("this model's chat template takes no 'add_generation_prompt' from a request; leave it out")
    return own | template_variables(tokenizer, {name: getattr(request, name) for name in VARIABLES})


def _completion_call(library: ChunkLibrary, given: Any, request: CompletionRequest, config: ServeConfig) -> Asked:
    if request.grammar is not None:
        _check_grammar(request.grammar)
    before = [part for each in _passages(library, request.documents) for part in (*each.parts(), BLANK_LINE)]
    if isinstance(given, str):
        prompt = catalog_of(library).prompt(library, [*before, *([given] if given else [])])
    elif isinstance(given[0], int):
        prompt = BlendPrompt(segments=[*before, given])
    else:
        prompt = BlendPrompt(segments=[*before, *(part.segment() for part in given)])
        # Who writes the prompt tells the thoughts from the answer; stop strings are not looked for in them.
        thinking = lexer_of(library.tokenizer).thinking(prompt.segments)
        asked = _asked(prompt, request, config, request.grammar)
        return replace(asked, thinking=thinking, is_raw=thinking is not None)
    return _asked(prompt, request, config, request.grammar)


def _check_grammar(grammar: str) -> None:
    """Raise `ConfigError` if a grammar, in llguidance's form of Lark, is none."""
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    if problem:
        raise ConfigError(f"the grammar cannot be read: {problem:.200}; give it in llguidance's form of Lark")


def _asked(prompt: BlendPrompt, request: Decoding, config: ServeConfig, grammar: str | None = None) -> Asked:
    if request.ignore_eos and grammar is not None:
        raise PromptError(
            "ignore_eos cannot be combined with constrained answers, which end on their own; leave it out"
        )
    return Asked(
        prompt,
        request.most_tokens,
        config.output_tokens,
        request.stop_strings,
        min(request.timeout_s or config.timeout_s, config.timeout_s),
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        grammar=grammar,
        recompute_ratio=request.recompute_ratio,
    )


def _passages(library: ChunkLibrary, documents: Sequence[str | DocumentItem]) -> list[Passage[Chunk | ChunkRef]]:
    """Return what a request names, the chunks of a document in the place of its name."""
    passages: list[Passage[Chunk | ChunkRef]] = []
    for each in documents:
        if isinstance(each, str):
            ids = [each] if library.contains(each) else library.document(each)
            if not ids:
                raise UnknownChunkError(
                    f"no document or chunk has the id {each!r}: it was never added here for this model and this key, or was "
                    "deleted; add it, or send its text"
                )
            passages.extend(Passage("", ChunkRef(id)) for id in ids)
        else:
            passages.append(Passage(each.title, _stored(each.id, each.text)))
    return passages


def _stored(id: str | None, text: str | None) -> Chunk | ChunkRef:
    """Return a chunk by its text, where there is one, or else by its id."""
    if text:
        return Chunk(text, id or None)
    assert id
    return ChunkRef(id)


def _turn(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message as chat templates take it, its content being a list of text and chunks."""
    role = str(message.get("role"))
    if role not in _ROLES:
        raise PromptError(f"message {number} has the role {role!r:.40}; give one of {', '.join(sorted(_ROLES))}")
    # Evaluation harnesses say of a whole message that it is text.
    known = _FIELDS | _FIELDS_OF.get(role, set()) | ({"type"} if message.get("type") == "text" else set())
    _check_fields(message, known, f"message {number}")
    content = [message.get("content"), message.get("refusal")]
    turn: dict[str, Any] = {"role": role, "content": [part for each in content for part in _content(each, number)]}
    for name in ("name", "tool_call_id", *_THOUGHTS):
        if (value := message.get(name)) is not None:
            if not isinstance(value, str):
                raise PromptError(f"message {number} has {name}={value!r:.40}, which is not text; give a string")
            turn[_THOUGHTS[0] if name in _THOUGHTS else name] = value
    calls = message.get("tool_calls")
    if not calls and message.get("function_call"):
        # As clients wrote it before there were tools.
        calls = [{"id": None, "function": message["function_call"]}]
    if calls:
        if not isinstance(calls, list):
            raise PromptError(
                f"message {number} has tool_calls={calls!r:.40}, which is not a list; give a list of calls"
            )
        turn["tool_calls"] = [_call(call, number) for call in calls]
    return turn


def _check_fields(given: dict[str, Any], known: Collection[str], what: str) -> None:
    """Raise `PromptError` if an object says more than is read of it; null and an empty list say nothing."""
    for name, value in given.items():
        if name not in known and value not in (None, []):
            raise PromptError(f"{what} has the field {name!r:.60}, which is not supported; leave it out")


def _content(content: Any, number: int) -> list[_Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    parts: list[_Part] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text, id = (part.get("text"), part.get("id")) if isinstance(part, dict) else (None, None)
        if kind is not None and (said := block_text(part)) is not None:
            _check_fields(part, ("type", "text", "refusal"), f"a text of message {number}")
            parts.append(said)
        elif kind == "document" and isinstance(text, str | None) and isinstance(id, str | None) and (text or id):
            _check_fields(part, ("type", "id", "text", "title"), f"a document of message {number}")
            parts += Passage(str(part.get("title") or ""), _stored(id, text)).parts()
        else:
            raise PromptError(
                f"message {number} has content of the type {kind!r:.40}; this model reads text, and documents: "
                '{"type": "document", "id": ..., "text": ...}'
            )
    return parts


def _call(call: Any, number: int) -> dict[str, Any]:
    try:
        # The place of a call among those of a stream is there in what clients put together of it.
        _check_fields(call, ("id", "type", "function", "index"), f"a tool call of message {number}")
        function = call["function"]
        _check_fields(function, ("name", "arguments"), f"a tool call of message {number}")
        return past_call(function["name"], function.get("arguments"), call["id"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PromptError(
            f"message {number} has a tool call that cannot be read ({type(error).__name__}: {error}); give id, function.name "
            "and function.arguments"
        ) from error
