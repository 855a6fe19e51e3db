import sys
from typing import Any

import llama_index.core
import pytest
from llama_index.core import (
    KnowledgeGraphIndex,
    PromptHelper,
    PropertyGraphIndex,
    SimpleKeywordTableIndex,
    StorageContext,
    SummaryIndex,
    TreeIndex,
    VectorStoreIndex,
)
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.indices.property_graph import ImplicitPathExtractor
from llama_index.core.llms import MockLLM
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer, ResponseMode, factory
from llama_index.vector_stores.chroma import ChromaVectorStore

from cacheblend_rag.errors import ConfigError
from integrations.llama_index.tests.conftest import Nodes, WordEmbedding
from llama_index_cacheblend import (
    BlendContextChatEngine,
    BlendLLM,
    BlendRetriever,
    BlendSynthesizer,
    BlendVectorStore,
    install,
    uninstall,
)

# Two modes without a language model want one all the same.
OTHER_MODES = [mode for mode in ResponseMode if mode not in (ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY)]
QUESTION = "Where was Mara Lindell born?"


def holders() -> dict[str, Any]:
    """LlamaIndex's modules that hold the function; chat engines have another one of that name."""
    found = {
        name: vars(module).get("get_response_synthesizer")
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "llama_index"
    }
    return {name: each for name, each in found.items() if getattr(each, "__module__", "") == factory.__name__}


@pytest.fixture
def index(llm: BlendLLM, chroma: ChromaVectorStore, nodes: Nodes, embedding: WordEmbedding) -> VectorStoreIndex:
    store = BlendVectorStore(chroma, engine=llm.engine)
    return VectorStoreIndex(
        [each.node for each in nodes],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=embedding,
    )


def test_nothing_is_patched_by_importing() -> None:
    assert len(holders()) > 10
    assert set(holders().values()) == {factory.get_response_synthesizer}
    assert not hasattr(factory.get_response_synthesizer, "__wrapped__")


def test_unknown_before_and_after(index: VectorStoreIndex, llm: BlendLLM) -> None:
    before = holders()
    with pytest.raises(ValueError, match="Unknown mode"):
        index.as_query_engine(response_mode="blend", llm=llm)
    install()
    ours = set(holders().values())
    assert len(ours) == 1
    install()
    assert set(holders().values()) == ours
    assert index.as_query_engine(response_mode="blend", llm=llm)
    uninstall()
    assert holders() == before
    uninstall()
    assert holders() == before
    with pytest.raises(ValueError, match="Unknown mode"):
        index.as_query_engine(response_mode="blend", llm=llm)


def test_modules_imported_in_between_are_restored() -> None:
    name = "llama_index.core.query_engine.multistep_query_engine"
    original = factory.get_response_synthesizer
    install()
    kept = sys.modules.pop(name)
    try:
        __import__(name)
        assert sys.modules[name].get_response_synthesizer is not original
        uninstall()
        assert sys.modules[name].get_response_synthesizer is original
    finally:
        sys.modules[name] = kept
        uninstall()
        kept.get_response_synthesizer = original  # it was out of reach


def test_other_doors(index: VectorStoreIndex, llm: BlendLLM, nodes: Nodes) -> None:
    install()
    retriever = index.as_retriever(similarity_top_k=2)
    engine = RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode="blend")
    assert engine.query(QUESTION).metadata["blend"]["hits"] == 2
    synthesizer = llama_index.core.get_response_synthesizer(llm, response_mode="blend")
    assert isinstance(synthesizer, BlendSynthesizer)
    memory = ChatMemoryBuffer.from_defaults([ChatMessage("Hello")], token_limit=500)
    chat = index.as_chat_engine("condense_question", llm=llm, response_mode="blend", similarity_top_k=2, memory=memory)
    assert chat.chat(QUESTION).source_nodes
    summary = SummaryIndex([each.node for each in nodes]).as_query_engine(response_mode="blend", llm=llm)
    assert summary.query(QUESTION).metadata["blend"]["hits"] == len(nodes)


def test_options_of_the_factory_arrive(llm: BlendLLM, nodes: Nodes) -> None:
    install()
    helper = PromptHelper(context_window=900, num_output=20, tokenizer=str.split)
    synthesizer = llama_index.core.get_response_synthesizer(
        llm, prompt_helper=helper, refine_template=PromptTemplate("{context_msg}"), response_mode="blend"
    )
    assert synthesizer._prompt_helper is helper
    assert synthesizer.get_prompts()["refine_template"].template == "{context_msg}"


@pytest.mark.parametrize("kind", ["summary", "keyword", "tree", "tree leaves"])
def test_indices_without_vectors_blend_what_they_retrieve(llm: BlendLLM, nodes: Nodes, kind: str) -> None:
    install()
    plain = [each.node for each in nodes]
    index = {
        "summary": lambda: SummaryIndex(plain),
        "keyword": lambda: SimpleKeywordTableIndex(plain, llm=llm),
        "tree": lambda: TreeIndex(plain, llm=llm),
        "tree leaves": lambda: TreeIndex(plain, llm=llm),
    }[kind]()
    options = {"tree": {"retriever_mode": "root"}, "tree leaves": {"retriever_mode": "all_leaf"}}.get(kind, {})
    compact = index.as_query_engine(llm=llm, **options).query(QUESTION)
    engine = index.as_query_engine(llm=llm, response_mode="blend", **options)
    first, second = engine.query(QUESTION), engine.query(QUESTION)
    assert str(first) == str(second) == str(compact)
    count = len(compact.source_nodes)
    assert count > 0
    assert (first.metadata["blend"]["misses"], second.metadata["blend"]["hits"]) == (count, count)


# LlamaIndex has given this index up, and people still have it.
@pytest.mark.filterwarnings("ignore:Call to deprecated class")
def test_indices_that_rewrite_are_refused(llm: BlendLLM, nodes: Nodes, embedding: WordEmbedding) -> None:
    def triplets(text: str) -> list[tuple[str, str, str]]:
        first, *_, last = text.split()
        return [(first, "is", last)]

    plain = [each.node for each in nodes]
    graph = KnowledgeGraphIndex(plain, llm=llm, embed_model=embedding, kg_triplet_extract_fn=triplets)
    properties = PropertyGraphIndex(plain, kg_extractors=[ImplicitPathExtractor()], embed_model=embedding, llm=llm)
    install()
    for index, name in ((graph, "KGTableRetriever"), (properties, "PGRetriever")):
        with pytest.raises(ConfigError, match=f"cannot be used with a {name}: .*use compact mode"):
            index.as_query_engine(llm=llm, response_mode="blend")
        with pytest.raises(ConfigError, match=name):
            index.as_query_engine(llm=llm, response_synthesizer=BlendSynthesizer(llm=llm))
        wrapped = BlendRetriever(BlendRetriever(index.as_retriever(), llm), llm)
        with pytest.raises(ConfigError, match=f"cannot be used with a {name}"):
            RetrieverQueryEngine.from_args(wrapped, llm=llm, response_mode="blend")
        assert index.as_query_engine(llm=llm)
    uninstall()
    assert not hasattr(RetrieverQueryEngine.from_args, "__wrapped__")


@pytest.mark.parametrize("mode", OTHER_MODES)
def test_other_modes_are_as_they_were(llm: BlendLLM, mode: ResponseMode) -> None:
    before = type(factory.get_response_synthesizer(llm=llm, response_mode=mode))
    install()
    assert type(llama_index.core.get_response_synthesizer(llm=llm, response_mode=mode)) is before


@pytest.mark.parametrize("options", [{"multimodal": True}, {"structured_answer_filtering": True}], ids=str)
def test_what_cannot_be_combined_is_refused(llm: BlendLLM, options: dict[str, Any]) -> None:
    install()
    with pytest.raises(ConfigError, match=f"{next(iter(options))} cannot be combined"):
        llama_index.core.get_response_synthesizer(llm=llm, response_mode="blend", **options)


def test_another_language_model_is_refused(index: VectorStoreIndex) -> None:
    install()
    with pytest.raises(ConfigError, match="needs a BlendLLM"):
        index.as_query_engine(response_mode="blend", llm=MockLLM())


@pytest.mark.parametrize(
    ("where", "name", "said"),
    [
        (factory, "get_response_synthesizer", r"llama-index-core \d.*text_qa_template.*BlendSynthesizer"),
        (BaseSynthesizer, "asynthesize", "changed has no parameter additional_source_nodes, response_kwargs"),
    ],
)
def test_a_changed_llama_index_is_refused(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, said: str) -> None:
    def changed(self: Any, query: Any, nodes: Any) -> None: ...

    monkeypatch.setattr(where, name, changed)
    before = holders()
    with pytest.raises(ConfigError, match=said):
        install()
    assert holders() == before


class WithoutDefaults(ContextChatEngine):
    """A chat engine that is made in another way."""


class Sealed(type):
    """Makes classes of which nothing can be replaced."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{name} cannot be set")


class SealedEngine(metaclass=Sealed):
    """Looks like a chat engine that can be extended."""

    @classmethod
    def from_defaults(cls, retriever: Any, chat_history: Any, memory: Any, llm: Any) -> None: ...


@pytest.mark.parametrize("engine", [WithoutDefaults, SealedEngine])
def test_an_unfinished_install_leaves_nothing(engine: type, monkeypatch: pytest.MonkeyPatch) -> None:
    before = holders(), vars(ContextChatEngine)["from_defaults"], vars(RetrieverQueryEngine)["from_args"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules[install.__module__].CHAT_ENGINES, engine, BlendContextChatEngine)
        with pytest.raises((ConfigError, TypeError), match=r"WithoutDefaults\.from_defaults is not|cannot be set"):
            install()
    after = holders(), vars(ContextChatEngine)["from_defaults"], vars(RetrieverQueryEngine)["from_args"]
    assert after == before
    install()
    uninstall()
    assert holders() == before[0]
