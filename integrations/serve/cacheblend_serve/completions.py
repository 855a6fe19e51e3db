"""OpenAI's chats and completions: from a request to what a backend is asked, and its answers, whole or piece by piece."""

from __future__ import annotations

import asyncio
import io
import tempfile
import zipfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from llguidance import LLMatcher
from starlette.exceptions import HTTPException

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.catalog import catalog_of
from cacheblend_rag.chat.grammar import after_thoughts, answer_form
from cacheblend_rag.chat.render import (
    VARIABLES,
    Passage,
    around_question,
    render_chat,
    template_variables,
)
from cacheblend_rag.chat.tools import ToolGate, call_grammar, chosen_tools
from cacheblend_rag.chunk import BLANK_LINE, BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import ConfigError, PromptError, PromptTooLongError, UnknownChunkError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.stops import Thought
from cacheblend_serve.backend import Asked
from cacheblend_serve.replies import Replies
from cacheblend_serve.responses import event_stream, unless_left
from cacheblend_serve.server import FromLibrary, FromServer, Server, in_thread
from cacheblend_serve.settings import ServeConfig
from cacheblend_serve.wire import ChatRequest, CompletionRequest, Decoding, DocumentItem, ToolItem

__all__ = ["router", "calls_for"]

router = APIRouter()

Speak = Callable[[Asked], AsyncGenerator[str | Answer, None]]
# Settings of the engine that its clients look at.
_TOLD = {"companions", "separator", "tenant"}
# Of a request, how its answer is written.
_DRAWN = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos", "recompute_ratio"}


@router.get("/v1/models")
def _models(server: FromServer, library: FromLibrary) -> Response:
    return JSONResponse({"object": "list", "data": [_facts(server, library)]})


@router.get("/v1/models/{name:path}")
def _model(name: str, server: FromServer, library: FromLibrary) -> Response:
    _check_served(name, server)
    return JSONResponse(_facts(server, library))


def _facts(server: Server, library: ChunkLibrary) -> dict[str, Any]:
    return {
        "id": server.backend.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "cacheblend-rag",
        "max_model_len": library.window,
        "namespace": library.namespace,
        "end_ids": server.backend.end_ids,
        "config": library.config.model_dump(mode="json", include=_TOLD),
        "blend": server.backend.blend.model_dump(mode="json"),
    }


def _check_served(name: str, server: Server) -> None:
    served = server.backend.model_name
    if name != served:
        raise HTTPException(404, f"the model {name!r:.60} is not served here, but {served!r} is")


@router.get("/v1/tokenizer")
def _tokenizer(library: FromLibrary) -> Response:
    """Return the files of the tokenizer, as an archive."""
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        library.tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder))
    return Response(packed.getvalue(), media_type="application/zip")


@router.post("/v1/chat/completions")
async def _chat(body: ChatRequest, request: Request, server: FromServer, library: FromLibrary) -> Response:
    return await _answer(body, request, server, library)


@router.post("/v1/completions")
async def _complete(body: CompletionRequest, request: Request, server: FromServer, library: FromLibrary) -> Response:
    return await _answer(body, request, server, library)


@router.post("/v1/completions/layout")
def _layout(body: CompletionRequest, server: FromServer, library: FromLibrary) -> Response:
    """Return the tokens of a prompt, and which of them are chunks."""
    if len(body.prompts) > 1:
        raise PromptError("the layout of several prompts is not told at once; ask for each")
    call = _completion_call(library, body.prompts[0], body, server.config)
    return JSONResponse(asdict(library.prompt_layout(call.prompt)))


async def _answer(
    body: ChatRequest | CompletionRequest, request: Request, server: Server, library: ChunkLibrary
) -> Response:
    if body.model is not None:
        _check_served(body.model, server)
    # Those of a stream are answered one after the other.
    prompts = len(body.prompts) if isinstance(body, CompletionRequest) and not body.stream else 1
    with ExitStack() as entered:
        entered.enter_context(server.gate.pass_through(prompts))
        calls = await in_thread(calls_for, library, body, server.config)
        replies = Replies(server.backend.model_name, body)
        speak = partial(server.backend.answer, library)
        if body.stream:
            return await event_stream(_pieces(calls, replies, speak), entered.pop_all().close)
        return JSONResponse(await unless_left(request, _whole(calls, replies, speak)))


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
        gate = ToolGate() if call.tools else None
        async with aclosing(speak(call)) as spoken:
            async for piece in spoken:
                # Not before there is something to say: until then, what goes wrong has a status of its own.
                for event in () if has_begun else replies.begin():
                    yield event
                has_begun = True
                if isinstance(piece, Answer):
                    reply = call.reply(piece)
                    rest = "" if gate is None or reply is None else reply.text[gate.shown :]
                    for event in ([replies.piece(rest, number)] if rest else []) + replies.end(piece, reply, number):
                        yield event
                    answers.append(piece)
                elif shown := piece if gate is None or isinstance(piece, Thought) else gate.pass_on(piece):
                    yield replies.piece(shown, number)
    for event in replies.last(answers):
        yield event


def calls_for(library: ChunkLibrary, request: ChatRequest | CompletionRequest, config: ServeConfig) -> list[Asked]:
    """Return the calls that answer a request, one for each of its prompts, none of which is too long."""
    if isinstance(request, ChatRequest):
        calls = [_chat_call(library, request, config)]
    else:
        calls = [_completion_call(library, prompt, request, config) for prompt in request.prompts]
    most = config.prompt_tokens
    for call in calls:
        if most is not None and (tokens := len(library.prompt_ids(call.prompt))) > most:
            raise PromptTooLongError(
                f"the prompt has {tokens} tokens, and this server takes {most}; send fewer documents"
            )
    return calls


def _chat_call(library: ChunkLibrary, request: ChatRequest, config: ServeConfig) -> Asked:
    choice = request.tool_choice.model_dump() if isinstance(request.tool_choice, ToolItem) else request.tool_choice
    offered = [tool.model_dump(exclude_unset=True) for tool in request.tools]
    tools, must_call = chosen_tools(offered, choice) if offered else ([], False)
    turns = [message.turn() for message in request.messages]
    grammar, said = answer_form(request.response_format)
    turns = around_question(turns, after=said) or turns
    if grammar is None and must_call and tools:
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
        problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(request.grammar))
        if problem:
            raise ConfigError(f"the grammar cannot be read: {problem:.200}; give it in llguidance's form of Lark")
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


def _asked(prompt: BlendPrompt, request: Decoding, config: ServeConfig, grammar: str | None = None) -> Asked:
    if request.ignore_eos and grammar is not None:
        raise PromptError(
            "ignore_eos cannot be combined with constrained answers, which end on their own; leave it out"
        )
    # Under its older name, and its newer one.
    said = request.max_tokens, getattr(request, "max_completion_tokens", None)
    return Asked(
        prompt,
        min((each for each in said if each is not None), default=None),
        config.output_tokens,
        request.stop_strings,
        min(request.timeout_s or config.timeout_s, config.timeout_s),
        grammar=grammar,
        **request.model_dump(include=_DRAWN),
    )


def _passages(library: ChunkLibrary, documents: Sequence[str | DocumentItem]) -> list[Passage[Chunk | ChunkRef]]:
    """Return what a request names, the chunks of a document in the place of its name."""
    passages: list[Passage[Chunk | ChunkRef]] = []
    for each in documents:
        if isinstance(each, DocumentItem):
            passages.append(each.passage())
            continue
        ids = [each] if library.contains(each) else library.document(each)
        if not ids:
            raise UnknownChunkError(
                f"no document or chunk has the id {each!r}: it was never added here for this model and this key, or was "
                "deleted; add it, or send its text"
            )
        passages.extend(Passage("", ChunkRef(id)) for id in ids)
    return passages
