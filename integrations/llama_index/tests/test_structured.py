"""Answers that are objects: whole or streamed, blended or not, and what is said of a model that writes something else."""

import json
from collections.abc import Callable
from typing import Any

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
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from cacheblend_rag.errors import StructuredOutputError
from integrations.llama_index.tests.conftest import EventLog, MakeLLM, Nodes, add
from llama_index_cacheblend import BlendLLM, BlendSynthesizer

QUESTION = "Where was Mara Lindell born?"
TEMPLATE = PromptTemplate("Where was {name} born?")


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


# LlamaIndex's own StructuredLLM calls a method that pydantic has given up.
@pytest.mark.filterwarnings("ignore:The `json` method is deprecated")
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
async def test_every_form_gives_the_whole_object(writing: MakeLLM, chat: bool) -> None:
    llm = writing(f"Here it is: {JSON}.", is_chat_model=chat, system_prompt="Be brief.").as_structured_llm(Place)
    assert llm.complete(QUESTION).raw == PLACE
    assert json.loads((await llm.acomplete(QUESTION)).text) == PLACE.model_dump()
    assert llm.chat([ChatMessage(QUESTION)]).raw == (await llm.achat([ChatMessage(QUESTION)])).raw == PLACE
    llm = writing(JSON, is_chat_model=chat)
    partials = list(llm.stream_structured_predict(Place, TEMPLATE, name="Mara"))
    assert partials[-1] == PLACE and len(partials) > 3
    assert [each async for each in await llm.astream_structured_predict(Place, TEMPLATE, name="Mara")][-1] == PLACE
    assert list(llm.as_structured_llm(Place).stream_chat([ChatMessage(QUESTION)]))[-1].raw == PLACE
    assert TEMPLATE.output_parser is None


@pytest.mark.parametrize("text", ["In Oslo, I think.", '{"name": "Oslo"}', '{"name": "Oslo", "peo', "{name: Oslo}"])
async def test_a_model_that_writes_something_else(writing: MakeLLM, nodes: Nodes, text: str) -> None:
    llm = writing(text)
    synthesizer = BlendSynthesizer(llm=llm, output_cls=Place)
    for call in (
        lambda: llm.structured_predict(Place, TEMPLATE, name="Mara"),
        lambda: llm.as_structured_llm(Place).complete(QUESTION),
        lambda: synthesizer.synthesize(QUESTION, nodes),
    ):
        with pytest.raises(StructuredOutputError) as raised:
            call()
        assert raised.value.text == text
    with pytest.raises(StructuredOutputError):
        await llm.astructured_predict(Place, TEMPLATE, name="Mara")
    with pytest.raises(StructuredOutputError):
        await synthesizer.asynthesize(QUESTION, nodes)
    with pytest.raises(StructuredOutputError):
        list(llm.stream_structured_predict(Place, TEMPLATE, name="Mara"))
    with pytest.raises(StructuredOutputError):
        [each async for each in await llm.astream_structured_predict(Place, TEMPLATE, name="Mara")]


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("given", ["output_cls", "structured model"])
async def test_a_synthesizer(writing: MakeLLM, nodes: Nodes, events: EventLog, chat: bool, given: str) -> None:
    llm = writing(JSON, is_chat_model=chat, system_prompt="Speak plainly.")
    add(llm, nodes)
    compact = CompactAndRefine(llm=llm, output_cls=Place).synthesize(QUESTION, nodes)
    options: Any = {"llm": llm, "output_cls": Place} if given == "output_cls" else {"llm": llm.as_structured_llm(Place)}
    blend = BlendSynthesizer(**options).synthesize(QUESTION, nodes)
    ends = [event for event in events.events if isinstance(event, LLMChatEndEvent | LLMCompletionEndEvent)]
    theirs, ours = [event.response.raw for event in ends]
    assert ours["token_ids"] == theirs["token_ids"] and ours["usage"] == theirs["usage"]
    assert isinstance(blend, PydanticResponse)
    assert blend.response == compact.response == PLACE
    assert blend.source_nodes == nodes
    assert [event.output for event in events.of(LLMStructuredPredictEndEvent)] == [PLACE, PLACE]
    if chat:
        # The schema stands outside the chunks, and not in the template that others use.
        assert "Where something is." in str(events.of(LLMChatStartEvent)[-1].messages)
        assert DEFAULT_TEXT_QA_PROMPT_SEL.select(llm).output_parser is None
    for streaming in (False, True):
        response = await BlendSynthesizer(streaming=streaming, **options).asynthesize(QUESTION, nodes)
        assert response.response == PLACE
        assert response.metadata["blend"]["hits"] == len(nodes)


class Age(BaseModel):
    """Whether the age of a person is known."""

    sure: bool


class Node(BaseModel):
    """One of a list that has no end."""

    next: "Node"


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
async def test_a_random_model_writes_what_the_schema_says(make_llm: MakeLLM, nodes: Nodes, chat: bool) -> None:
    llm, template = make_llm(max_new_tokens=40, is_chat_model=chat), PromptTemplate("Is the age of {name} known?")
    said = llm.structured_predict(Age, template, name="Mara")
    assert isinstance(said, Age)
    assert list(llm.stream_structured_predict(Age, template, name="Mara"))[-1] == said
    assert isinstance(BlendSynthesizer(llm=llm, output_cls=Age).synthesize(QUESTION, nodes).response, Age)
    with pytest.raises(StructuredOutputError):
        llm.structured_predict(Age, template, {"max_new_tokens": 3}, name="Mara")
    for ask in (llm.structured_predict, lambda *given, **more: list(llm.stream_structured_predict(*given, **more))):
        with pytest.raises(StructuredOutputError):
            ask(Node, template, name="Mara")
