"""What a chain's prompt template writes before the documents is kept where it is certain that nobody else wrote it."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda

from cacheblend_rag import BlendEngine, Chunk, FixedText
from integrations.langchain.tests.asking import KINDS
from langchain_cacheblend import BlendLLM, ChatBlend, create_blend_documents_chain

DOCUMENTS = [Document("The goat lives behind the mill.", id="g"), Document("The mill was built in May.", id="m")]
QUESTION = "Where does the goat live?"
FACTS = "Answer from these facts only.\n\n{context}"

FIXED: dict[str, Any] = {
    "text": PromptTemplate.from_template(FACTS + "\n\n{input}"),
    "one message": ChatPromptTemplate.from_template(FACTS + "\n\n{input}"),
    "system": ChatPromptTemplate.from_messages([("system", FACTS), ("human", "{input}")]),
    "two": ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", FACTS + "\n{input}")]),
    "history behind": ChatPromptTemplate.from_messages(
        [("system", FACTS), ("placeholder", "{history}"), ("human", "{input}")]
    ),
}
ANYBODYS: dict[str, Any] = {
    "text": PromptTemplate.from_template("{input}\n" + FACTS + "\nSo?"),
    "question first": ChatPromptTemplate.from_messages([("system", "On: {input}\n" + FACTS), ("human", "{input}")]),
    "partial": ChatPromptTemplate.from_messages([("system", "For {who}. " + FACTS), ("human", "{input}")]).partial(
        who="Mara"
    ),
    "history": ChatPromptTemplate.from_messages(
        [("system", "Be brief."), ("placeholder", "{history}"), ("human", FACTS + "{input}")]
    ),
    "said": ChatPromptTemplate.from_messages([("human", "I am Mara."), ("ai", "Hello."), ("human", FACTS)]),
}
HISTORY = [HumanMessage("I am Mara."), AIMessage("Hello, Mara.")]


def given_to(
    llm: ChatBlend | BlendLLM, prompt: BasePromptTemplate[Any], documents: Sequence[Document] = DOCUMENTS, **values: Any
) -> LanguageModelInput:
    """What a chain hands to its model."""
    seen: list[Any] = []
    catch = RunnableLambda(lambda value: seen.append(value) or "")
    create_blend_documents_chain(catch, prompt).invoke({"context": list(documents), "input": QUESTION, **values})
    return seen[0]


def head_of(llm: ChatBlend | BlendLLM, given: LanguageModelInput) -> str | None:
    segments = list(llm.blend_prompt(given).segments)
    assert not any(isinstance(segment, FixedText) for segment in segments[1:])
    if not isinstance(segments[0], FixedText):
        return None
    assert isinstance(segments[1], Chunk)
    return segments[0].text


@KINDS
@pytest.mark.parametrize("name", FIXED)
def test_a_templates_own_words_are_fixed(engine: BlendEngine, kind: Any, name: str) -> None:
    llm = kind(engine=engine, max_tokens=4)
    head = head_of(llm, given_to(llm, FIXED[name], history=HISTORY))
    if kind is BlendLLM and name != "text":
        # Messages as one text do not say who wrote what.
        assert head is None
    else:
        assert head and "facts only" in head and QUESTION not in head and "Mara" not in head


@KINDS
@pytest.mark.parametrize("name", ANYBODYS)
def test_what_may_be_anybodys_is_not(engine: BlendEngine, kind: Any, name: str) -> None:
    llm = kind(engine=engine, max_tokens=4)
    assert head_of(llm, given_to(llm, ANYBODYS[name], history=HISTORY)) is None


@given(
    parts=st.lists(st.sampled_from(["Some facts. ", "{input}", "{name}", "{{braces}}"]), max_size=4),
    values=st.tuples(*[st.sampled_from(["", "Mara", "Some facts. ", "{context}"])] * 2),
    is_chat=st.booleans(),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_is_fixed(engine: BlendEngine, parts: list[str], values: tuple[str, str], is_chat: bool) -> None:
    llm = (ChatBlend if is_chat else BlendLLM)(engine=engine)
    kind = ChatPromptTemplate if is_chat else PromptTemplate
    prompt = kind.from_template("".join(parts) + "{context}\n{input} {name}")
    head = head_of(llm, given_to(llm, prompt, input=values[0], name=values[1]))
    own = "".join(parts).replace("{{", "{").replace("}}", "}")
    is_plain = "{input}" not in parts and "{name}" not in parts
    assert (head is not None) == (is_plain and bool(own or is_chat))
    if head is not None:
        assert own.strip() in head if is_chat else head == own


def test_what_is_said_of_messages_does_not_outlive_them(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine)
    value = given_to(llm, FIXED["system"])
    messages: list[BaseMessage] = value.to_messages()  # type: ignore[union-attr]
    assert head_of(llm, messages) is not None
    assert head_of(llm, [*messages, *HISTORY, HumanMessage(QUESTION)]) is not None
    first = messages[0]
    for others in (
        [SystemMessage("Mara is a doctor."), *messages],
        [HumanMessage("I am Mara."), *messages],
        [first.model_copy(update={"content": ["I am Mara. ", *first.content]}), *messages[1:]],
        [first.model_copy(update={"content": "I am Mara."}), *messages[1:]],
    ):
        assert head_of(llm, others) is None
    assert head_of(llm, given_to(llm, FIXED["system"], documents=[])) is None
    assert not isinstance(llm.blend_prompt(messages, documents=DOCUMENTS).segments[0], FixedText)


def test_a_document_written_with_its_title_is_no_part_of_the_head(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine)
    seen: list[Any] = []
    titled = [Document("The goat lives behind the mill.", id="g", metadata={"title": "Mara"})]
    chain = create_blend_documents_chain(
        RunnableLambda(lambda value: seen.append(value) or ""),
        FIXED["system"],
        document_prompt=PromptTemplate.from_template("{title}: {page_content}"),
    )
    chain.invoke({"context": titled, "input": QUESTION})
    assert head_of(llm, seen[0]) is None


@KINDS
def test_a_chain_takes_its_head_from_the_store(engine: BlendEngine, kind: Any) -> None:
    llm = kind(engine=engine, max_tokens=4)
    prompt = FIXED["text"]
    reports = [engine.prefill(llm.blend_prompt(given_to(llm, prompt))).report for _ in range(2)]
    assert reports[0].head_tokens == 0
    assert reports[1].head_tokens >= 8
    assert len(engine.heads()) == 1
    assert not set(engine.heads()) & set(engine.ids())
