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

from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.demo.corpus import DemoChunk, demo_documents
from cacheblend_rag.engine import BlendEngine
from langchain_cacheblend import BlendVectorStore, ChatBlend

__all__ = ["LangChainDemo"]

_PROMPT = ChatPromptTemplate.from_messages(
    [("user", "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}")]
)


class LangChainDemo:
    """One framework over one Chroma collection.

    Parameters
    ----------
    client : ClientAPI
        Chroma.
    collection : Collection
        Where its chunks are.
    engine : BlendEngine
        Encodes what is added.
    embedding : str
        Folder of the embedding model.
    max_new_tokens : int
        Most tokens of an answer.
    """

    title = "LangChain"

    def __init__(
        self, client: ClientAPI, collection: Collection, engine: BlendEngine, embedding: str, max_new_tokens: int
    ) -> None:
        self._max_new_tokens = max_new_tokens
        options = {"device": "cpu", "local_files_only": True}
        titles = {text: document.title for document in demo_documents() for text in document.chunks}
        embeddings = _TitledEmbeddings(model=embedding, model_kwargs=options, titles=titles)
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

    def retrieve(self, question: str, count: int) -> dict[str, Document]:
        """Return so many chunks as the framework represents them, by their ids, best first."""
        found = self._store.as_retriever(search_kwargs={"k": count}).invoke(question)
        return {str(each.id): each for each in found}

    def whole(self, retrieved: dict[str, Document]) -> dict[str, Document]:
        """Return all chunks of the documents that some chunks are of, the document that was found first in front."""
        wanted = list(dict.fromkeys(each.metadata["document"] for each in retrieved.values()))
        among: Any = {"$in": wanted}
        kept = self._chroma.get(where={"document": among}, include=["documents", "metadatas"])
        found = [
            Document(page_content=text, metadata=about, id=id)
            for id, text, about in zip(kept["ids"], kept["documents"], kept["metadatas"], strict=True)
        ]
        found.sort(key=lambda each: (wanted.index(each.metadata["document"]), each.metadata["number"]))
        return {str(each.id): each for each in found}

    def answer(
        self, engine: BlendEngine, question: str, documents: Sequence[Document], blend: BlendConfig
    ) -> tuple[str, dict[str, Any]]:
        """Return an engine's answer from chunks, and its report as the framework hands it on."""
        # mypy sees an __init__ made of pydantic's fields, not the one that the class has.
        llm = ChatBlend(engine=engine, max_tokens=self._max_new_tokens, temperature=0)  # type: ignore[call-arg]
        chain = _PROMPT | llm.bind(blend_config=blend)
        message = chain.invoke(
            {"context": BLANK_LINE.join(each.page_content for each in documents), "question": question}
        )
        return str(message.text), message.response_metadata["blend"]


class _TitledEmbeddings(HuggingFaceEmbeddings):
    """Embeds a chunk with its document's title, as LlamaIndex does; the model reads the text alone."""

    titles: dict[str, str]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents([f"title: {self.titles[text]}\n\n{text}" for text in texts])
