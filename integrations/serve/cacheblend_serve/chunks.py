"""Chunks and documents of a tenant: added, listed, deleted.

Work that stores goes on to its end, even if its client leaves, and tells how far it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.documents.splitter import named_passages, split_text
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import PromptError, UnknownChunkError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.report import AddResult
from cacheblend_serve.responses import event_stream, unless_left
from cacheblend_serve.server import Asker, FromAsker, in_thread
from cacheblend_serve.wire import AddRequest, DeleteRequest, DocumentRequest, IdsRequest

__all__ = ["router"]

router = APIRouter()

_PAGE = 1000


@router.get("/v1/chunks", response_model=None)
async def _list_chunks(
    asker: FromAsker, after: str = "", limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE
) -> dict[str, Any]:
    def found(library: ChunkLibrary) -> dict[str, Any]:
        ids = sorted(id for id in library.ids() if id > after)
        shown = ids[:limit]
        indexed = set(library.indexed())
        data = [
            {"id": id, "document": place, "indexed": id in indexed}
            for id, place in zip(shown, library.places(shown), strict=True)
        ]
        return {"object": "list", "data": data, "has_more": len(ids) > limit}

    return await asker.of_library(found)


@router.post("/v1/chunks", response_model=None)
async def _add_chunks(request: AddRequest, asker: FromAsker) -> Response:
    chunks = [each.chunk() for each in request.chunks]
    return await _store(asker, partial(_add, request, lambda library: chunks), is_streamed=request.stream)


@router.post("/v1/chunks/delete", response_model=None)
async def _delete_chunks(request: DeleteRequest, asker: FromAsker) -> dict[str, int]:
    def delete(library: ChunkLibrary) -> int:
        made = library.indexed(request.sources) if request.sources else []
        return library.delete([*request.ids, *made], sources=request.sources)

    return {"deleted": await asker.of_library(delete)}


@router.post("/v1/chunks/records", response_model=None)
async def _records(request: IdsRequest, asker: FromAsker) -> Response:
    def found(library: ChunkLibrary) -> list[dict[str, Any] | None]:
        records = zip(library.records(request.ids), library.places(request.ids), strict=True)
        return [None if record is None else asdict(record) | {"document": place} for record, place in records]

    return await asker.written(lambda library: {"object": "list", "data": found(library)})


@router.get("/v1/chunks/changes", response_model=None)
async def _changes(asker: FromAsker, since: int | None = None) -> Response:
    return await asker.written(lambda library: asdict(library.changes(since)))


@router.post("/v1/chunks/flush", response_model=None)
async def _flush(asker: FromAsker) -> Response:
    library = await asker.library()

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        # It goes on if the client leaves.
        await asyncio.shield(asker.server.begin(asker.server.flush(library)))
        yield {"status": "stored"}

    return await event_stream(events(), asker.server.config.reader_s)


@router.get("/v1/documents", response_model=None)
async def _list_documents(
    asker: FromAsker, after: str = "", limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE
) -> dict[str, Any]:
    def found(library: ChunkLibrary) -> dict[str, Any]:
        names = sorted({name for name in library.places(library.ids()) if name is not None and name > after})
        return {"object": "list", "data": [{"id": name} for name in names[:limit]], "has_more": len(names) > limit}

    return await asker.of_library(found)


@router.get("/v1/documents/{name:path}", response_model=None)
async def _show_document(name: str, asker: FromAsker) -> dict[str, Any]:
    ids = await asker.of_library(lambda library: library.document(name))
    if not ids:
        raise UnknownChunkError(f"there is no document {name!r:.80}")
    return {"id": name, "object": "document", "chunks": ids}


@router.put("/v1/documents/{name:path}", response_model=None)
async def _put_document(name: str, request: DocumentRequest, asker: FromAsker) -> Response:
    add = partial(_add, request, partial(_chunks_of, name, request))
    return await _store(asker, add, is_streamed=request.stream, document=name)


@router.delete("/v1/documents/{name:path}", response_model=None)
async def _delete_document(name: str, asker: FromAsker) -> dict[str, int]:
    async with asker.server.writer(asker.owner.tenant, name):
        deleted = await asker.of_library(lambda library: library.delete_document(name))
    if not deleted:
        raise UnknownChunkError(f"there is no document {name!r:.80}")
    return {"deleted": deleted}


@router.post("/v1/prefetch", response_model=None)
async def _prefetch(request: IdsRequest, asker: FromAsker) -> Response:
    await asker.of_library(lambda library: library.prefetch(request.ids))
    return JSONResponse({"status": "begun"}, 202)


def _add(
    request: AddRequest | DocumentRequest,
    chunks_of: Callable[[ChunkLibrary], Sequence[Chunk]],
    library: ChunkLibrary,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    chunks = chunks_of(library)
    numbers = {id(chunk): number for number, chunk in enumerate(chunks)}
    refused: list[dict[str, Any]] = []

    def refuse(chunk: Chunk, error: PromptError) -> None:
        refused.append({"index": numbers[id(chunk)], "message": str(error)})

    leaves_out = isinstance(request, AddRequest) and request.leave_out
    add = partial(
        library.add,
        chunks,
        ttl_s=request.ttl_s,
        on_refused=refuse if leaves_out else None,
        whole=isinstance(request, DocumentRequest),
    )
    if request.background:
        add(background=True)
        done, status = AddResult(0, len(chunks) - len(refused), 0, 0), "named"
    else:
        done, status = add(progress=tell), "stored"
    told = {"ids": [chunk.id for chunk in chunks], "status": status} | asdict(done)
    return told | ({"refused": refused} if leaves_out else {})


def _chunks_of(name: str, request: DocumentRequest, library: ChunkLibrary) -> list[Chunk]:
    """Return the chunks of a document as it is to be."""
    count = lexer_of(library.tokenizer).count
    pieces = request.chunks or split_text(request.text or "", count, request.chunk_tokens)
    if not pieces:
        raise PromptError(
            f"the text of the document {name!r:.80} is blank; give one with words, or delete the document"
        )
    return [passage.chunk for passage in named_passages(name, pieces)]


Tell = Callable[[int, int], None]
Add = Callable[[ChunkLibrary, Tell], dict[str, Any]]
"""Stores chunks in a library, telling how many are done of how many, and returns what the client is told at the end."""


async def _store(asker: Asker, add: Add, *, is_streamed: bool, document: str | None = None) -> Response:
    """Encode and store chunks, to the end even if the client leaves; what is told is stored, whatever becomes of this process.

    Parameters
    ----------
    asker : Asker
        Whose chunks they are.
    add : callable
        See `Add`; called in a thread.
    is_streamed : bool
        Whether the client is told how far it is.
    document : str, optional
        The document that is written, by one at a time.
    """
    server = asker.server
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()

    def tell(done: int, total: int) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, (done, total))

    async def work(library: ChunkLibrary, place: ExitStack) -> dict[str, Any]:
        with place:
            try:
                if document is None:
                    return await in_thread(add, library, tell)
                async with server.writer(asker.owner.tenant, document):
                    return await in_thread(add, library, tell)
            finally:
                steps.put_nowait(None)

    with ExitStack() as entered:
        entered.enter_context(server.gate.pass_through())
        library = await asker.library()
        task = server.begin(work(library, entered.pop_all()))
    if is_streamed:
        return await event_stream(_progress(steps, task), server.config.reader_s)
    return JSONResponse(await unless_left(asker.request, asyncio.shield(task)))


async def _progress(
    steps: asyncio.Queue[tuple[int, int] | None], task: asyncio.Task[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    while (step := await steps.get()) is not None:
        yield {"done": step[0], "total": step[1]}
    yield await asyncio.shield(task)
