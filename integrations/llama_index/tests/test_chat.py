"""Chat engines: the answers of the model's own generate and of LlamaIndex's engines, what turns pay for, what memory keeps."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import pytest
import torch
from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer, Memory
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.schema import QueryBundle
from llama_index.core.storage.chat_store.base_db import MessageStatus
from llama_index.vector_stores.chroma import ChromaVectorStore
from transformers import LogitsProcessor, LogitsProcessorList

from cacheblend_attachments import SourceAttention
from cacheblend_rag import BlendConfig
from cacheblend_rag.errors import CacheBlendError, ConfigError
from integrations.llama_index.tests.conftest import EventLog, MakeLLM, Nodes, WordEmbedding, own_answer
from integrations.llama_index.tests.corpus import corpus
from llama_index_cacheblend import (
    BlendCondensePlusContextChatEngine,
    BlendContextChatEngine,
    BlendLLM,
    BlendRetriever,
    BlendVectorStore,
    install,
    uninstall,
)
from tests.families import tiny_reader

MakeIndex = Callable[..., VectorStoreIndex]
ENGINES = {
    "context": (BlendContextChatEngine, ContextChatEngine),
    "condense": (BlendCondensePlusContextChatEngine, CondensePlusContextChatEngine),
}
TURNS = 3
"""Messages of one conversation, in the table."""


async def _collect(response: StreamingAgentChatResponse) -> str:
    return "".join([piece async for piece in response.async_response_gen()])


def _sync(chat: Any, message: str) -> tuple[str, Any]:
    response = chat.chat(message)
    return response.response, response


def _stream(chat: Any, message: str) -> tuple[str, Any]:
    response = chat.stream_chat(message)
    return "".join(response.response_gen), response


def _async(chat: Any, message: str) -> tuple[str, Any]:
    response = asyncio.run(chat.achat(message))
    return response.response, response


def _async_stream(chat: Any, message: str) -> tuple[str, Any]:
    async def ask() -> tuple[str, Any]:
        response = await chat.astream_chat(message)
        return await _collect(response), response

    return asyncio.run(ask())


FORMS = {"sync": _sync, "stream": _stream, "async": _async, "async stream": _async_stream}


@pytest.fixture(scope="module")
def corpus_index(embedding: WordEmbedding) -> VectorStoreIndex:
    return VectorStoreIndex(corpus().fresh_nodes(), embed_model=embedding)


@pytest.fixture(scope="module")
def reference() -> Iterator[BlendLLM]:
    llm = BlendLLM("reference", blend_config=BlendConfig(recompute_ratio=1.0), max_new_tokens=24)
    yield llm
    llm.engine.close()


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("size", ["tiny", pytest.param("reference", marks=pytest.mark.full)])
def test_at_ratio_1_all_forms_say_what_generate_says_and_what_compact_mode_says(
    kind: str,
    size: str,
    make_llm: MakeLLM,
    corpus_index: VectorStoreIndex,
    events: EventLog,
    request: pytest.FixtureRequest,
) -> None:
    llm = request.getfixturevalue("reference") if size == "reference" else make_llm(1.0, max_new_tokens=8)
    questions = [asked.text for asked in corpus().questions]
    assert (len(corpus().nodes), len(questions)) == (200, 30)
    questions = questions if size == "reference" else questions[: 2 * TURNS]
    ours, theirs = ENGINES[kind]
    retriever = corpus_index.as_retriever(similarity_top_k=3)
    for ask in FORMS.values():
        chat, unblended = ours.from_defaults(retriever, llm=llm), theirs.from_defaults(retriever, llm=llm)
        for number, question in enumerate(questions):
            if number % TURNS == 0:
                chat.reset()
                unblended.reset()
            events.events.clear()
            text, response = ask(chat, question)
            prompt = events.of(LLMChatStartEvent)[-1].additional_kwargs["blend_prompt"]
            raw = events.of(LLMChatEndEvent)[-1].response.raw
            prompt_ids = llm.engine.prompt_ids(prompt)
            assert raw["token_ids"] == own_answer(llm, prompt_ids)
            assert raw["usage"] == {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(raw["token_ids"]),
                "total_tokens": len(prompt_ids) + len(raw["token_ids"]),
            }
            wanted_text, wanted = ask(unblended, question)
            assert text == wanted_text
            assert _shown(response.source_nodes) == _shown(wanted.source_nodes)
            assert len(response.source_nodes) == 3


def _shown(nodes: Nodes) -> list[tuple[str, float | None, str]]:
    return [(each.node_id, each.score, each.node.get_content()) for each in nodes]


@pytest.fixture
def make_index(chroma: ChromaVectorStore, embedding: WordEmbedding) -> Callable[..., VectorStoreIndex]:
    def make(llm: BlendLLM) -> VectorStoreIndex:
        storage = StorageContext.from_defaults(vector_store=BlendVectorStore(chroma, engine=llm.engine))
        return VectorStoreIndex(corpus().fresh_nodes()[:30], storage_context=storage, embed_model=embedding)

    return make


def _retriever(index: VectorStoreIndex, top_k: int = 4) -> Any:
    return index.as_retriever(similarity_top_k=top_k)


def _questions(count: int) -> list[str]:
    return [f"{node.get_content().splitlines()[0]} Is that so?" for node in corpus().nodes[:count]]


class _Same(BaseRetriever):
    """Finds the same nodes whatever is asked."""

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> Nodes:
        return self._nodes


@pytest.mark.parametrize("kind", ENGINES)
def test_a_turn_pays_for_what_is_new(kind: str, make_llm: MakeLLM, make_index: MakeIndex, events: EventLog) -> None:
    llm = make_llm(0.0, model=tiny_reader(max_position_embeddings=4096, eos_token_id=None), prefix_bytes=2**28)
    retriever = _Same(_retriever(make_index(llm)).retrieve("Where?"))
    chat = ENGINES[kind][0].from_defaults(retriever, llm=llm)
    held: list[int] = []
    before = 0
    for question in _questions(6):
        report = chat.chat(question).metadata["blend"]
        ids = llm.engine.prompt_ids(events.of(LLMChatStartEvent)[-1].additional_kwargs["blend_prompt"])
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, ids[:-1], strict=False)))
        assert report["prefix_tokens"] == same >= before
        held = [*ids, *events.of(LLMChatEndEvent)[-1].response.raw["token_ids"][:-1]]
        before = report["prompt_tokens"]
    template = {"context_template" if kind == "context" else "context_prompt": "Else: {context_str}"}
    other = ENGINES[kind][0].from_defaults(retriever, llm=llm, **template)
    assert other.chat(_questions(1)[0]).metadata["blend"]["prefix_tokens"] == 0


def test_prompts_memory_and_postprocessors(make_llm: MakeLLM, make_index: MakeIndex, events: EventLog) -> None:
    llm = make_llm(0.15)
    memory = ChatMemoryBuffer.from_defaults(token_limit=500, tokenizer_fn=llm.engine.tokenizer.encode)
    chat = BlendContextChatEngine.from_defaults(
        _retriever(make_index(llm), 10),
        llm=llm,
        memory=memory,
        system_prompt="Be brief.",
        node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.99)],
        context_template="Known:\n{context_str}\nThat is all. ",
    )
    assert isinstance(chat._retriever, BlendRetriever)
    question = corpus().nodes[0].get_content()
    response = chat.chat(question, chat_history=[ChatMessage(role=MessageRole.USER, content="Before.")])
    assert [each.node_id for each in response.source_nodes] == ["n000"]
    (started,) = events.of(LLMChatStartEvent)
    system, before, asked = started.messages
    assert system.content == f"Known:\n{question}\nThat is all. Be brief."
    assert (before.content, asked.content) == ("Before.", question)
    assert [message.role.value for message in memory.get_all()] == ["user", "user", "assistant"]
    assert memory.get_all()[-1].content == response.response


def test_nothing_retrieved_is_an_empty_response(make_llm: MakeLLM, make_index: MakeIndex) -> None:
    llm = make_llm(0.15)
    nothing = SimilarityPostprocessor(similarity_cutoff=1e9)
    chat = BlendContextChatEngine.from_defaults(_retriever(make_index(llm)), llm=llm, node_postprocessors=[nothing])
    response = chat.chat("Anything?")
    assert (response.response, response.source_nodes) == ("Empty Response", [])
    assert response.metadata["blend"] is None
    assert "".join(chat.stream_chat("Anything?").response_gen) == "Empty Response"
    assert len(chat.chat_history) == 4


class _Fails(LogitsProcessor):
    """Fails at the third token, as often as it is told to."""

    def __init__(self) -> None:
        self.armed = False
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.armed and self.calls >= 3:
            raise RuntimeError("no more")
        return scores


@pytest.fixture
def failing(make_llm: MakeLLM, make_index: MakeIndex) -> tuple[_Fails, BlendContextChatEngine, list[str]]:
    fails = _Fails()
    llm = make_llm(0.15, generation_kwargs={"logits_processor": LogitsProcessorList([fails])})
    chat = BlendContextChatEngine.from_defaults(_retriever(make_index(llm)), llm=llm)
    chat.chat(_questions(1)[0])
    return fails, chat, [str(message.content) for message in chat.chat_history]


# LlamaIndex's thread raises what it has told the reader already.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_that_fails_takes_its_message_back(failing: tuple[_Fails, BlendContextChatEngine, list[str]]) -> None:
    fails, chat, before = failing
    fails.armed, fails.calls = True, 0
    with pytest.raises(RuntimeError, match="no more"):
        "".join(chat.stream_chat(_questions(2)[1]).response_gen)
    assert [message.content for message in chat.chat_history] == before

    async def ask() -> None:
        fails.calls = 0
        await _collect(await chat.astream_chat(_questions(2)[1]))

    with pytest.raises(RuntimeError, match="no more"):
        asyncio.run(ask())
    assert [message.content for message in chat.chat_history] == before
    fails.calls = 0
    with pytest.raises(RuntimeError, match="no more"):
        chat.chat(_questions(2)[1])
    assert [message.content for message in chat.chat_history] == before
    fails.armed = False
    assert chat.chat(_questions(2)[1]).metadata["blend"]["output_tokens"] == 12
    assert len(chat.chat_history) == 4


class _Ends(LogitsProcessor):
    """Ends the answer before its first token, for as long as it is told to."""

    def __init__(self, token_id: int) -> None:
        self.armed = False
        self._token_id = token_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.armed:
            scores = torch.full_like(scores, -1e9)
            scores[:, self._token_id] = 0.0
        return scores


def test_a_stream_without_a_word_is_an_empty_response(make_llm: MakeLLM, make_index: MakeIndex) -> None:
    llm = make_llm(0.15)
    end_id = llm.engine.tokenizer.eos_token_id
    ends = _Ends(end_id)
    llm.generation_kwargs = {"logits_processor": LogitsProcessorList([ends]), "eos_token_id": end_id}
    chat = BlendContextChatEngine.from_defaults(_retriever(make_index(llm)), llm=llm)
    ends.armed = True
    for form in FORMS.values():
        answer, response = form(chat, "Anything?")
        assert answer == "Empty Response"
        assert response.metadata["blend"]["output_tokens"] <= 1
    said = [(message.role.value, message.content) for message in chat.chat_history]
    assert said == [("user", "Anything?"), ("assistant", "Empty Response")] * 4
    ends.armed = False
    assert chat.chat("And now?").response not in ("", "Empty Response")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("form", ["stream", "async stream"])
def test_a_failed_stream_brings_nothing_from_the_archive(form: str, make_llm: MakeLLM, make_index: MakeIndex) -> None:
    fails = _Fails()
    llm = make_llm(0.15, generation_kwargs={"logits_processor": LogitsProcessorList([fails])})
    memory = Memory.from_defaults(token_limit=300, token_flush_size=50, tokenizer_fn=llm.engine.tokenizer.encode)
    chat = BlendContextChatEngine.from_defaults(_retriever(make_index(llm)), llm=llm, memory=memory)
    for number in range(5):
        FORMS[form](chat, f"Question {number} " + "and so on " * 10)

    def kept() -> list[list[tuple[str, str | None]]]:
        return [
            [(each.role.value, each.content) for each in memory.get_all(status)]
            for status in (MessageStatus.ACTIVE, MessageStatus.ARCHIVED, None)
        ]

    before = kept()
    active, archived, everything = before
    assert len(active) > 1 and len(archived) > 1 and everything == archived + active
    fails.armed, fails.calls = True, 0
    with pytest.raises(RuntimeError, match="no more"):
        FORMS[form](chat, "Short?")
    assert kept() == before
    fails.armed = False
    FORMS[form](chat, "And now?")
    assert kept()[2][:-2] == everything


def test_a_cancelled_chat_leaves_memory_and_engine_as_they_were(make_llm: MakeLLM, make_index: MakeIndex) -> None:
    llm = make_llm(0.15, max_new_tokens=600)
    chat = BlendContextChatEngine.from_defaults(_retriever(make_index(llm)), llm=llm)

    async def cancelled() -> None:
        asking = asyncio.create_task(chat.achat(_questions(1)[0]))
        await asyncio.sleep(0.3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await chat._memory.aget_all() == []
        response = await chat.astream_chat(_questions(1)[0])
        pieces = response.async_response_gen()
        await anext(pieces)
        writing = response.awrite_response_to_history_task
        assert writing is not None
        writing.cancel()
        with pytest.raises(CacheBlendError, match="was cancelled"):
            async for _ in pieces:
                pass

    # The reader's generator waits for the cancelled task at its end, too.
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert chat.chat_history == []
    llm.max_new_tokens = 8
    chat = BlendContextChatEngine.from_defaults(chat._retriever, llm=llm)
    assert chat.chat(_questions(1)[0]).metadata["blend"]["output_tokens"] == 8


def test_an_unread_or_closed_stream_is_remembered_whole(make_llm: MakeLLM, make_index: MakeIndex) -> None:
    llm = make_llm(0.15)
    chat = BlendContextChatEngine.from_defaults(_retriever(make_index(llm)), llm=llm)
    unread = chat.stream_chat(_questions(1)[0])
    assert unread.write_response_to_history_thread is not None
    unread.write_response_to_history_thread.join()
    pieces = chat.stream_chat(_questions(2)[1]).response_gen
    next(pieces)
    pieces.close()
    assert [message.role.value for message in chat.chat_history] == ["user", "assistant"] * 2
    assert all(message.content for message in chat.chat_history)
    assert unread.metadata["blend"]["output_tokens"] == 12


def test_as_chat_engine_takes_the_response_mode_after_install(make_llm: MakeLLM, make_index: MakeIndex) -> None:
    llm = make_llm(0.15)
    index = make_index(llm)
    originals = [vars(theirs)["from_defaults"] for _, theirs in ENGINES.values()]
    install()
    install()
    made = {
        mode: index.as_chat_engine(chat_mode=mode, llm=llm, response_mode="blend", similarity_top_k=3)
        for mode in ("context", "condense_plus_context", "best")
    }
    assert isinstance(made["context"], BlendContextChatEngine)
    assert isinstance(made["condense_plus_context"], BlendCondensePlusContextChatEngine)
    assert isinstance(made["best"], BlendCondensePlusContextChatEngine)
    assert made["context"].chat(_questions(1)[0]).metadata["blend"]["hits"] == 3
    plain = index.as_chat_engine(chat_mode="context", llm=llm)
    assert type(plain) is ContextChatEngine
    uninstall()
    uninstall()
    assert [vars(theirs)["from_defaults"] for _, theirs in ENGINES.values()] == originals


@pytest.mark.parametrize("kind", ENGINES)
def test_another_model_is_refused(kind: str, make_llm: MakeLLM, make_index: MakeIndex) -> None:
    retriever = _retriever(make_index(make_llm()))
    with pytest.raises(ConfigError, match="the language model is a MockLLM"):
        ENGINES[kind][0].from_defaults(retriever, llm=MockLLM())


def test_settings_give_the_model(make_llm: MakeLLM, make_index: MakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(0.15)
    monkeypatch.setattr(Settings, "_llm", llm)
    chat = BlendContextChatEngine.from_defaults(
        _retriever(make_index(llm)), blend_config=BlendConfig(recompute_ratio=0.5)
    )
    assert chat.chat(_questions(1)[0]).metadata["blend"]["recompute_ratio"] == 0.5


@pytest.mark.parametrize("form", FORMS)
def test_sources_say_what_became_of_them(form: str, make_llm: MakeLLM, make_index: MakeIndex) -> None:
    llm = make_llm(0.15)
    index = make_index(llm)
    llm.engine.attach(SourceAttention())
    chat = BlendContextChatEngine.from_defaults(_retriever(index), llm=llm)
    llm.engine.delete(["n001"])
    question = corpus().nodes[0].get_content()
    _, response = FORMS[form](chat, question)
    metadata = {each.node_id: each.node.metadata for each in response.source_nodes}
    assert metadata["n000"]["blend_status"] == "blended"
    shares = [each["blend_attention"] for each in metadata.values()]
    assert all(0 < share < 1 for share in shares) and sum(shares) < 1
    reports = {chunk["id"]: chunk for chunk in response.metadata["blend"]["chunks"]}
    for node_id, found in metadata.items():
        assert found["blend_attention"] == reports[node_id]["attention"]
        assert found["blend_status"] == (reports[node_id]["reason"] or "blended")
    # No model is shown them, and the index does not know of them.
    assert "blend_" not in response.source_nodes[0].node.get_content(metadata_mode="llm")  # type: ignore[arg-type]
    again = index.as_retriever(similarity_top_k=4).retrieve(question)
    assert all("blend_status" not in each.node.metadata for each in again)
    _, second = FORMS[form](chat, question)
    assert second.metadata["blend"]["misses"] == 0


def test_contexts_over_the_window(make_model: Callable[..., Any], make_llm: MakeLLM, make_index: MakeIndex) -> None:
    llm = make_llm(0.15, model=make_model(200), max_new_tokens=8)
    index = make_index(llm)
    llm.engine.attach(SourceAttention())
    chat = BlendContextChatEngine.from_defaults(_retriever(index, 12), llm=llm)
    response = chat.chat(_questions(1)[0])
    report = response.metadata["blend"]
    assert report["earlier_calls"] and report["dropped"] == []
    assert all("blend_attention" in each.node.metadata for each in response.source_nodes)
    assert len(chat.chat_history) == 2
