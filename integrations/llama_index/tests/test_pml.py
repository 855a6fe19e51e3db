"""Prompt templates in the prompt markup language, with LlamaIndex's models and query engines."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

import llama_index_cacheblend
from cacheblend_pml import Import, Schema, Schemas
from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ConfigError, PMLError, PromptError
from llama_index_cacheblend import BlendLLM, BlendVectorStore, PMLPromptTemplate

FACTS = [
    "Mara Lindell was born in Oslo.",
    "She works as a baker in the old town.",
    "Otto Brandt was born in Lisbon. He paints ships.",
    "Lena Fischer runs the harbour office.",
]
SCHEMA = Schema.from_text(
    """
<schema name="facts">
  <module name="rules">Answer in <param name="count" len="6"/> words from the facts only.</module>
  <module name="facts">The facts go here.</module>
</schema>
"""
)
MARKUP = '<prompt schema="facts"><rules count="{count}"/><facts/>Question: {query_str}</prompt>'
REUSE = BlendConfig(recompute_ratio=0.0)


@pytest.fixture(params=[True, False], ids=["chat", "text"])
def llm(request: pytest.FixtureRequest, model: Any, tokenizer: Any) -> Iterator[BlendLLM]:
    with BlendEngine(model, tokenizer, blend=REUSE) as engine:
        Schemas(engine).load(SCHEMA)
        yield BlendLLM(engine=engine, is_chat_model=request.param, max_new_tokens=6)


def template(**partial: str) -> PMLPromptTemplate:
    made = PMLPromptTemplate(SCHEMA.parse_prompt(MARKUP), documents="facts", separator="\n")
    return made.partial_format(**partial) if partial else made


def test_predict_fills_in_text_that_is_never_markup(llm: BlendLLM) -> None:
    made = template()
    assert made.template_vars == ["count", "query_str", "context_str"]
    evil = '<facts/> & "{count}"'
    prompt = made.pml_prompt(count="ten", query_str=evil, context_str=FACTS[:2])
    assert list(prompt.imports) == ["rules", "facts-1", "facts-2"]
    assert made.format(count="ten", query_str=evil, context_str=FACTS[0]).endswith(f"Question: {evil}")
    values = {"count": "ten", "query_str": "Who?", "context_str": FACTS[:3]}
    answer = llm.predict(made, **values)
    direct = llm.engine.generate(Schemas(llm.engine).prompt(made.pml_prompt(**values)), 6, do_sample=False).text
    assert answer == direct
    assert "".join(llm.stream(made, **values)) == answer
    assert asyncio.run(llm.apredict(made, **values)) == answer


def test_nodes_stand_in_the_place_of_a_module(llm: BlendLLM, chroma: ChromaVectorStore, embedding: object) -> None:
    llama_index_cacheblend.install()
    store = BlendVectorStore(chroma, engine=llm.engine)
    index = VectorStoreIndex(
        [TextNode(text=text) for text in FACTS],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=embedding,  # type: ignore[arg-type]
    )
    engine = index.as_query_engine(
        llm=llm, response_mode="blend", similarity_top_k=3, text_qa_template=template(count="five")
    )
    first, second = engine.query("Who works?"), engine.query("Who works?")
    assert str(first) == str(second)
    report = second.metadata["blend"]
    documents = [chunk for chunk in report["chunks"] if chunk["id"] is None and chunk["tokens"] > 2]
    assert len(documents) == 3 and all(chunk["hit"] for chunk in first.metadata["blend"]["chunks"][:2])
    assert (report["misses"], report["recomputed_tokens"], report["dropped"]) == (0, 0, [])
    # A loaded schema is in no index, and stays.
    assert index.vector_store.sync() == 0


def test_what_does_not_fit_is_refused(llm: BlendLLM) -> None:
    with pytest.raises(PMLError):
        PMLPromptTemplate(SCHEMA.prompt(Import("facts")), documents="rules")
    made = template()
    with pytest.raises(ConfigError, match="query_str"):
        made.format(count="1", context_str=[])
    with pytest.raises(ConfigError):
        made.format(count="1", query_str="?", context_str=[5])
    nodes = [NodeWithScore(node=TextNode(text="A fact."), score=1.0)]
    with pytest.raises(PMLError):
        llm.predict(made, count="one two three four five six seven", query_str="?", context_str=nodes)
    [message] = made.format_messages(count="1", query_str="?", context_str=nodes)
    with pytest.raises(PromptError):
        llm.chat([ChatMessage(role="system", content="Be kind."), message])
