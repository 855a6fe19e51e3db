"""The application: what each address does, and who may ask it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chat.tools import ToolGate
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.documents.splitter import named_passages, split_text
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, UnknownChunkError
from cacheblend_rag.serve.asking import Asked, calls_for
from cacheblend_rag.serve.bodies import LimitedBodies
from cacheblend_rag.serve.keys import OPEN, KeyFile, Owner
from cacheblend_rag.serve.limits import Gate, Overload, Rates
from cacheblend_rag.serve.live import EventStream, Whole
from cacheblend_rag.serve.settings import ServeConfig
from cacheblend_rag.serve.spans import RequestSpans
from cacheblend_rag.serve.tenants import Tenants
from cacheblend_rag.serve.troubles import Denied, explained
from cacheblend_rag.serve.wire import (
    AddRequest,
    ChatRequest,
    CompletionRequest,
    DocumentRequest,
    IdsRequest,
    Replies,
)
from cacheblend_rag.stops import acut_pieces

__all__ = ["make_app"]

Result = TypeVar("Result")
_PAGE = 1000


class _Server:
    """What all addresses share."""

    def __init__(self, engine: BlendEngine, config: ServeConfig) -> None:
        self.config = config
        self.model = engine.model_name
        self.tenants = Tenants(engine)
        self.gate = Gate(config.requests)
        self._rates = Rates()
        self._keys = None if config.keys is None else KeyFile(config.keys)
        if self._keys is not None:
            self._keys.check()
        # One writer of a document at a time.
        self._writers: weakref.WeakValueDictionary[tuple[str | None, str], asyncio.Lock] = weakref.WeakValueDictionary()

    def stop(self) -> None:
        """Let nobody in any more, wait for the answers that are written, and close the tenants' engines."""
        self.gate.close(self.config.drain_s)
        self.tenants.close()

    def owner(self, authorization: str | None) -> Owner:
        """Return who asks; `Denied` if nobody knows the key, `Overload` if it asks too often."""
        owner = OPEN if self._keys is None else self._key_owner(self._keys, authorization or "")
        self._rates.take(owner.name, owner.per_minute or self.config.per_minute)
        return owner

    def _key_owner(self, keys: KeyFile, authorization: str) -> Owner:
        kind, _, key = authorization.partition(" ")
        owner = keys.owner(key.strip()) if kind.lower() == "bearer" else None
        if owner is None:
            raise Denied("this server answers those who have a key; send it as Authorization: Bearer KEY")
        return owner

    def writer(self, tenant: str | None, document: str) -> asyncio.Lock:
        """Return the lock of a document."""
        return self._writers.setdefault((tenant, document), asyncio.Lock())


class _Asker:
    """Who asks, and what they see: their tenant's engine."""

    def __init__(self, server: _Server, owner: Owner, request: Request) -> None:
        self.server = server
        self.owner = owner
        self.spans = RequestSpans(request.url.path.removeprefix("/v1/"), request.headers)

    async def engine(self) -> BlendEngine:
        """Return the tenant's engine, which may be made first."""
        return await _in_thread(self.server.tenants.engine, self.owner.tenant)


async def _asker(request: Request) -> _Asker:
    server: _Server = request.app.state.server
    return _Asker(server, await _in_thread(server.owner, request.headers.get("authorization")), request)


Asker = Annotated[_Asker, Depends(_asker)]


async def _in_thread(work: Callable[..., Result], *arguments: Any) -> Result:
    # Tokenizers, disks and models are waited for outside of the loop that serves all clients.
    return await anyio.to_thread.run_sync(partial(work, *arguments))


def make_app(engine: BlendEngine, config: ServeConfig | None = None) -> FastAPI:
    """Return an application that answers with an engine's model.

    Parameters
    ----------
    engine : BlendEngine
        The engine; those of other tenants are made of its model, store and settings. Who made it closes it.
    config : ServeConfig, optional
        The server's settings; by default those of the environment.

    Raises
    ------
    ConfigError
        If the file of keys cannot be read, or holds none.
    """
    server = _Server(engine, ServeConfig.of(config))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await _in_thread(server.stop)

    app = FastAPI(title="cacheblend-rag", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server
    for path, method, answer in _ROUTES:
        app.add_api_route(path, answer, methods=[method], response_model=None)
    for kind in (Denied, Overload, CacheBlendError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _explained)
    app.add_middleware(LimitedBodies, most=server.config.body_bytes)
    return app


async def _explained(_: Request, error: Exception) -> Response:
    return explained(error)


# Whether it lives


async def _healthz() -> dict[str, str]:
    return {"status": "alive"}


async def _readyz(request: Request) -> Response:
    is_ready = request.app.state.server.gate.is_open
    return JSONResponse({"status": "ready" if is_ready else "stopping"}, 200 if is_ready else 503)


async def _metrics(asker: Asker) -> Response:
    if asker.owner.is_admin:
        registry = CollectorRegistry()
        registry.register(asker.server.tenants)
    else:
        registry = (await asker.engine()).metrics.registry
    return Response(await _in_thread(generate_latest, registry), media_type="text/plain; version=0.0.4")


# Answers


async def _models(asker: Asker) -> dict[str, Any]:
    engine = await asker.engine()
    model = {"id": asker.server.model, "object": "model", "created": 0, "owned_by": "cacheblend-rag"}
    return {"object": "list", "data": [model | {"max_model_len": engine.window}]}


async def _chat(request: ChatRequest, asker: Asker) -> Response:
    return await _answer(request, asker)


async def _complete(request: CompletionRequest, asker: Asker) -> Response:
    return await _answer(request, asker)


async def _answer(request: ChatRequest | CompletionRequest, asker: _Asker) -> Response:
    server = asker.server
    if request.model is not None and request.model != server.model:
        raise HTTPException(404, f"the model {request.model!r:.60} is not served here, but {server.model!r} is")
    with ExitStack() as entered:
        entered.enter_context(server.gate.pass_through())
        calls = await _in_thread(calls_for, await asker.engine(), request, server.config)
        replies = Replies(server.model, request)
        leave = entered.pop_all().close
        if request.stream:
            return EventStream(_pieces(calls, replies, asker.spans), server.config.reader_s, explained, leave)
        return Whole(partial(_whole, calls, replies, asker.spans), explained, leave)


async def _whole(calls: Sequence[Asked], replies: Replies, spans: RequestSpans) -> dict[str, Any]:
    tasks = [asyncio.create_task(_last(call, spans)) for call in calls]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return replies.whole(answers, calls[0].reply(answers[0]))


async def _last(call: Asked, spans: RequestSpans) -> Answer:
    async with aclosing(_spoken(call, spans)) as spoken:
        async for piece in spoken:
            if isinstance(piece, Answer):
                return piece
    raise AssertionError("an answer has an end")


async def _pieces(
    calls: Sequence[Asked], replies: Replies, spans: RequestSpans
) -> AsyncGenerator[dict[str, Any], None]:
    answers: list[Answer] = []
    has_begun = False
    for number, call in enumerate(calls):
        gate = None if call.tools == "none" else ToolGate()
        async with aclosing(_spoken(call, spans)) as spoken:
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
    for event in replies.last(answers):
        yield event


async def _spoken(call: Asked, spans: RequestSpans) -> AsyncGenerator[str | Answer, None]:
    """Yield an answer piece by piece, and at its end the whole of it."""
    stream = await _in_thread(partial(call.engine.stream, call.prompt, **call.options))
    try:
        async with aclosing(acut_pieces(stream, call.ending.stop)) as pieces:
            async for piece in pieces:
                yield piece
        answer = call.ending.read(await stream.aresult(), call.engine)
        spans.record(answer)
        yield answer
    finally:
        stream.close()


# Chunks and documents


async def _list_chunks(
    asker: Asker, after: str = "", limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE
) -> dict[str, Any]:
    engine = await asker.engine()

    def found() -> dict[str, Any]:
        ids = sorted(id for id in engine.ids() if id > after)
        shown = ids[:limit]
        data = [{"id": id, "document": place} for id, place in zip(shown, engine.places(shown), strict=True)]
        return {"object": "list", "data": data, "has_more": len(ids) > limit}

    return await _in_thread(found)


async def _add_chunks(request: AddRequest, asker: Asker) -> Response:
    chunks = [Chunk(**each.model_dump()) for each in request.chunks]
    return await _store(request, asker, lambda engine: chunks)


async def _delete_chunks(request: IdsRequest, asker: Asker) -> dict[str, int]:
    engine = await asker.engine()
    return {"deleted": await _in_thread(engine.delete, request.ids)}


async def _list_documents(
    asker: Asker, after: str = "", limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE
) -> dict[str, Any]:
    engine = await asker.engine()

    def found() -> dict[str, Any]:
        names = sorted({name for name in engine.places(engine.ids()) if name is not None and name > after})
        return {"object": "list", "data": [{"id": name} for name in names[:limit]], "has_more": len(names) > limit}

    return await _in_thread(found)


async def _show_document(name: str, asker: Asker) -> dict[str, Any]:
    engine = await asker.engine()
    ids = await _in_thread(engine.document, name)
    if not ids:
        raise UnknownChunkError(f"there is no document {name!r:.80}")
    return {"id": name, "object": "document", "chunks": ids}


async def _put_document(name: str, request: DocumentRequest, asker: Asker) -> Response:
    def chunks(engine: BlendEngine) -> list[Chunk]:
        def count(text: str) -> int:
            return len(engine.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

        pieces = request.chunks or split_text(request.text or "", count, request.chunk_tokens)
        made = [passage.chunk for passage in named_passages(name, pieces)]
        # First, since what follows a chunk is encoded behind it.
        engine.delete(set(engine.document(name)) - {str(chunk.id) for chunk in made})
        return made

    return await _store(request, asker, chunks, name)


async def _delete_document(name: str, asker: Asker) -> dict[str, int]:
    engine = await asker.engine()
    async with asker.server.writer(asker.owner.tenant, name):
        deleted = await _in_thread(engine.delete_document, name)
    if not deleted:
        raise UnknownChunkError(f"there is no document {name!r:.80}")
    return {"deleted": deleted}


async def _prefetch(request: IdsRequest, asker: Asker) -> Response:
    engine = await asker.engine()
    await _in_thread(engine.prefetch, request.ids)
    return JSONResponse({"status": "begun"}, 202)


async def _store(
    request: AddRequest | DocumentRequest,
    asker: _Asker,
    chunks_of: Callable[[BlendEngine], Sequence[Chunk]],
    document: str | None = None,
) -> Response:
    """Encode and store chunks; what is told is stored, whatever becomes of this process or the client."""
    with ExitStack() as entered:
        entered.enter_context(asker.server.gate.pass_through())
        engine = await asker.engine()
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()

        def add() -> dict[str, Any]:
            def tell(done: int, total: int) -> None:
                loop.call_soon_threadsafe(steps.put_nowait, (done, total))

            chunks = chunks_of(engine)
            told = {"ids": [chunk.id for chunk in chunks], "tokens": 0, "encoded": 0, "unchanged": 0}
            if request.background:
                engine.add(chunks, ttl_s=request.ttl_s, background=True)
                return told | {"status": "named"}
            result = engine.add(chunks, ttl_s=request.ttl_s, progress=tell)
            counts = {"tokens": result.tokens, "encoded": result.encoded, "unchanged": result.unchanged}
            return told | counts | {"status": "stored"}

        async def work() -> dict[str, Any]:
            try:
                if document is None:
                    return await _in_thread(add)
                async with asker.server.writer(asker.owner.tenant, document):
                    return await _in_thread(add)
            finally:
                steps.put_nowait(None)

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            task = asyncio.create_task(work())
            while (step := await steps.get()) is not None:
                yield {"done": step[0], "total": step[1]}
            yield await task

        leave = entered.pop_all().close
        if request.stream:
            return EventStream(events(), asker.server.config.reader_s, explained, leave)
        return Whole(work, explained, leave)


_ROUTES: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("/healthz", "GET", _healthz),
    ("/readyz", "GET", _readyz),
    ("/metrics", "GET", _metrics),
    ("/v1/models", "GET", _models),
    ("/v1/chat/completions", "POST", _chat),
    ("/v1/completions", "POST", _complete),
    ("/v1/chunks", "GET", _list_chunks),
    ("/v1/chunks", "POST", _add_chunks),
    ("/v1/chunks/delete", "POST", _delete_chunks),
    ("/v1/documents", "GET", _list_documents),
    ("/v1/documents/{name:path}", "GET", _show_document),
    ("/v1/documents/{name:path}", "PUT", _put_document),
    ("/v1/documents/{name:path}", "DELETE", _delete_document),
    ("/v1/prefetch", "POST", _prefetch),
)
