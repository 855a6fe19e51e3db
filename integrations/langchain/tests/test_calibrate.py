"""Calibration of a chain: its own prompts, under its model's settings."""

from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_attachments import calibrate, calibrate_asking
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt
from langchain_cacheblend import BlendVectorStore, ChatBlend

QUESTIONS = ["Who lives there?", "Where is the goat?", "Who bakes bread?", "When does the ferry leave?"]
ASKED: dict[str, Any] = {"ratios": (0.0, 0.5), "target": 0.3, "max_new_tokens": 6}


def test_finds_what_prompts_show(engine: BlendEngine, embedding: Embeddings, chunks: dict[str, str]) -> None:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    store.add_documents([Document(text, id=id) for id, text in chunks.items()])
    blend = BlendConfig(selector="boundary")
    llm = ChatBlend(engine=engine, blend_config=blend, max_tokens=6)
    prompts: list[BlendPrompt] = []

    def remember(value: Any) -> Any:
        prompts.append(llm.blend_prompt(value))
        return value

    found_texts = store.as_retriever(search_kwargs={"k": 2}) | (
        lambda found: "\n\n".join(each.page_content for each in found)
    )
    template = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    chain = {"context": found_texts, "question": RunnablePassthrough()} | template | RunnableLambda(remember) | llm
    found = calibrate_asking((chain | StrOutputParser()).invoke, QUESTIONS, **ASKED)
    assert (found.questions, found.skipped, found.selector) == (4, 0, "boundary")
    assert len(prompts) == 4
    expected = calibrate(engine, prompts, blend=blend, **ASKED)
    assert found.recompute_ratio == expected.recompute_ratio
    assert [row.recovered for row in found.rows] == [row.recovered for row in expected.rows]
