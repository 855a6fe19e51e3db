"""Query engines, over an engine and over a server: each form of call says what the model says."""

from collections.abc import Iterator

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import QueryBundle
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import OTHER_TEXT
from integrations.llama_index.tests.conftest import (
    EVERY_ROW,
    FACTS,
    FORMS,
    EventLog,
    Nodes,
    ask,
    own_answer,
)
from integrations.serve.tests.conftest import serving
from llama_index_cacheblend import BlendLLM, BlendRetriever, BlendVectorStore, install, warm_index

QUESTION = "Where was Mara Lindell born?"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [1.0, EVERY_ROW])
async def test_every_form_answers_as_the_model_itself_and_as_compact_mode(
    llm: BlendLLM, index: VectorStoreIndex, events: EventLog, form: str, ratio: float
) -> None:
    install()
    blending = llm.engine.blend.replace(recompute_ratio=ratio)
    llm = BlendLLM(engine=llm, max_new_tokens=12, generation_kwargs={"blend_config": blending})
    compact, blend = (
        index.as_query_engine(llm=llm, similarity_top_k=3, streaming="stream" in form, response_mode=mode)
        for mode in ("compact", "blend")
    )
    tokenizer = llm.engine.tokenizer
    for question in (QUESTION, "Who paints ships?"):
        events.events.clear()
        expected, plain = await ask(compact, form, question)
        said, response = await ask(blend, form, question)
        theirs, ours = [event.response.raw for event in events.of(LLMChatEndEvent)]
        ids = llm.engine.prompt_ids(events.of(LLMChatStartEvent)[-1].additional_kwargs["blend_prompt"])
        assert ours["token_ids"] == own_answer(llm, ids) == theirs["token_ids"]
        assert said == expected == tokenizer.decode(ours["token_ids"], skip_special_tokens=True)
        assert ours["usage"] == theirs["usage"]
        assert ours["usage"]["prompt_tokens"] == len(ids)
        nodes = [(each.node_id, each.score) for each in response.source_nodes]
        assert nodes == [(each.node_id, each.score) for each in plain.source_nodes] and len(nodes) == 3
        report = response.metadata["blend"]
        assert (report["hits"], report["misses"]) == (3, 0)
        assert [chunk["id"] for chunk in report["chunks"]] == [name for name, _ in nodes]


class Reversed(BaseNodePostprocessor):
    """Reranks: the last comes first."""

    def _postprocess_nodes(self, nodes: Nodes, query_bundle: QueryBundle | None = None) -> Nodes:
        return nodes[::-1]


def test_postprocessors_reorder_and_replace(llm: BlendLLM, nodes: Nodes, embedding: object, events: EventLog) -> None:
    install()
    for number, each in enumerate(nodes):
        each.node.metadata["short"] = f"Fact {number}."
    store = BlendVectorStore(SimpleVectorStore(stores_text=True), engine=llm.engine)
    storage = StorageContext.from_defaults(vector_store=store)
    index = VectorStoreIndex([each.node for each in nodes], storage_context=storage, embed_model=embedding)  # type: ignore[arg-type]
    in_order = [each.node_id for each in index.as_retriever(similarity_top_k=4).retrieve(QUESTION)]
    replaced = [Reversed(), MetadataReplacementPostProcessor(target_metadata_key="short")]
    for processors, hits in (([Reversed()], 4), (replaced, 0)):
        events.events.clear()
        compact, blend = (
            index.as_query_engine(llm=llm, similarity_top_k=4, node_postprocessors=processors, response_mode=mode)
            for mode in ("compact", "blend")
        )
        expected, answer = compact.query(QUESTION), blend.query(QUESTION)
        theirs, ours = [event.response.raw for event in events.of(LLMChatEndEvent)]
        assert ours["token_ids"] == theirs["token_ids"] and str(answer) == str(expected)
        assert [each.node_id for each in answer.source_nodes] == in_order[::-1]
        report = answer.metadata["blend"]
        assert report["hits"] == hits
        assert all((chunk["reason"] == OTHER_TEXT) == (not hits) for chunk in report["chunks"])


@pytest.fixture
def address(llm: BlendLLM) -> Iterator[str]:
    with serving(llm.engine) as address:
        yield address


@pytest.mark.parametrize("form", FORMS)
async def test_a_server_answers_as_the_engine_itself(
    llm: BlendLLM, index: VectorStoreIndex, address: str, form: str
) -> None:
    install()
    served = BlendLLM(server=address, max_new_tokens=12)
    assert served.model_name == llm.model_name
    there, here = (
        index.as_query_engine(llm=each, response_mode="blend", streaming="stream" in form) for each in (served, llm)
    )
    expected, _ = await ask(here, form, QUESTION)
    said, answer = await ask(there, form, QUESTION)
    assert said == expected
    assert answer.metadata["blend"]["hits"] == len(answer.source_nodes) > 0


def test_a_store_over_a_server_adds_and_deletes_there(
    llm: BlendLLM, address: str, chroma: ChromaVectorStore, nodes: Nodes, embedding: object
) -> None:
    store = BlendVectorStore(chroma, server=address)
    index = VectorStoreIndex.from_vector_store(store, embed_model=embedding)  # type: ignore[arg-type]
    index.insert_nodes([each.node for each in nodes])
    assert len(llm.engine.ids()) == len(FACTS)
    index.delete_nodes(["n0"])
    assert sorted(llm.engine.ids()) == ["n1", "n2", "n3", "n4"]
    assert warm_index(index).unchanged == 4
    served = BlendLLM(server=address, max_new_tokens=8)
    assert BlendRetriever(index.as_retriever(), served).retrieve(QUESTION)
    install()
    chat = index.as_chat_engine(llm=served, chat_mode="context", response_mode="blend")
    first = chat.chat(QUESTION)
    assert first.source_nodes and chat.chat("And where was she born?").source_nodes
    chat.reset()
    assert str(chat.chat(QUESTION)) == str(first)


def test_server_and_engine_exclude_each_other(llm: BlendLLM, address: str, chroma: ChromaVectorStore) -> None:
    with pytest.raises(ConfigError):
        BlendVectorStore(chroma, engine=llm, server=address)
    for options in ({"model": "reference"}, {"store": "./kv"}):
        with pytest.raises(ConfigError):
            BlendLLM(server=address, **options)
