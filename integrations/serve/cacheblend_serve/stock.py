"""What a tenant has stored: chunks and documents, added, listed, deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Response
from fastapi.responses import JSONResponse

from cacheblend_rag.chunk import Chunk
from cacheblend_rag.documents.splitter import named_passages, split_text
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import PromptError, UnknownChunkError
from cacheblend_serve.asker import FromAsker
from cacheblend_serve.storing import store
from cacheblend_serve.wire import AddRequest, DocumentRequest, IdsRequest

__all__ = ["STOCK"]

_PAGE = 1000


async def _list_chunks(
    asker: FromAsker, after: str = "", limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE
) -> dict[str, Any]:
    def found(library: ChunkLibrary) -> dict[str, Any]:
        ids = sorted(id for id in library.ids() if id > after)
        shown = ids[:limit]
        data = [{"id": id, "document": place} for id, place in zip(shown, library.places(shown), strict=True)]
        return {"object": "list", "data": data, "has_more": len(ids) > limit}

    return await asker.of_library(found)


async def _add_chunks(request: AddRequest, asker: FromAsker) -> Response:
    chunks = [Chunk(**each.model_dump()) for each in request.chunks]
    return await store(asker, partial(_add, request, lambda library: chunks, False), is_streamed=request.stream)


async def _delete_chunks(request: IdsRequest, asker: FromAsker) -> dict[str, int]:
    return {"deleted": await asker.of_library(lambda library: library.delete(request.ids))}


async def _list_documents(
    asker: FromAsker, after: str = "", limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE
) -> dict[str, Any]:
    def found(library: ChunkLibrary) -> dict[str, Any]:
        names = sorted({name for name in library.places(library.ids()) if name is not None and name > after})
        return {"object": "list", "data": [{"id": name} for name in names[:limit]], "has_more": len(names) > limit}

    return await asker.of_library(found)


async def _show_document(name: str, asker: FromAsker) -> dict[str, Any]:
    ids = await asker.of_library(lambda library: library.document(name))
    if not ids:
        raise UnknownChunkError(f"there is no document {name!r:.80}")
    return {"id": name, "object": "document", "chunks": ids}


async def _put_document(name: str, request: DocumentRequest, asker: FromAsker) -> Response:
    add = partial(_add, request, partial(_chunks_of, name, request), True)
    return await store(asker, add, is_streamed=request.stream, document=name)


async def _delete_document(name: str, asker: FromAsker) -> dict[str, int]:
    async with asker.server.writer(asker.owner.tenant, name):
        deleted = await asker.of_library(lambda library: library.delete_document(name))
    if not deleted:
        raise UnknownChunkError(f"there is no document {name!r:.80}")
    return {"deleted": deleted}


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

    def count(text: str) -> int:
        return len(library.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    pieces = request.chunks or split_text(request.text or "", count, request.chunk_tokens)
    if not pieces:
        raise PromptError(
            f"the text of the document {name!r:.80} is blank; give one with words, or delete the document"
        )
    return [passage.chunk for passage in named_passages(name, pieces)]


STOCK: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("/v1/chunks", "GET", _list_chunks),
    ("/v1/chunks", "POST", _add_chunks),
    ("/v1/chunks/delete", "POST", _delete_chunks),
    ("/v1/documents", "GET", _list_documents),
    ("/v1/documents/{name:path}", "GET", _show_document),
    ("/v1/documents/{name:path}", "PUT", _put_document),
    ("/v1/documents/{name:path}", "DELETE", _delete_document),
    ("/v1/prefetch", "POST", _prefetch),
)
"""Addresses, their methods, and what answers there."""
