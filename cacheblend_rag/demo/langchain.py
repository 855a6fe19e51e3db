"""The demonstration through LangChain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chromadb.api import ClientAPI
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import HuggingFaceEmbeddings

from cacheblend_rag.demo.corpus import best_documents, demo_chunks
from cacheblend_rag.demo.framework import DemoEngine, FrameworkAnswer
from langchain_cacheblend import BlendVectorStore, ChatBlend

if TYPE_CHECKING:
    from cacheblend_rag.config import BlendConfig

__all__ = ["LangChainDemo"]

_PROMPT = ChatPromptTemplate.from_messages(
    [("user", "Answer the question from the context only.\n\n{context}\n\nQuestion: {question}")]
)


class LangChainDemo:
    """An ordinary ``prompt | model`` chain over Chroma.

    Parameters
    ----------
    client : ClientAPI
        Chroma.
    collection : str
        The name of the collection.
    engine : DemoEngine
        The engine.
    embedding : str
        The embedding model's folder.
    context_chunks : int
        How many chunks to answer from.
    max_new_tokens : int
        Most tokens of an answer.
    """

    name = "langchain"

    def __init__(
        self,
        client: ClientAPI,
        collection: str,
        engine: DemoEngine,
        embedding: str,
        context_chunks: int,
        max_new_tokens: int,
    ) -> None:
        self._context_chunks = context_chunks
        self._engine = engine
        # mypy sees an __init__ made of pydantic's fields, not the one that the class has.
        self._llm = ChatBlend(engine=engine, max_tokens=max_new_tokens, temperature=0)  # type: ignore[call-arg]
        self._chunks = demo_chunks(self.name)
        embeddings = HuggingFaceEmbeddings(
            model_name=embedding, model_kwargs={"device": "cpu", "local_files_only": True}
        )
        self._chroma = Chroma(
            collection, embeddings, client=client, collection_configuration={"hnsw": {"space": "cosine"}}
        )
        self._store = BlendVectorStore(self._chroma, engine=engine, document_keys=["document"])
        self._retriever = self._store.as_retriever(search_kwargs={"k": context_chunks})
        self._sizes = [0] * (1 + max(chunk.document for chunk in self._chunks))
        for chunk in self._chunks:
            self._sizes[chunk.document] += 1

    def ingest(self) -> int:
        """Bring the collection and the KV up to date."""
        present = set(self._chroma.get(include=[])["ids"])
        stale = sorted(present - {chunk.id for chunk in self._chunks})
        if stale:
            self._store.delete(stale)
        missing = [chunk for chunk in self._chunks if chunk.id not in present or not self._engine.contains(chunk.id)]
        if missing:
            self._store.add_texts(
                [chunk.text for chunk in missing],
                [
                    {
                        "document": chunk.document,
                        "title": chunk.title,
                        "number": chunk.number,
                        "start_index": chunk.start,
                    }
                    for chunk in missing
                ],
                ids=[chunk.id for chunk in missing],
            )
        return len(self._chunks)

    def retrieve(self, question: str) -> list[Document]:
        """Return the documents' chunks, whole documents in reading order."""
        found = self._retriever.invoke(question)
        chosen = best_documents(
            (document.metadata["document"] for document in found), self._sizes, self._context_chunks
        )
        among: Any = {"$in": chosen}
        whole = self._chroma.get(where={"document": among}, include=["documents", "metadatas"])
        documents = [
            Document(page_content=text, metadata=about, id=id)
            for id, text, about in zip(whole["ids"], whole["documents"], whole["metadatas"], strict=True)
        ]
        return sorted(documents, key=lambda document: (document.metadata["document"], document.metadata["number"]))

    def chunk_ids(self, retrieved: Any) -> list[str]:
        """Return the documents' ids."""
        return [document.id for document in retrieved]

    def answer(self, question: str, retrieved: Any, config: BlendConfig) -> FrameworkAnswer:
        """Answer from documents."""
        chain = _PROMPT | self._llm.bind(blend_config=config)
        message = chain.invoke(
            {"context": "\n".join(document.page_content for document in retrieved), "question": question}
        )
        return FrameworkAnswer(str(message.text), message.response_metadata["blend"])
