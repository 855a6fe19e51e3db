"""What stands before the context is kept where it is certain that the template alone writes it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core import SummaryIndex
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

from cacheblend_rag import Chunk, FixedText
from integrations.llama_index.tests.conftest import MakeLLM, Nodes, add
from llama_index_cacheblend import BlendContextChatEngine, BlendLLM, BlendSynthesizer
from llama_index_cacheblend.context import make_context_prompt

QUESTION = "Where was Mara Lindell born?"
CHUNK = Chunk("Mara Lindell was born in Tarn.")
SYSTEM, USER, ASSISTANT = MessageRole.SYSTEM, MessageRole.USER, MessageRole.ASSISTANT


def head_of(llm: BlendLLM, template: Any, **values: str) -> str | None:
    """What of a prompt is declared fixed."""
    prompt = make_context_prompt(llm, template, [CHUNK], {"query_str": QUESTION, **values}, keeps_head=True)
    assert prompt.fallback_reason is None
    first = prompt.blend.segments[0]
    if isinstance(first, FixedText):
        assert prompt.text.startswith(first.text + CHUNK.text)
    assert not any(isinstance(segment, FixedText) for segment in prompt.blend.segments[1:])
    return first.text if isinstance(first, FixedText) else None


def messages(*said: tuple[MessageRole, str]) -> ChatPromptTemplate:
    return ChatPromptTemplate([ChatMessage(role=role, content=text) for role, text in said])


FIXED: dict[str, Any] = {
    "default": DEFAULT_TEXT_QA_PROMPT_SEL,
    "plain": PromptTemplate("Facts:\n{context_str}\nQ: {query_str}\nA:"),
    "mapped": PromptTemplate("The {facts}\nQ: {query_str}", template_var_mappings={"context_str": "facts"}),
    "chat": messages((SYSTEM, "Answer from these facts.\n\n{context_str}"), (USER, "{query_str}")),
    "two messages": messages((SYSTEM, "Be brief."), (USER, "Facts: {context_str}\n{query_str}")),
}
ANYBODYS: dict[str, Any] = {
    "question first": PromptTemplate("{query_str}\nFacts:\n{context_str}\nSo?"),
    "partial": PromptTemplate("{tone}\n{context_str}\nQ: {query_str}").partial_format(tone="I am Mara."),
    "function": PromptTemplate("For {who}: {context_str}\n{query_str}", function_mappings={"who": lambda **_: "Mara"}),
    "rich": RichPromptTemplate("Facts:\n{{ context_str }}\nQ: {{ query_str }}"),
    "history": messages((SYSTEM, "Hi."), (USER, "I am Mara."), (ASSISTANT, "Hi."), (USER, "Facts: {context_str}")),
    "system last": messages((USER, "I am Mara."), (SYSTEM, "Facts: {context_str}"), (USER, "{query_str}")),
}


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("name", FIXED)
def test_a_templates_own_words_are_fixed(make_llm: MakeLLM, name: str, chat: bool) -> None:
    head = head_of(make_llm(is_chat_model=chat, system_prompt="Speak plainly."), FIXED[name])
    assert head and QUESTION not in head and CHUNK.text not in head


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("name", ANYBODYS)
def test_what_may_be_anybodys_is_not(make_llm: MakeLLM, name: str, chat: bool) -> None:
    assert head_of(make_llm(is_chat_model=chat, system_prompt="Speak plainly."), ANYBODYS[name]) is None


@given(
    parts=st.lists(st.sampled_from(["Some facts. ", "{query_str}", "{name}", "{{braces}}"]), max_size=4),
    values=st.tuples(*[st.sampled_from(["", "Mara", "Some facts. ", "{context_str}"])] * 2),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_variables_value_is_fixed(make_llm: MakeLLM, parts: list[str], values: tuple[str, str]) -> None:
    llm = _text_model(make_llm)
    template = PromptTemplate("".join(parts) + "{context_str}\nQ: {query_str} {name}")
    head = head_of(llm, template, query_str=values[0], name=values[1])
    words = "".join(parts)
    is_plain = "{query_str}" not in parts and "{name}" not in parts
    assert head == (words if is_plain and words else None)


_made: dict[str, BlendLLM] = {}


def _text_model(make_llm: MakeLLM) -> BlendLLM:
    return _made.setdefault("text", make_llm(is_chat_model=False))


def test_a_synthesizer_keeps_the_head(make_llm: MakeLLM, nodes: Nodes) -> None:
    llm = make_llm()
    add(llm, nodes)
    synthesizer = BlendSynthesizer(llm=llm)
    reports = [synthesizer.synthesize(QUESTION, nodes).metadata["blend"] for _ in range(2)]
    assert reports[0]["head_tokens"] == 0
    assert reports[1]["head_tokens"] > 8
    [name] = llm.engine.heads()
    assert name not in llm.engine.ids()
    llm.engine.delete([name])


def test_no_turn_of_a_chat_is_declared_fixed(make_llm: MakeLLM, nodes: Nodes) -> None:
    llm = make_llm()
    add(llm, nodes)
    index = SummaryIndex([each.node for each in nodes])
    chat = BlendContextChatEngine.from_defaults(retriever=index.as_retriever(), llm=llm, system_prompt="Be kind.")
    for _ in range(2):
        chat.chat(QUESTION)
    assert llm.engine.heads() == []
