"""Agents with middleware: the documents that their tools found are chunks as long as they stand in the prompt as they are."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ClearToolUsesEdit, ContextEditingMiddleware, SummarizationMiddleware
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.messages.tool import tool_call
from langchain_core.tools import BaseTool, create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from integrations.langchain.tests.asking import Reports
from langchain_cacheblend import BlendVectorStore, ChatBlend
from tests.families import tiny_reader
from tests.thinking import knows_tags


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[BlendEngine]:
    shows = knows_tags(tokenizer)
    with BlendEngine(tiny_reader(vocab_size=len(shows)), shows, **engine_settings(self_check=False)) as engine:
        yield engine


@pytest.fixture
def search(engine: BlendEngine, embedding: Any, chunks: dict[str, str]) -> BaseTool:
    store = BlendVectorStore(InMemoryVectorStore(embedding), engine=engine)
    store.add_texts(list(chunks.values()), ids=list(chunks))
    return create_retriever_tool(store.as_retriever(search_kwargs={"k": 2}), "search", "Looks it up.")


def turns(search: BaseTool, *questions: str) -> list[AnyMessage]:
    """A conversation in which all but the last question were answered, each by what a search found."""
    messages: list[AnyMessage] = []
    for number, question in enumerate(questions):
        call = tool_call(name="search", args={"query": question}, id=str(number))
        found = search.invoke(call)
        assert isinstance(found, ToolMessage)
        messages += [HumanMessage(question), AIMessage("", tool_calls=[call]), found, AIMessage("So it is.")]
    return messages[:-1]


def reports(engine: BlendEngine, search: BaseTool, messages: Sequence[AnyMessage], *middleware: Any) -> list[Any]:
    reported = Reports()
    agent = create_agent(ChatBlend(engine=engine, max_tokens=4), [search], middleware=middleware)
    agent.invoke({"messages": list(messages)}, {"callbacks": [reported]})
    return reported.reports


class Shorten:
    """Leaves out the last letter of what a tool found."""

    def apply(self, messages: list[AnyMessage], **counting: Any) -> None:
        for number, message in enumerate(messages):
            if isinstance(message, ToolMessage):
                messages[number] = message.model_copy(update={"content": message.text[:-1]})


def test_what_stays_is_a_hit_and_what_is_edited_is_text(engine: BlendEngine, search: BaseTool) -> None:
    messages = turns(search, "Who was born in Oslo?", "Where is the goat?")
    [plain] = reports(engine, search, messages)
    assert (plain["hits"], plain["misses"]) == (4, 0)
    clears = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1, keep=1)])
    [cleared] = reports(engine, search, messages, clears)
    assert (cleared["hits"], cleared["misses"]) == (2, 0)
    assert cleared["prompt_tokens"] < plain["prompt_tokens"]
    # Of the two texts of a search the first is still what was stored.
    [shortened] = reports(engine, search, messages, ContextEditingMiddleware(edits=[Shorten()]))
    assert (shortened["hits"], shortened["misses"]) == (2, 0)


def test_what_is_summed_up_is_text_and_what_is_kept_a_hit(engine: BlendEngine, search: BaseTool) -> None:
    messages = turns(search, "Who was born in Oslo?", "Where is the goat?")
    sums_up = SummarizationMiddleware(
        ChatBlend(engine=engine, max_tokens=4), trigger=("messages", 7), keep=("messages", 3)
    )
    summary, answer = reports(engine, search, messages, sums_up)
    # The summary is asked for with what the first search found.
    assert (summary["hits"], summary["misses"]) == (2, 0)
    assert (answer["hits"], answer["misses"]) == (2, 0)
