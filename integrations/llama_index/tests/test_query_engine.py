"""Query engines over 200 nodes, and over a server: each form of call says what the model says."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

import llama_index_cacheblend
from cacheblend_lab.reference import load_model, load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import EVERY_ROW, EventLog, MakeLLM, Nodes, WordEmbedding, own_answer
from integrations.llama_index.tests.corpus import corpus
from integrations.serve.tests.conftest import serving
from llama_index_cacheblend import BlendLLM, BlendRetriever, BlendVectorStore, install, warm_index

TOP_K = 8


def blended_index(llm: BlendLLM, embedding: WordEmbedding) -> VectorStoreIndex:
    store = BlendVectorStore(SimpleVectorStore(stores_text=True), engine=llm.engine)
    return VectorStoreIndex(
        corpus().fresh_nodes(), storage_context=StorageContext.from_defaults(vector_store=store), embed_model=embedding
    )


@pytest.fixture(scope="module")
def reference() -> Iterator[BlendLLM]:
    engine = BlendEngine(load_model(), load_tokenizer(), **engine_settings(recompute_ratio=1.0, selector="hkvd"))
    yield BlendLLM(engine=engine, max_new_tokens=24)
    engine.close()


@pytest.fixture(scope="module")
def reference_index(reference: BlendLLM, embedding: WordEmbedding) -> VectorStoreIndex:
    return blended_index(reference, embedding)


async def ask(engine: Any, question: str, form: str) -> tuple[str, Any]:
    response = await engine.aquery(question) if form.startswith("async") else engine.query(question)
    if form == "streaming":
        return "".join(response.response_gen), response
    if form == "async streaming":
        return "".join([piece async for piece in response.async_response_gen()]), response
    return str(response), response


@pytest.mark.parametrize("form", ["sync", "async", "streaming", "async streaming"])
@pytest.mark.parametrize("ratio", [1.0, pytest.param(EVERY_ROW, marks=pytest.mark.full)])
@pytest.mark.parametrize("count", [3, pytest.param(30, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_every_form_answers_as_the_model_itself_and_as_compact_mode(
    reference: BlendLLM, reference_index: VectorStoreIndex, events: EventLog, form: str, ratio: float, count: int
) -> None:
    install()
    llm = BlendLLM(
        engine=reference.engine,
        max_new_tokens=reference.max_new_tokens,
        generation_kwargs={"blend_config": reference.engine.blend.replace(recompute_ratio=ratio)},
    )
    options = {"llm": llm, "similarity_top_k": TOP_K, "streaming": "streaming" in form}
    blend = reference_index.as_query_engine(response_mode="blend", **options)
    compact = reference_index.as_query_engine(**options)
    tokenizer = llm.engine.tokenizer
    for question in corpus().questions[:: len(corpus().questions) // count]:
        events.events.clear()
        expected, plain = await ask(compact, question.text, form)
        said, response = await ask(blend, question.text, form)
        theirs, ours = [event.response.raw for event in events.of(LLMChatEndEvent)]
        start = events.of(LLMChatStartEvent)[-1]
        ids = llm.engine.prompt_ids(start.additional_kwargs["blend_prompt"])
        assert ours["token_ids"] == own_answer(llm, ids) == theirs["token_ids"]
        assert said == expected == tokenizer.decode(ours["token_ids"], skip_special_tokens=True)
        # What a user would count: the prompt's text as the chat template writes it, and the text of the answer.
        plain_messages = [{"role": each.role.value, "content": each.content} for each in start.messages]
        text = tokenizer.apply_chat_template(plain_messages, tokenize=False, add_generation_prompt=True)
        assert ours["usage"] == {
            "prompt_tokens": len(tokenizer(text, add_special_tokens=False)["input_ids"]),
            "completion_tokens": len(ours["token_ids"]),
            "total_tokens": len(ids) + len(ours["token_ids"]),
        }
        assert theirs["usage"] == ours["usage"]
        nodes = [(each.node.node_id, each.score) for each in response.source_nodes]
        assert nodes == [(each.node.node_id, each.score) for each in plain.source_nodes]
        assert len(nodes) == TOP_K
        assert all(isinstance(score, float) for _, score in nodes)
        report = response.metadata["blend"]
        assert (report["hits"], report["misses"]) == (TOP_K, 0)
        assert [chunk["id"] for chunk in report["chunks"]] == [name for name, _ in nodes]


class Reversed(BaseNodePostprocessor):
    """Reranks: the last comes first."""

    def _postprocess_nodes(self, nodes: Nodes, query_bundle: QueryBundle | None = None) -> Nodes:
        return nodes[::-1]


def test_postprocessors_reorder_and_replace(make_llm: MakeLLM, embedding: WordEmbedding, events: EventLog) -> None:
    install()
    llm = make_llm()
    index = blended_index(llm, embedding)
    question = corpus().questions[0].text
    options = {"llm": llm, "similarity_top_k": 4}
    in_order = index.as_query_engine(response_mode="blend", **options).query(question)
    # The title stands in the metadata of each node, and takes the place of its text.
    replaced = [Reversed(), MetadataReplacementPostProcessor(target_metadata_key="title")]
    for processors, hits in (([Reversed()], 4), (replaced, 0)):
        events.events.clear()
        compact = index.as_query_engine(node_postprocessors=processors, **options).query(question)
        blend = index.as_query_engine(node_postprocessors=processors, response_mode="blend", **options).query(question)
        theirs, ours = [event.response.raw for event in events.of(LLMChatEndEvent)]
        assert ours["token_ids"] == theirs["token_ids"]
        assert str(blend) == str(compact)
        names = [each.node.node_id for each in blend.source_nodes]
        assert names == [each.node.node_id for each in in_order.source_nodes][::-1]
        report = blend.metadata["blend"]
        assert [chunk["id"] for chunk in report["chunks"]] == names
        assert report["hits"] == hits
        assert all(("not the text that was added" in (each["reason"] or "")) == (not hits) for each in report["chunks"])


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
