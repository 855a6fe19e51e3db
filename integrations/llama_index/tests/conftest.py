"""A tiny random model behind the reference tokenizer, real Chroma, an embedding that needs no model, and each form of asking."""

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import chromadb
import pytest
import torch
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from llama_index.vector_stores.chroma import ChromaVectorStore
from pydantic import Field
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import llama_index_cacheblend
from cacheblend_lab.reference import load_tokenizer
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from llama_index_cacheblend import BlendLLM, BlendVectorStore
from llama_index_cacheblend.nodes import node_chunks
from tests.families import tiny_reader
from tests.limits import one_thread as one_thread

MakeLLM = Callable[..., BlendLLM]
Nodes = list[NodeWithScore]

# At 1 the engine prefills as a whole. This rounds to every row of these short chunks, so that an answer is exact and blended.
EVERY_ROW = 0.999

FACTS = [
    "Mara Lindell was born in Oslo.",
    "She works as a baker in the old town.",
    "Otto Brandt was born in Lisbon.\nHe paints ships.",
    "Lena Fischer runs the harbour office.",
    "The harbour office stands beside the bakery.",
]


@pytest.fixture(scope="session")
def _own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(autouse=True)
def _event_loop(_own_loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Give the tests a loop and close it, since what llama-index-core runs in a loop of its own leaves that open.

    It stays open until the last test: when a `Memory` is collected, its connection's thread still calls the loop of that moment.
    """
    asyncio.set_event_loop(_own_loop)
    yield
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., LlamaForCausalLM]:
    def make(window: int = 1024) -> LlamaForCausalLM:
        return tiny_reader(max_position_embeddings=window, eos_token_id=None)

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_model()


@pytest.fixture
def make_llm(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[MakeLLM]:
    engines: list[BlendEngine] = []

    def make(
        recompute_ratio: float = EVERY_ROW,
        model: Any = model,
        store: Any = None,
        prefix_bytes: int = 0,
        **options: Any,
    ) -> BlendLLM:
        asked = {"recompute_ratio": recompute_ratio, "prefix_bytes": prefix_bytes}
        settings = engine_settings(self_check=False, selector="hkvd", **asked)
        engines.append(BlendEngine(model, tokenizer, store=store, **settings))
        return BlendLLM(engine=engines[-1], **({"max_new_tokens": 12} | options))

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def llm(make_llm: MakeLLM) -> BlendLLM:
    return make_llm()


def own_answer(llm: BlendLLM, ids: Sequence[int]) -> list[int]:
    """The model's own generate, which knows nothing of us."""
    prompt = torch.tensor([list(ids)])
    with torch.no_grad():
        output = llm.engine.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=llm.max_new_tokens, do_sample=False
        )
    return output[0, len(ids) :].tolist()


FORMS = ["sync", "async", "stream", "async stream"]


async def ask(asked: Any, form: str, *given: Any) -> tuple[str, Any]:
    """Ask a query engine or a chat engine a question, or a synthesizer about nodes; return what was said and the response."""
    name = {BaseSynthesizer: "synthesize", BaseChatEngine: "chat"}
    method = next((name[kind] for kind in name if isinstance(asked, kind)), "query")
    method = f"stream_{method}" if method == "chat" and "stream" in form else method
    if "async" in form:
        response = await getattr(asked, f"a{method}")(*given)
    else:
        response = await asyncio.to_thread(getattr(asked, method), *given)
    if form == "stream":
        return await asyncio.to_thread(lambda: "".join(response.response_gen)), response
    if form == "async stream":
        return "".join([piece async for piece in response.async_response_gen()]), response
    return str(response), response


def add(llm: BlendLLM, nodes: Nodes) -> None:
    llm.engine.add(node_chunks(each.node for each in nodes))


@pytest.fixture(autouse=True)
def _not_installed() -> Iterator[None]:
    llama_index_cacheblend.uninstall()
    yield
    llama_index_cacheblend.uninstall()


@pytest.fixture
def chroma() -> Iterator[ChromaVectorStore]:
    client = chromadb.EphemeralClient()
    name = f"test-{uuid.uuid4().hex}"
    yield ChromaVectorStore(chroma_collection=client.create_collection(name))
    client.delete_collection(name)


@pytest.fixture(params=["chroma", "simple"])
def inner(request: pytest.FixtureRequest, chroma: ChromaVectorStore) -> BasePydanticVectorStore:
    return chroma if request.param == "chroma" else SimpleVectorStore()


@pytest.fixture
def index(llm: BlendLLM, chroma: ChromaVectorStore, nodes: Nodes, embedding: "WordEmbedding") -> VectorStoreIndex:
    """An index of the facts whose KV is stored."""
    store = BlendVectorStore(chroma, engine=llm.engine)
    storage = StorageContext.from_defaults(vector_store=store)
    return VectorStoreIndex([each.node for each in nodes], storage_context=storage, embed_model=embedding)


class WordEmbedding(BaseEmbedding):
    """Adds up a random vector for each word, so that texts with the same words are close."""

    def _get_text_embedding(self, text: str) -> list[float]:
        total = torch.zeros(64)
        for word in text.lower().replace(".", " ").replace("?", " ").split():
            seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=6).digest(), "little")
            total += torch.randn(64, generator=torch.Generator().manual_seed(seed))
        return (total / total.norm().clamp_min(1e-6)).tolist()

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


@pytest.fixture(scope="session")
def embedding() -> WordEmbedding:
    return WordEmbedding(model_name="words")


@pytest.fixture
def nodes() -> Nodes:
    return [NodeWithScore(node=TextNode(id_=f"n{n}", text=text), score=1 - n / 10) for n, text in enumerate(FACTS)]


class EventLog(BaseEventHandler):
    events: list[BaseEvent] = Field(default_factory=list)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        self.events.append(event)

    def of(self, kind: type[BaseEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def events() -> Iterator[EventLog]:
    log = EventLog()
    root = get_dispatcher()
    root.event_handlers.append(log)
    yield log
    root.event_handlers.remove(log)
