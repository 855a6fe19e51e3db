"""Answers in a given form."""

from typing import Annotated, Any, Literal, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from pydantic import BaseModel, Field

from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import ConfigError
from langchain_cacheblend import ChatBlend
from langchain_cacheblend.structured import AnswerForm


class Place(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["town", "farm"]


class Person(BaseModel):
    """Somebody."""

    age: int = Field(ge=0, le=150)
    tall: bool
    home: Place | None
    friends: list[Literal["Ann", "Bob"]] = Field(max_length=2)


class PersonDict(TypedDict):
    """Somebody."""

    tall: Annotated[bool, ..., "taller than two metres"]


@pytest.fixture
def llm(engine: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=engine, max_tokens=160)


@pytest.mark.parametrize("temperature", [0, 2.0])
async def test_a_random_model_writes_what_the_schema_says(llm: ChatBlend, temperature: float) -> None:
    structured = llm.with_structured_output(Person, include_raw=False).with_config(tags=["x"])
    bound = ChatBlend(engine=llm.engine, max_tokens=160, temperature=temperature).with_structured_output(Person)
    for runnable in (structured, bound):
        assert isinstance(runnable.invoke("Who?"), Person)
        assert isinstance(await runnable.ainvoke("Who?"), Person)
        assert all(isinstance(person, Person) for person in runnable.stream("Who?"))
    for schema in (
        PersonDict,
        {"title": "T", "type": "object", "properties": {"tall": {"type": "boolean"}}, "required": ["tall"]},
    ):
        value = llm.with_structured_output(schema).invoke("Who?")
        assert list(value) == ["tall"]
        assert isinstance(value["tall"], bool)


def test_the_model_is_told_the_schema(llm: ChatBlend) -> None:
    call = llm._prepared(
        llm._convert_input("Who?").to_messages(),
        None,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "p", "schema": Person.model_json_schema()},
            }
        },
    )
    text = llm.engine.tokenizer.decode(llm.engine.prompt_ids(call.prompt))
    assert "Who?\n\nAnswer with JSON of this schema" in text
    assert '"Somebody."' in text


def test_raw_and_errors(llm: ChatBlend) -> None:
    both = llm.with_structured_output(Person, include_raw=True).invoke("Who?")
    assert isinstance(both["raw"], AIMessage)
    assert isinstance(both["parsed"], Person)
    assert both["parsing_error"] is None
    short = llm.with_structured_output(Person, include_raw=True, max_tokens=3).invoke("Who?")
    assert short["parsed"] is None
    assert "raise max_tokens" in str(short["parsing_error"])
    with pytest.raises(OutputParserException, match="not JSON of the form"):
        llm.with_structured_output(Person, max_tokens=3).invoke("Who?")
    with pytest.raises(ConfigError, match="cannot be enforced"):
        llm.with_structured_output({"title": "T", "type": "object", "properties": {"a": {"not": {"type": "string"}}}})
    for method in ("json", None):
        with pytest.raises(ConfigError, match="not known"):
            llm.with_structured_output(Person, method=method)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="response_format"):
        llm.invoke("Who?", response_format={"type": "xml"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Ann is tall.", "Expecting value"),
        ("[true]", "not an object"),
        ("{}", "tall missing"),
        ('{"tall": ', "Expecting value"),
    ],
)
def test_text_that_is_no_such_json(text: str, problem: str) -> None:
    with pytest.raises(OutputParserException, match=problem):
        AnswerForm(PersonDict).parse(AIMessage(text))


def test_json_in_a_fence_is_json() -> None:
    assert AnswerForm(PersonDict).parse(AIMessage('```json\n{"tall": true}\n```')) == {"tall": True}


def test_json_mode_is_any_object(llm: ChatBlend) -> None:
    ends: dict[Any, float] = {(llm.engine.tokenizer("}", add_special_tokens=False)["input_ids"][0],): 100.0}
    answer = llm.bind(response_format={"type": "json_object"}, sequence_bias=ends).invoke("Who?")
    assert answer.text == "{}"


async def test_a_batch_of_forms_is_answered_as_one_by_one(llm: ChatBlend) -> None:
    structured = llm.with_structured_output(Person)
    questions = ["Who?", "Who lives in the tower by the sea?", "Where?"]
    wanted = [structured.invoke(question) for question in questions]
    assert structured.batch(questions) == wanted
    assert await structured.abatch(questions) == wanted
