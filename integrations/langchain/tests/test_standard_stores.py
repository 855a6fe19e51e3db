"""LangChain's own suites for vector stores, retrievers and indexing, on `BlendVectorStore`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from cacheblend_rag import BlendEngine
from langchain_cacheblend import BlendRetriever, BlendVectorStore
from langchain_cacheblend.retriever import BlendVectorStoreRetriever


class _Stores(VectorStoreIntegrationTests):
    def inner(self) -> VectorStore:
        raise NotImplementedError

    @pytest.fixture
    def vectorstore(self, engine: BlendEngine) -> Iterator[VectorStore]:
        inner = self.inner()
        store = BlendVectorStore(inner, engine=engine)
        yield store
        # Whatever the test did: the KV is that of the documents, no more and no less.
        ids = engine.ids()
        found = store.get_by_ids(ids) if ids else []
        assert {document.id for document in found} == set(ids)
        assert len(inner.similarity_search("anything", k=10)) == len(ids)
        if isinstance(inner, Chroma):
            inner.delete_collection()


class TestOverChroma(_Stores):
    def inner(self) -> VectorStore:
        return Chroma(f"test-{uuid.uuid4().hex}", self.get_embeddings(), client=chromadb.EphemeralClient())


class TestOverInMemory(_Stores):
    def inner(self) -> VectorStore:
        return InMemoryVectorStore(self.get_embeddings())


del _Stores


class _Retrievers(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _fill(self, engine: BlendEngine, embedding: Embeddings, chunks: dict[str, str]) -> None:
        self.engine = engine
        self.store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
        self.store.add_documents([Document(text, id=id) for id, text in chunks.items()])

    @property
    def retriever_query_example(self) -> str:
        return "goat"


class TestRetrieverOfTheStore(_Retrievers):
    @property
    def retriever_constructor(self) -> Any:
        def make(k: int = 4) -> BlendVectorStoreRetriever:
            return self.store.as_retriever(search_kwargs={"k": k})

        return make


class TestBlendRetriever(_Retrievers):
    @property
    def retriever_constructor(self) -> Any:
        def make(k: int = 4) -> BaseRetriever:
            inner = self.store.inner.as_retriever(search_kwargs={"k": k})
            return BlendRetriever(retriever=inner, engine=self.engine)

        return make


del _Retrievers
