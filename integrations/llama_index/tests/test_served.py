"""LlamaIndex over a server's engine: the same classes, the model elsewhere, the same answers."""

import asyncio
from collections.abc import Iterator

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import NodeWithScore
from llama_index.vector_stores.chroma import ChromaVectorStore

import llama_index_cacheblend
from cacheblend_rag.errors import ConfigError
from integrations.serve.tests.conftest import serving
from llama_index_cacheblend import BlendLLM, BlendRetriever, BlendVectorStore, warm_index

QUESTION = "Where does she work?"


@pytest.fixture
def address(llm: BlendLLM) -> Iterator[str]:
    with serving(llm.engine) as address:
        yield address


@pytest.fixture
def index(
    address: str, chroma: ChromaVectorStore, nodes: list[NodeWithScore], embedding: BaseEmbedding
) -> VectorStoreIndex:
    llama_index_cacheblend.install()
    store = BlendVectorStore(chroma, server=address)
    storage = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex([each.node for each in nodes], storage_context=storage, embed_model=embedding)


def test_a_query_engine_answers_as_over_the_engine_itself(llm: BlendLLM, address: str, index: VectorStoreIndex) -> None:
    served = BlendLLM(server=address, max_new_tokens=12)
    assert served.model_name == llm.model_name
    there, here = (index.as_query_engine(llm=each, response_mode="blend") for each in (served, llm))
    expected = here.query(QUESTION)
    answer = there.query(QUESTION)
    assert str(answer) == str(expected)
    assert [each.node.node_id for each in answer.source_nodes] == [each.node.node_id for each in expected.source_nodes]
    assert answer.metadata["blend"]["hits"] == len(answer.source_nodes)
    assert str(asyncio.run(there.aquery(QUESTION))) == str(expected)
    streamed = index.as_query_engine(llm=served, response_mode="blend", streaming=True).query(QUESTION)
    assert "".join(streamed.response_gen) == str(expected)


def test_a_chat_engine_keeps_talking(address: str, index: VectorStoreIndex) -> None:
    served = BlendLLM(server=address, max_new_tokens=8)
    chat = index.as_chat_engine(llm=served, chat_mode="context", response_mode="blend")
    first = chat.chat(QUESTION)
    second = chat.chat("And where was she born?")
    assert first.source_nodes
    assert second.source_nodes
    chat.reset()
    assert str(chat.chat(QUESTION)) == str(first)


def test_what_is_deleted_is_forgotten_there(llm: BlendLLM, address: str, index: VectorStoreIndex) -> None:
    ids = llm.engine.ids()
    assert len(ids) == 5
    index.delete_nodes(ids[:1])
    assert llm.engine.ids() == ids[1:]
    assert warm_index(index).unchanged == 4
    retriever = BlendRetriever(index.as_retriever(), BlendLLM(server=address))
    assert retriever.retrieve(QUESTION)


def test_server_and_engine_exclude_each_other(llm: BlendLLM, address: str, chroma: ChromaVectorStore) -> None:
    with pytest.raises(ConfigError, match="engine and server"):
        BlendVectorStore(chroma, engine=llm, server=address)
    with pytest.raises(ConfigError, match="address of a server"):
        BlendLLM("reference", server=address)
    with pytest.raises(ConfigError, match="belongs to the engine"):
        BlendLLM(server=address, store="./kv")
