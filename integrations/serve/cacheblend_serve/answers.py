"""Answers, whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any

from fastapi import Response
from starlette.exceptions import HTTPException

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.tools import ToolGate
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import PromptError
from cacheblend_serve.asker import Asker, FromAsker, in_thread
from cacheblend_serve.asking import calls_for
from cacheblend_serve.backend import Asked, Backend
from cacheblend_serve.errors import explained
from cacheblend_serve.live import EventStream, Whole
from cacheblend_serve.spans import RequestSpans
from cacheblend_serve.wire import ChatRequest, CompletionRequest, Replies

__all__ = ["ANSWERS"]

Speak = Callable[[Asked], AsyncGenerator[str | Answer, None]]
Keep = Callable[[list[Answer]], Awaitable[None]]


async def _models(asker: FromAsker) -> dict[str, Any]:
    library = await asker.library()
    model = {"id": asker.server.backend.model_name, "object": "model", "created": 0, "owned_by": "cacheblend-rag"}
    return {"object": "list", "data": [model | {"max_model_len": library.window}]}


async def _chat(request: ChatRequest, asker: FromAsker) -> Response:
    return await _answer(request, asker)


async def _complete(request: CompletionRequest, asker: FromAsker) -> Response:
    return await _answer(request, asker)


async def _answer(request: ChatRequest | CompletionRequest, asker: Asker) -> Response:
    server = asker.server
    served = server.backend.model_name
    if request.model is not None and request.model != served:
        raise HTTPException(404, f"the model {request.model!r:.60} is not served here, but {served!r} is")
    if request.keep:
        server.pages.check()
        if not server.backend.makes_pages:
            raise PromptError(
                "this server's model does not answer in its own process, and has no pages; leave keep out"
            )
    # Those of a stream are answered one after the other.
    prompts = len(request.prompts) if isinstance(request, CompletionRequest) and not request.stream else 1
    with ExitStack() as entered:
        entered.enter_context(server.gate.pass_through(prompts))
        library = await asker.library()
        calls = await in_thread(calls_for, library, request, server.config)
        replies = Replies(served, request)
        speak = partial(_spoken, server.backend, library, asker.spans)
        keep = partial(_keep, asker, request, replies)
        leave, reader_s = entered.pop_all().close, server.config.reader_s
        if request.stream:
            return EventStream(_pieces(calls, replies, speak, keep), reader_s, explained, leave)
        return Whole(partial(_whole, calls, replies, speak, keep), reader_s, explained, leave)


async def _whole(calls: Sequence[Asked], replies: Replies, speak: Speak, keep: Keep) -> dict[str, Any]:
    tasks = [asyncio.create_task(_last(speak(call))) for call in calls]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    await keep(answers)
    return replies.whole(answers, calls[0].reply(answers[0]))


async def _last(spoken: AsyncGenerator[str | Answer, None]) -> Answer:
    async with aclosing(spoken):
        async for piece in spoken:
            if isinstance(piece, Answer):
                return piece
    raise AssertionError("an answer has an end")


async def _pieces(
    calls: Sequence[Asked], replies: Replies, speak: Speak, keep: Keep
) -> AsyncGenerator[dict[str, Any], None]:
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
                    if rest:
                        yield replies.piece(rest, number)
                    for event in replies.end(piece, reply, number):
                        yield event
                    answers.append(piece)
                    continue
                shown = piece if gate is None else gate.pass_on(piece)
                if shown:
                    yield replies.piece(shown, number)
    await keep(answers)
    for event in replies.last(answers):
        yield event


async def _spoken(
    backend: Backend, library: ChunkLibrary, spans: RequestSpans, asked: Asked
) -> AsyncGenerator[str | Answer, None]:
    """Yield an answer piece by piece, and at its end the whole of it."""
    async with aclosing(backend.answer(library, asked)) as spoken:
        async for piece in spoken:
            if isinstance(piece, Answer):
                spans.record(piece)
            yield piece


async def _keep(
    asker: Asker, request: ChatRequest | CompletionRequest, replies: Replies, answers: list[Answer]
) -> None:
    """Keep the pages of all answers to a request, in the order of its prompts, if it asks for them."""
    if request.keep:
        keep = asker.server.pages.keep
        replies.pages = [await in_thread(keep, asker.owner, answer.report) for answer in answers]


ANSWERS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("/v1/models", "GET", _models),
    ("/v1/chat/completions", "POST", _chat),
    ("/v1/completions", "POST", _complete),
)
"""Addresses, their methods, and what answers there."""
