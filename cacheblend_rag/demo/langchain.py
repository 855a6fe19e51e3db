"""The demonstration through LangChain: an ordinary ``prompt | model`` chain over Chroma."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chromadb import Collection
from chromadb.api import ClientAPI
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import HuggingFaceEmbeddings

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.demo.corpus import DemoChunk
from cacheblend_rag.engine import BlendEngine
from langchain_cacheblend import BlendVectorStore, ChatBlend

__all__ = ["LangChainDemo"]

_PROMPT = ChatPromptTemplate.from_messages(
    [("user", "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}")]
)


class LangChainDemo:
    """One framework over one Chroma collection."""

    def __init__(
        self, client: ClientAPI, collection: Collection, engine: BlendEngine, embedding: str, max_new_tokens: int
    ) -> None:
        # mypy sees an __init__ made of pydantic's fields, not the one that the class has.
        self._llm = ChatBlend(engine=engine, max_tokens=max_new_tokens, temperature=0)  # type: ignore[call-arg]
        options = {"device": "cpu", "local_files_only": True}
        embeddings = HuggingFaceEmbeddings(model_name=embedding, model_kwargs=options)
        self._chroma = Chroma(collection.name, embeddings, client=client)
        self._store = BlendVectorStore(self._chroma, engine=engine, document_keys=["document"])

    def delete(self, ids: list[str]) -> None:
        self._store.delete(ids)

    def add(self, chunks: Sequence[DemoChunk]) -> None:
        self._store.add_texts(
            [chunk.text for chunk in chunks],
            [{**chunk.metadata, "start_index": chunk.start} for chunk in chunks],
            ids=[chunk.id for chunk in chunks],
        )

    def search(self, question: str, count: int) -> list[int]:
        """Return the document of each of so many chunks that are found, best first."""
        found = self._store.as_retriever(search_kwargs={"k": count}).invoke(question)
        return [document.metadata["document"] for document in found]

    def read(self, documents: list[int]) -> list[Document]:
        """Return all chunks of some documents in reading order, as the framework represents them."""
        among: Any = {"$in": documents}
        whole = self._chroma.get(where={"document": among}, include=["documents", "metadatas"])
        found = [
            Document(page_content=text, metadata=about, id=id)
            for id, text, about in zip(whole["ids"], whole["documents"], whole["metadatas"], strict=True)
        ]
        return sorted(found, key=lambda each: (each.metadata["document"], each.metadata["number"]))

    def answer(self, question: str, retrieved: Sequence[Any], blend: BlendConfig) -> tuple[str, dict[str, Any]]:
        """Return the answer from chunks, and the engine's report as the framework hands it on."""
        chain = _PROMPT | self._llm.bind(blend_config=blend)
        message = chain.invoke({"context": "\n".join(each.page_content for each in retrieved), "question": question})
        return str(message.text), message.response_metadata["blend"]
