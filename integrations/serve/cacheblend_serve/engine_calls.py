"""Calls of a `ServedEngine`: its tenant's chunks and answers, as an engine of its own process would have them."""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import zipfile
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from llguidance import LLMatcher

from cacheblend_rag.chat.answer import Answer
from cacheblend_rag.chunk import Chunk
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.lexer import lexer_of
from cacheblend_serve.backend import Asked
from cacheblend_serve.chunks import store
from cacheblend_serve.client.wire import AnswerCall, ChunksCall, IdsCall, PromptItem
from cacheblend_serve.completions import check_length
from cacheblend_serve.errors import explained
from cacheblend_serve.responses import EventStream
from cacheblend_serve.server import Asker, FromAsker, in_thread
from cacheblend_serve.settings import ServeConfig

__all__ = ["router"]

router = APIRouter()

# Settings that the frameworks' objects look at; the others are the server's business.
_TOLD = {"companions", "separator", "tenant"}


@router.get("/v1/engine", response_model=None)
async def _facts(asker: FromAsker) -> dict[str, Any]:
    library, backend = await asker.library(), asker.server.backend
    return {
        "model": backend.model_name,
        "namespace": library.namespace,
        "window": library.window,
        "end_ids": backend.end_ids,
        "config": library.config.model_dump(mode="json", include=_TOLD),
        "blend": backend.blend.model_dump(mode="json"),
    }


@router.get("/v1/engine/tokenizer", response_model=None)
async def _tokenizer(asker: FromAsker) -> Response:
    packed = await asker.of_library(lambda library: _packed(library.tokenizer))
    return Response(packed, media_type="application/zip")


@router.post("/v1/engine/add", response_model=None)
async def _add(request: ChunksCall, asker: FromAsker) -> Response:
    numbers = {id(chunk): number for number, chunk in enumerate(request.chunks)}

    def add(library: ChunkLibrary, tell: Callable[[int, int], None]) -> dict[str, Any]:
        refused: list[tuple[int, str]] = []

        def refuse(chunk: Chunk, error: PromptError) -> None:
            refused.append((numbers[id(chunk)], str(error)))

        add = partial(
            library.add,
            request.chunks,
            ttl_s=request.ttl_s,
            on_refused=refuse if request.leave_out else None,
            whole=request.whole,
        )
        if request.background:
            add(background=True)
            counts = {"encoded": 0, "named": len(request.chunks), "unchanged": 0, "tokens": 0}
        else:
            counts = asdict(add(progress=tell))
        return counts | {"refused": refused}

    return await store(asker, add, is_streamed=True)


@router.post("/v1/engine/flush", response_model=None)
async def _flush(asker: FromAsker) -> Response:
    library = await asker.library()

    async def events() -> AsyncGenerator[dict[str, Any], None]:
        # It goes on if the client leaves.
        await asyncio.shield(asker.server.begin(asker.server.flush(library)))
        yield {"status": "stored"}

    return EventStream(events(), asker.server.config.reader_s, explained, tells_life=True)


@router.post("/v1/engine/estimate", response_model=None)
async def _estimate(request: ChunksCall, asker: FromAsker) -> dict[str, Any]:
    with asker.server.gate.pass_through():
        return asdict(await asker.of_library(lambda library: library.estimate(request.chunks)))


@router.post("/v1/engine/delete", response_model=None)
async def _delete(request: IdsCall, asker: FromAsker) -> int:
    return await asker.of_library(lambda library: library.delete(request.ids, sources=request.sources or ()))


@router.post("/v1/engine/indexed", response_model=None)
async def _indexed(request: IdsCall, asker: FromAsker) -> list[str]:
    return await asker.of_library(lambda library: library.indexed(request.sources))


@router.get("/v1/engine/document", response_model=None)
async def _document(name: str, asker: FromAsker) -> list[str]:
    return await asker.of_library(lambda library: library.document(name))


@router.post("/v1/engine/places", response_model=None)
async def _places(request: IdsCall, asker: FromAsker) -> list[str | None]:
    return await asker.of_library(lambda library: library.places(request.ids))


@router.get("/v1/engine/ids", response_model=None)
async def _ids(asker: FromAsker) -> Response:
    return await _written(asker, lambda library: library.ids())


@router.post("/v1/engine/records", response_model=None)
async def _records(request: IdsCall, asker: FromAsker) -> Response:
    return await _written(asker, lambda library: [each and asdict(each) for each in library.records(request.ids)])


@router.get("/v1/engine/changes", response_model=None)
async def _changes(asker: FromAsker, since: int | None = None) -> Response:
    return await _written(asker, lambda library: asdict(library.changes(since)))


@router.post("/v1/engine/layout", response_model=None)
async def _layout(request: PromptItem, asker: FromAsker) -> Response:
    return await _written(asker, lambda library: asdict(library.prompt_layout(request.prompt())))


async def _written(asker: Asker, find: Callable[[ChunkLibrary], Any]) -> Response:
    """Return what is found as JSON, which is long enough to be written outside of the loop that serves all clients."""
    written = await asker.of_library(lambda library: json.dumps(find(library)))
    return Response(written, media_type="application/json")


@router.post("/v1/engine/answer", response_model=None)
async def _answer(request: AnswerCall, asker: FromAsker) -> Response:
    server = asker.server
    with ExitStack() as entered:
        entered.enter_context(server.gate.pass_through())
        library = await asker.library()
        asked = await in_thread(_asked, library, request, server.config)
        pieces, leave = _pieces(asker, library, asked), entered.pop_all().close
        return EventStream(pieces, server.config.reader_s, explained, leave, tells_life=True)


def _asked(library: ChunkLibrary, request: AnswerCall, config: ServeConfig) -> Asked:
    prompt = request.prompt.prompt()
    check_length(library, prompt, config)
    if request.grammar is not None:
        _check_grammar(request.grammar)
    thinking = lexer_of(library.tokenizer).thinking(prompt.segments) if request.thinks else None
    return Asked(
        prompt,
        request.max_tokens,
        config.output_tokens,
        tuple(request.stop),
        min(request.timeout_s or config.timeout_s, config.timeout_s),
        wait_s=request.wait_s,
        draws=request.do_sample,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        grammar=request.grammar,
        thinking=thinking,
        is_raw=thinking is not None,
        blend=request.blend,
    )


def _check_grammar(grammar: str) -> None:
    """Raise `ConfigError` if a grammar, in llguidance's form of Lark, is none."""
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    if problem:
        raise ConfigError(f"the grammar cannot be read: {problem:.200}; give it in llguidance's form of Lark")


async def _pieces(asker: Asker, library: ChunkLibrary, asked: Asked) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(asker.answer(library, asked)) as spoken:
        async for piece in spoken:
            if isinstance(piece, Answer):
                yield {"text": piece.text, "reason": piece.finish_reason, "report": piece.report.to_dict()}
            else:
                yield {"piece": piece}


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
