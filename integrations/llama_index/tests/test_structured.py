"""Answers that are objects: whole or streamed, blended or not, and what is said of a model that writes something else."""

import json
from collections.abc import Callable
from typing import Any

import llama_index.core
import pytest
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.instrumentation.events.llm import (
    LLMChatEndEvent,
    LLMChatStartEvent,
    LLMCompletionEndEvent,
    LLMStructuredPredictEndEvent,
)
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.response_synthesizers import CompactAndRefine
from llama_index.core.types import PydanticProgramMode
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.errors import CacheBlendError, ConfigError, StructuredOutputError
from integrations.llama_index.tests.conftest import EventLog, MakeLLM, Nodes, add
from llama_index_cacheblend import BlendLLM, BlendSynthesizer, install

QUESTION = "Where was Mara Lindell born?"


class Place(BaseModel):
    """Where something is."""

    name: str
    people: int


PLACE = Place(name="Oslo", people=3)
JSON = '{"name": "Oslo", "people": 3}'


class Forced:
    """Lets a model write one text only, as a grammar would; in the form of transformers' ``prefix_allowed_tokens_fn``."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        self._ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        self._start = self._last = 0

    def __call__(self, batch: int, ids: Any) -> list[int]:
        if len(ids) != self._last + 1:
            self._start = len(ids)
        self._last = len(ids)
        return [self._ids[min(len(ids) - self._start, len(self._ids) - 1)]]


@pytest.fixture
def writing(make_llm: MakeLLM, tokenizer: PreTrainedTokenizerFast) -> Callable[..., BlendLLM]:
    def make(text: str, **options: Any) -> BlendLLM:
        forced = {"prefix_allowed_tokens_fn": Forced(tokenizer, text), "eos_token_id": tokenizer.eos_token_id}
        return make_llm(generation_kwargs=forced, max_new_tokens=60, **options)

    return make


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
async def test_as_structured_llm(writing: MakeLLM, chat: bool) -> None:
    llm = writing(f"Here it is: {JSON}.", is_chat_model=chat, system_prompt="Be brief.").as_structured_llm(Place)
    assert llm.complete(QUESTION).raw == PLACE
    assert json.loads((await llm.acomplete(QUESTION)).text) == PLACE.model_dump()
    assert llm.chat([ChatMessage(QUESTION)]).raw == (await llm.achat([ChatMessage(QUESTION)])).raw == PLACE


# LlamaIndex's own StructuredLLM calls a method that pydantic has given up.
@pytest.mark.filterwarnings("ignore:The `json` method is deprecated")
async def test_structured_streams_end_with_the_whole_object(writing: MakeLLM) -> None:
    llm = writing(JSON)
    template = PromptTemplate("Where was {name} born?")
    partials = list(llm.stream_structured_predict(Place, template, name="Mara"))
    assert partials[-1] == PLACE
    assert len(partials) > 3
    assert [each async for each in await llm.astream_structured_predict(Place, template, name="Mara")][-1] == PLACE
    replies = list(llm.as_structured_llm(Place).stream_chat([ChatMessage(QUESTION)]))
    assert replies[-1].raw == PLACE
    assert template.output_parser is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("In Oslo, I think.", "no JSON object in it"),
        ('{"name": "Oslo"}', "people: Field required"),
        ('{"name": "Oslo", "people": "many"}', "people: Input should be a valid integer"),
        ('{"name": "Oslo", "peo', "no JSON object in it"),
        ("{name: Oslo}", "Invalid JSON"),
    ],
)
async def test_a_model_that_writes_others(writing: MakeLLM, nodes: Nodes, text: str, why: str) -> None:
    llm = writing(text)
    template = PromptTemplate("Where was {name} born?")
    synthesizer = BlendSynthesizer(llm=llm, output_cls=Place)
    for call in (
        lambda: llm.structured_predict(Place, template, name="Mara"),
        lambda: llm.as_structured_llm(Place).complete(QUESTION),
        lambda: synthesizer.synthesize(QUESTION, nodes),
    ):
        with pytest.raises(StructuredOutputError, match=f"not a valid Place.*{why}.*max_new_tokens") as raised:
            call()
        assert raised.value.text == text
        assert isinstance(raised.value, CacheBlendError | ValueError)
    with pytest.raises(StructuredOutputError, match=why):
        await llm.astructured_predict(Place, template, name="Mara")
    with pytest.raises(StructuredOutputError, match=why):
        await synthesizer.asynthesize(QUESTION, nodes)
    with pytest.raises(StructuredOutputError, match="not a valid Place"):
        list(llm.stream_structured_predict(Place, template, name="Mara"))
    with pytest.raises(StructuredOutputError, match="not a valid Place"):
        [each async for each in await llm.astream_structured_predict(Place, template, name="Mara")]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("given", ["output_cls", "structured model"])
async def test_objects(writing: MakeLLM, nodes: Nodes, events: EventLog, chat: bool, given: str) -> None:
    install()
    llm = writing(JSON, is_chat_model=chat, system_prompt="Speak plainly.")
    add(llm, nodes)
    compact = CompactAndRefine(llm=llm, output_cls=Place).synthesize(QUESTION, nodes)
    options = {"llm": llm, "output_cls": Place} if given == "output_cls" else {"llm": llm.as_structured_llm(Place)}
    blend = llama_index.core.get_response_synthesizer(response_mode="blend", **options).synthesize(QUESTION, nodes)
    ends = [event for event in events.events if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent)]
    theirs, ours = [event.response.raw for event in ends]
    assert ours["token_ids"] == theirs["token_ids"]
    assert ours["usage"] == theirs["usage"]
    assert compact.metadata["blend"]["output_tokens"] == theirs["usage"]["completion_tokens"]
    assert isinstance(blend, PydanticResponse)
    assert blend.response == compact.response == PLACE
    assert blend.source_nodes == nodes
    assert blend.metadata["blend"]["hits"] == len(nodes)
    assert [event.output for event in events.of(LLMStructuredPredictEndEvent)] == [PLACE, PLACE]
    for streaming in (False, True):
        synthesizer = llama_index.core.get_response_synthesizer(response_mode="blend", streaming=streaming, **options)
        response = await synthesizer.asynthesize(QUESTION, nodes)
        assert response.response == PLACE
        assert response.metadata["blend"]["hits"] == len(nodes)


class Age(BaseModel):
    """Whether the age of a person is known."""

    sure: bool


class Node(BaseModel):
    """One of a list that has no end."""

    next: "Node"


# LlamaIndex's own StructuredLLM calls a method that pydantic has given up.
@pytest.mark.filterwarnings("ignore:The `json` method is deprecated")
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
async def test_a_random_model_writes_what_the_schema_says(make_llm: MakeLLM, nodes: Nodes, chat: bool) -> None:
    llm, template = make_llm(max_new_tokens=40, is_chat_model=chat), PromptTemplate("Is the age of {name} known?")
    said = llm.structured_predict(Age, template, name="Mara")
    assert isinstance(said, Age)
    assert await llm.astructured_predict(Age, template, name="Mara") == said
    assert list(llm.stream_structured_predict(Age, template, name="Mara"))[-1] == said
    assert isinstance(llm.as_structured_llm(Age).complete(QUESTION).raw, Age)
    blend = BlendSynthesizer(llm=llm, output_cls=Age)
    assert isinstance(blend.synthesize(QUESTION, nodes).response, Age)
    with pytest.raises(StructuredOutputError, match="max_new_tokens"):
        llm.structured_predict(Age, template, {"max_new_tokens": 3}, name="Mara")
    for ask in (llm.structured_predict, lambda *given, **more: list(llm.stream_structured_predict(*given, **more))):
        with pytest.raises(ConfigError, match="without an end"):
            ask(Node, template, name="Mara")


def test_the_schema_stands_outside_the_chunks(writing: MakeLLM, nodes: Nodes, events: EventLog) -> None:
    llm = writing(JSON)
    BlendSynthesizer(llm=llm, output_cls=Place).synthesize(QUESTION, nodes)
    (start,) = events.of(LLMChatStartEvent)
    assert "Where something is." in start.messages[0].content
    assert DEFAULT_TEXT_QA_PROMPT_SEL.select(llm).output_parser is None


def test_other_ways_to_objects_are_refused(make_llm: MakeLLM) -> None:
    llm = make_llm(pydantic_program_mode=PydanticProgramMode.FUNCTION)
    with pytest.raises(ConfigError, match="pydantic_program_mode='function'"):
        llm.structured_predict(Place, PromptTemplate("Where?"))
    with pytest.raises(ConfigError, match="pydantic_program_mode"):
        BlendSynthesizer(llm=llm, output_cls=Place)
