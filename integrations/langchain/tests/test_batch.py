"""Every input of a batch is answered as it is alone."""

import asyncio
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from cacheblend_rag import BlendEngine, Chunk
from cacheblend_rag.errors import PromptTooLongError
from integrations.langchain.tests.asking import KINDS, Kind, text_of
from langchain_cacheblend import BlendLLM

TOKENS = 6
QUESTIONS = ["Who?", "Where is it?", "What is the goat called, and where does it live?", "And then?", "Why?"]


@pytest.fixture
def prompts(engine: BlendEngine, chunks: dict[str, str]) -> list[str]:
    engine.add(Chunk(text, id) for id, text in chunks.items())
    texts = list(chunks.values())
    return ["\n\n".join([*texts[: number % 4], question]) for number, question in enumerate(QUESTIONS)]


@KINDS
def test_a_batch_is_answered_as_one_by_one(kind: Kind, engine: BlendEngine, prompts: list[str]) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS, cache=InMemoryCache())
    chain = ChatPromptTemplate.from_template("{text}") | kind(engine=engine, max_tokens=TOKENS) | StrOutputParser()
    wanted = [text_of(kind(engine=engine, max_tokens=TOKENS).invoke(prompt)) for prompt in prompts]
    # Of the second batch the cache has some.
    assert [text_of(answer) for answer in llm.batch(prompts[:3], {"max_concurrency": 2})] == wanted[:3]
    assert [text_of(answer) for answer in llm.batch(prompts)] == wanted
    assert [text_of(answer) for answer in asyncio.run(llm.abatch(prompts))] == wanted
    inputs = [{"text": prompt} for prompt in prompts]
    assert chain.batch(inputs) == asyncio.run(chain.abatch(inputs)) == [chain.invoke(each) for each in inputs]
    assert llm.batch([]) == asyncio.run(llm.abatch([])) == []


def test_prompts_of_one_call_are_decoded_together(engine: BlendEngine, prompts: list[str]) -> None:
    llm = BlendLLM(engine=engine, max_tokens=TOKENS)
    wanted = [llm.invoke(prompt) for prompt in prompts]
    for result in (llm.generate(prompts), asyncio.run(llm.agenerate(prompts))):
        assert [generations[0].text for generations in result.generations] == wanted
        assert {generations[0].generation_info["blend"]["batch_size"] for generations in result.generations} == {5}


@KINDS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_inputs_fail_alone(kind: Kind, asynchronous: bool, engine: BlendEngine, prompts: list[str]) -> None:
    llm = kind(engine=engine, max_tokens=TOKENS)
    inputs = [*prompts[:2], "far too long " * 2000, *prompts[3:]]

    def answer(**options: Any) -> list[Any]:
        return asyncio.run(llm.abatch(inputs, **options)) if asynchronous else llm.batch(inputs, **options)

    answers = answer(return_exceptions=True)
    assert isinstance(answers.pop(2), PromptTooLongError)
    assert [text_of(each) for each in answers] == [text_of(llm.invoke(each)) for each in (*prompts[:2], *prompts[3:])]
    with pytest.raises(PromptTooLongError):
        answer()
