"""Chat engines: the answers of the model's own generate and of LlamaIndex's engines, what turns pay for, what memory keeps."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from cacheblend_attachments import SourceAttention
from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import FACTS, FORMS, EventLog, MakeLLM, Nodes, ask, own_answer
from llama_index_cacheblend import (
    BlendCondensePlusContextChatEngine,
    BlendContextChatEngine,
    BlendLLM,
    BlendRetriever,
)

ENGINES = {
    "context": (BlendContextChatEngine, ContextChatEngine),
    "condense": (BlendCondensePlusContextChatEngine, CondensePlusContextChatEngine),
}
QUESTIONS = [f"{fact.splitlines()[0]} Is that so?" for fact in FACTS]


class Same(BaseRetriever):
    """Finds the same nodes whatever is asked."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> Nodes:
        return self._nodes


def shown(nodes: Nodes) -> list[tuple[str, float | None, str]]:
    return [(each.node_id, each.score, each.node.get_content()) for each in nodes]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ENGINES)
async def test_all_forms_say_what_generate_says_and_what_llama_index_says(
    kind: str, form: str, llm: BlendLLM, index: VectorStoreIndex, events: EventLog
) -> None:
    full = llm.engine.blend.replace(recompute_ratio=1.0)
    llm = BlendLLM(engine=llm, max_new_tokens=8, blend_config=full)
    ours, theirs = ENGINES[kind]
    retriever = index.as_retriever(similarity_top_k=3)
    chat, unblended = ours.from_defaults(retriever, llm=llm), theirs.from_defaults(retriever, llm=llm)
    for question in QUESTIONS[:3]:
        events.events.clear()
        text, response = await ask(chat, form, question)
        ids = llm.engine.prompt_ids(events.of(LLMChatStartEvent)[-1].additional_kwargs["blend_prompt"])
        raw = events.of(LLMChatEndEvent)[-1].response.raw
        assert raw["token_ids"] == own_answer(llm, ids)
        assert raw["usage"]["prompt_tokens"] == response.metadata["blend"]["prompt_tokens"] == len(ids)
        expected, wanted = await ask(unblended, form, question)
        assert text == expected
        assert shown(response.source_nodes) == shown(wanted.source_nodes)
        assert response.metadata["blend"]["hits"] + response.metadata["blend"]["misses"] == 3
    assert [each.content for each in chat.chat_history] == [each.content for each in unblended.chat_history]
    # What stands before the context may be a conversation's, so it is never kept as a fixed head.
    assert llm.engine.heads() == []


def test_prompts_memory_and_postprocessors(llm: BlendLLM, index: VectorStoreIndex, events: EventLog) -> None:
    memory = ChatMemoryBuffer.from_defaults(token_limit=500, tokenizer_fn=llm.engine.tokenizer.encode)
    chat = BlendContextChatEngine.from_defaults(
        index.as_retriever(similarity_top_k=5),
        llm=llm,
        memory=memory,
        system_prompt="Be brief.",
        node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.99)],
        context_template="Known:\n{context_str}\nThat is all. ",
    )
    assert isinstance(chat._retriever, BlendRetriever)
    response = chat.chat(FACTS[0], chat_history=[ChatMessage(role=MessageRole.USER, content="Before.")])
    assert [each.node_id for each in response.source_nodes] == ["n0"]
    (started,) = events.of(LLMChatStartEvent)
    system, before, asked = started.messages
    assert system.content == f"Known:\n{FACTS[0]}\nThat is all. Be brief."
    assert (before.content, asked.content) == ("Before.", FACTS[0])
    assert [message.role.value for message in memory.get_all()] == ["user", "user", "assistant"]
    assert memory.get_all()[-1].content == response.response


@pytest.mark.parametrize("form", FORMS)
async def test_where_there_is_nothing_to_say(form: str, llm: BlendLLM, index: VectorStoreIndex) -> None:
    nothing = SimilarityPostprocessor(similarity_cutoff=1e9)
    chat = BlendContextChatEngine.from_defaults(index.as_retriever(), llm=llm, node_postprocessors=[nothing])
    answer, response = await ask(chat, form, "Anything?")
    assert (answer, response.source_nodes, response.metadata["blend"]) == ("Empty Response", [], None)
    end = llm.engine.tokenizer.eos_token_id
    llm.generation_kwargs = {"prefix_allowed_tokens_fn": lambda batch, ids: [end], "eos_token_id": end}
    chat = BlendContextChatEngine.from_defaults(index.as_retriever(), llm=llm)
    answer, response = await ask(chat, form, "Anything?")
    assert answer == "Empty Response" and response.metadata["blend"]["output_tokens"] <= 1


async def test_a_cancelled_chat_leaves_memory_and_engine_as_they_were(make_llm: MakeLLM, nodes: Nodes) -> None:
    llm = make_llm(0.15, max_new_tokens=600)
    chat = BlendContextChatEngine.from_defaults(Same(nodes), llm=llm)
    asking = asyncio.create_task(chat.achat(QUESTIONS[0]))
    await asyncio.sleep(0.3)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await chat._memory.aget_all() == []
    llm.max_new_tokens = 8
    response = await chat.achat(QUESTIONS[0])
    assert response.metadata["blend"]["output_tokens"] == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ENGINES)
def test_whose_model(kind: str, llm: BlendLLM, nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ENGINES[kind][0]
    with pytest.raises(ConfigError, match="MockLLM"):
        engine.from_defaults(Same(nodes), llm=MockLLM())
    monkeypatch.setattr(Settings, "_llm", llm)
    chat = engine.from_defaults(Same(nodes), blend_config=BlendConfig(recompute_ratio=0.5))
    assert chat.chat(QUESTIONS[0]).metadata["blend"]["recompute_ratio"] == 0.5
    for blend in ({"recompute_ratio": 0.3}, BlendConfig(selector="hkdv")):
        with pytest.raises(ConfigError):
            engine.from_defaults(Same(nodes), blend_config=blend)


@pytest.mark.parametrize("form", FORMS)
async def test_sources_say_what_became_of_them(form: str, llm: BlendLLM, index: VectorStoreIndex) -> None:
    llm.engine.attach(SourceAttention())
    chat = BlendContextChatEngine.from_defaults(index.as_retriever(similarity_top_k=4), llm=llm)
    llm.engine.delete(["n1"])
    _, response = await ask(chat, form, FACTS[0])
    metadata = {each.node_id: each.node.metadata for each in response.source_nodes}
    shares = [each["blend_attention"] for each in metadata.values()]
    assert all(0 < share < 1 for share in shares) and sum(shares) < 1
    reports = {chunk["id"]: chunk for chunk in response.metadata["blend"]["chunks"]}
    for node_id, found in metadata.items():
        assert found["blend_attention"] == reports[node_id]["attention"]
        assert found["blend_status"] == (reports[node_id]["reason"] or "blended")
    # No model is shown them, and the index does not know of them.
    assert "blend_" not in response.source_nodes[0].node.get_content(metadata_mode="llm")
    again = index.as_retriever(similarity_top_k=4).retrieve(FACTS[0])
    assert all("blend_status" not in each.node.metadata for each in again)


def test_contexts_over_the_window(make_model: Callable[..., Any], make_llm: MakeLLM) -> None:
    llm = make_llm(0.15, model=make_model(200), max_new_tokens=8)
    llm.engine.attach(SourceAttention())
    many = [NodeWithScore(node=TextNode(id_=f"m{number}", text=text)) for number, text in enumerate(FACTS * 4)]
    chat = BlendContextChatEngine.from_defaults(Same(many), llm=llm)
    response = chat.chat("So?")
    report = response.metadata["blend"]
    assert report["earlier_calls"] and report["dropped"] == []
    assert all("blend_attention" in each.node.metadata for each in response.source_nodes)
    assert len(chat.chat_history) == 2
