"""What was made of a source goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chromadb
import pytest
from langchain_chroma import Chroma
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import CharacterTextSplitter

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from integrations.langchain.tests.conftest import CHUNKS
from langchain_cacheblend import BlendLLM, BlendVectorStore


def pieces(source: str) -> list[Document]:
    return [Document(text, metadata={"source": source}) for text in CHUNKS.values()]


def wrapped(engine: BlendEngine, folder: Path, embedding: Embeddings) -> BlendVectorStore:
    client = chromadb.PersistentClient(str(folder / "chroma"))
    return BlendVectorStore(Chroma("nodes", embedding, client=client), engine=engine)


@pytest.mark.parametrize("has_id", [True, False], ids=["named", "nameless"])
def test_parents_that_prompts_brought_go_with_their_source(
    engine: BlendEngine, embedding: Embeddings, has_id: bool
) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    splitter = CharacterTextSplitter(separator=".", chunk_size=30, chunk_overlap=0)
    retriever = ParentDocumentRetriever(vectorstore=store, docstore=InMemoryStore(), child_splitter=splitter)
    parents = [Document(" ".join(CHUNKS.values()), id="parent" if has_id else None, metadata={"source": "d"})]
    retriever.add_documents(parents)
    children = engine.ids()
    assert children
    llm = BlendLLM(engine=engine, max_tokens=2)
    llm.invoke("Where was Mara born?", documents=retriever.invoke("Mara"))
    engine.flush()
    before = engine.store.stats().ram_bytes
    store.delete(children[1:])
    assert ("parent" in engine.ids()) == has_id
    store.delete(children[:1])
    assert engine.ids() == []
    engine.delete(engine.heads())
    assert before > engine.store.stats().ram_bytes == 0


@pytest.mark.parametrize("when", ["opening", "asking", "adding"])
def test_what_was_deleted_behind_the_store_is_noticed(
    tiny: Any, tokenizer: Any, embedding: Embeddings, tmp_path: Path, when: str
) -> None:
    with BlendEngine(tiny, tokenizer, store=tmp_path / "kv", **engine_settings(self_check=False)) as engine:
        store = wrapped(engine, tmp_path, embedding)
        ids = store.add_documents(pieces("d"))
        store.inner.delete(ids[:2])
        if when == "opening":
            wrapped(engine, tmp_path, embedding)
        elif when == "asking":
            assert store.notice() == 2
        else:
            ids += store.add_documents([Document("Another text of it.", metadata={"source": "d"})])
        assert set(engine.ids()) == set(ids[2:])
