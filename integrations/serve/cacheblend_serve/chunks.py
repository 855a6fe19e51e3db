"""Chunks and documents of a tenant: added, listed, deleted.

Work that stores goes on to its end, even if its client leaves, and tells how far it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.documents.splitter import named_passages, split_text
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import PromptError, UnknownChunkError
from cacheblend_rag.lexer import lexer_of
from cacheblend_serve.errors import explained
from cacheblend_serve.responses import EventStream, Whole
from cacheblend_serve.server import Asker, FromAsker, in_thread
from cacheblend_serve.wire import AddRequest, DocumentRequest, IdsRequest

__all__ = ["router", "store"]

router = APIRouter()

_PAGE = 1000


@router.get("/v1/chunks", response_model=None)
async def _list_chunks(
    asker: FromAsker, after: str = "", limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE
) -> dict[str, Any]:
    def found(library: ChunkLibrary) -> dict[str, Any]:
        ids = sorted(id for id in library.ids() if id > after)
        shown = ids[:limit]
        data = [{"id": id, "document": place} for id, place in zip(shown, library.places(shown), strict=True)]
        return {"object": "list", "data": data, "has_more": len(ids) > limit}

    return await asker.of_library(found)


@router.post("/v1/chunks", response_model=None)
async def _add_chunks(request: AddRequest, asker: FromAsker) -> Response:
    chunks = [Chunk(**each.model_dump()) for each in request.chunks]
    return await store(asker, partial(_add, request, lambda library: chunks, False), is_streamed=request.stream)


@router.post("/v1/chunks/delete", response_model=None)
async def _delete_chunks(request: IdsRequest, asker: FromAsker) -> dict[str, int]:
    return {"deleted": await asker.of_library(lambda library: library.delete(request.ids))}


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
    add = partial(_add, request, partial(_chunks_of, name, request), True)
    return await store(asker, add, is_streamed=request.stream, document=name)


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
    whole: bool,
    library: ChunkLibrary,
    tell: Callable[[int, int], None],
) -> dict[str, Any]:
    chunks = chunks_of(library)
    told = {"ids": [chunk.id for chunk in chunks], "tokens": 0, "encoded": 0, "unchanged": 0}
    if request.background:
        library.add(chunks, ttl_s=request.ttl_s, background=True, whole=whole)
        return told | {"status": "named"}
    result = library.add(chunks, ttl_s=request.ttl_s, progress=tell, whole=whole)
    counts = {"tokens": result.tokens, "encoded": result.encoded, "unchanged": result.unchanged}
    return told | counts | {"status": "stored"}


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


async def store(asker: Asker, add: Add, *, is_streamed: bool, document: str | None = None) -> Response:
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
        return EventStream(_progress(steps, task), server.config.reader_s, explained, tells_life=True)
    return Whole(partial(asyncio.shield, task), server.config.reader_s, explained)


async def _progress(
    steps: asyncio.Queue[tuple[int, int] | None], task: asyncio.Task[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    while (step := await steps.get()) is not None:
        yield {"done": step[0], "total": step[1]}
    yield await asyncio.shield(task)
