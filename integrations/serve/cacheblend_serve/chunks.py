"""Chunks and documents of a tenant: added, listed, deleted.

Work that stores goes on to its end, even if its client leaves, and tells how far it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.convertors import PathConvertor, register_url_convertor

from cacheblend_rag.chunk import Chunk, document_name
from cacheblend_rag.documents.splitter import named_chunks, split_text
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import PromptError, UnknownChunkError
from cacheblend_rag.lexer import lexer_of
from cacheblend_rag.report import AddResult
from cacheblend_serve.responses import event_stream, unless_left
from cacheblend_serve.server import FromLibrary, FromServer, Server, in_thread
from cacheblend_serve.wire import AddRequest, DocumentRequest, IdsRequest, StoreRequest

__all__ = ["router"]


class _Anything(PathConvertor):
    """The rest of an address, line breaks included."""

    regex = "(?s:.*)"


register_url_convertor("anything", _Anything())
router = APIRouter()

_PAGE = 1000
Limit = Annotated[int, Query(ge=1, le=_PAGE)]


@router.get("/v1/chunks")
def _list_chunks(library: FromLibrary, after: str = "", limit: Limit = _PAGE) -> Response:
    return _page([{"id": id, "document": document} for id, document in library.page(after, limit + 1)], limit)


@router.get("/v1/documents")
def _list_documents(library: FromLibrary, after: str = "", limit: Limit = _PAGE) -> Response:
    return _page([{"id": name} for name in library.documents(after, limit + 1)], limit)


def _page(found: list[dict[str, Any]], limit: int) -> Response:
    """Return a page of a list, of which one more than fits on it was found if there are more."""
    return JSONResponse({"object": "list", "data": found[:limit], "has_more": len(found) > limit})


@router.post("/v1/chunks")
async def _add_chunks(body: AddRequest, request: Request, server: FromServer, library: FromLibrary) -> Response:
    return await _store(body, request, server, library, lambda: [each.chunk() for each in body.chunks])


@router.post("/v1/chunks/delete")
def _delete_chunks(request: IdsRequest, library: FromLibrary) -> Response:
    return JSONResponse({"deleted": library.delete(request.ids)})


@router.post("/v1/chunks/records")
def _records(request: IdsRequest, library: FromLibrary) -> Response:
    # Where each token ends matters only where chunks are encoded.
    found = [None if record is None else asdict(replace(record, ends=())) for record in library.records(request.ids)]
    return JSONResponse({"object": "list", "data": found})


@router.get("/v1/chunks/changes")
def _changes(library: FromLibrary, since: int | None = None) -> Response:
    return JSONResponse(asdict(library.changes(since)))


@router.post("/v1/chunks/flush")
async def _flush(server: FromServer, library: FromLibrary) -> Response:
    async def events() -> AsyncGenerator[dict[str, Any], None]:
        # It goes on if the client leaves.
        await asyncio.shield(server.begin(server.flush(library)))
        yield {"status": "stored"}

    return await event_stream(events())


@router.get("/v1/documents/{name:anything}")
def _show_document(name: str, library: FromLibrary) -> Response:
    return JSONResponse({"id": name, "object": "document", "chunks": _known(name, library.document(name))})


@router.put("/v1/documents/{name:anything}")
async def _put_document(
    name: str, body: DocumentRequest, request: Request, server: FromServer, library: FromLibrary
) -> Response:
    def chunks() -> list[Chunk]:
        if document_name(name) is None:
            raise PromptError(f"a document's name is {name!r:.80}, which is blank; give one with a letter or a digit")
        pieces = body.chunks or split_text(body.text or "", lexer_of(library.tokenizer).count, body.chunk_tokens)
        if not pieces:
            raise PromptError(
                f"the text of the document {name!r:.80} is blank; give one with words, or delete the document"
            )
        return list(named_chunks(name, pieces))

    return await _store(body, request, server, library, chunks, document=name)


@router.delete("/v1/documents/{name:anything}")
async def _delete_document(name: str, server: FromServer, library: FromLibrary) -> Response:
    async with server.writer(library, name):
        return JSONResponse({"deleted": _known(name, await in_thread(library.delete_document, name))})


def _known(name: str, found: Any) -> Any:
    """Return what there is of a document, if there is any."""
    if not found:
        raise UnknownChunkError(f"there is no document {name!r:.80}")
    return found


@router.post("/v1/prefetch")
def _prefetch(request: IdsRequest, library: FromLibrary) -> Response:
    library.prefetch(request.ids)
    return JSONResponse({"status": "begun"}, 202)


async def _store(
    body: StoreRequest,
    request: Request,
    server: Server,
    library: ChunkLibrary,
    chunks: Callable[[], Sequence[Chunk]],
    document: str | None = None,
) -> Response:
    """Encode and store chunks, or a document that is written by one at a time; what is told is stored, whoever ends then."""
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()

    def tell(done: int, total: int) -> None:
        loop.call_soon_threadsafe(steps.put_nowait, (done, total))

    async def work(place: AsyncExitStack) -> dict[str, Any]:
        async with place:
            try:
                if document is not None:
                    await place.enter_async_context(server.writer(library, document))
                return await in_thread(_add, library, body, chunks, tell)
            finally:
                steps.put_nowait(None)

    place = AsyncExitStack()
    place.enter_context(server.gate.pass_through())
    task = server.begin(work(place))
    if body.stream:
        return await event_stream(_progress(steps, task))
    return JSONResponse(await unless_left(request, asyncio.shield(task)))


async def _progress(
    steps: asyncio.Queue[tuple[int, int] | None], task: asyncio.Task[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    while (step := await steps.get()) is not None:
        yield {"done": step[0], "total": step[1]}
    yield await asyncio.shield(task)


def _add(
    library: ChunkLibrary,
    body: StoreRequest,
    chunks_of: Callable[[], Sequence[Chunk]],
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    """Add chunks to a library, telling how many are done of how many, and return what the client is told at the end."""
    chunks = chunks_of()
    numbers = {id(chunk): number for number, chunk in enumerate(chunks)}
    refused: list[dict[str, Any]] = []

    def refuse(chunk: Chunk, error: PromptError) -> None:
        refused.append({"index": numbers[id(chunk)], "message": str(error)})

    leaves_out = isinstance(body, AddRequest) and body.leave_out
    options: dict[str, Any] = {"on_refused": refuse if leaves_out else None}
    options["whole"] = isinstance(body, DocumentRequest)
    if body.background:
        library.add(chunks, background=True, **options)
        done, status = AddResult(0, len(chunks) - len(refused), 0, 0), "named"
    else:
        done, status = library.add(chunks, progress=tell, **options), "stored"
    told = {"ids": [chunk.id for chunk in chunks], "status": status} | asdict(done)
    return told | ({"refused": refused} if leaves_out else {})
